//! How a client is: the truth of the moment about its connections, consumers, publishers, callers and pools.

use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};
use tokio::time::Instant;

use super::managed::{ManagedConnection, State};
use crate::error::Error;

/// What [`Client::health`](super::Client::health) found.
///
/// It can be serialized, as the answer of a health endpoint: `{"healthy": true, "connections": [..], ..}`.
#[derive(Clone, Debug)]
pub struct Health {
    /// The client's connections.
    pub connections: Vec<ConnectionHealth>,
    /// The consumers that were begun and not stopped.
    pub consumers: Vec<ConsumerHealth>,
    /// The publishers with confirms.
    pub publishers: Vec<PublisherHealth>,
    /// Those who call services, or gather.
    pub callers: Vec<CallerHealth>,
    /// The channel pools.
    pub pools: Vec<PoolHealth>,
}

impl Health {
    /// Whether all connections are up, with their whole topology, and none is blocked, all consumers get messages, no publisher is
    /// held back, and no pool lacks a channel that it could not open. What callers were told last is not counted: they try again
    /// only when they call.
    pub fn is_healthy(&self) -> bool {
        self.connections.iter().all(ConnectionHealth::is_ready)
            && self.consumers.iter().all(|consumer| consumer.is_live)
            && self.publishers.iter().all(PublisherHealth::is_ready)
            && self.pools.iter().all(|pool| pool.error.is_none())
    }
}

impl Serialize for Health {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Health", 6)?;
        fields.serialize_field("healthy", &self.is_healthy())?;
        fields.serialize_field("connections", &self.connections)?;
        fields.serialize_field("consumers", &self.consumers)?;
        fields.serialize_field("publishers", &self.publishers)?;
        fields.serialize_field("callers", &self.callers)?;
        fields.serialize_field("pools", &self.pools)?;
        fields.end()
    }
}

/// How long ago that was, in seconds.
fn seconds_since<S: Serializer>(
    since: &(impl Copy + Into<Option<Instant>>),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    (*since).into().map(|since| since.elapsed().as_secs_f64()).serialize(serializer)
}

fn text<S: Serializer>(error: &Option<Error>, serializer: S) -> Result<S::Ok, S::Error> {
    error.as_ref().map(ToString::to_string).serialize(serializer)
}

/// Objects with the errors that they have met.
fn texts<S: Serializer>(failed: &[(String, Error)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(failed.iter().map(|(object, error)| (object, error.to_string())))
}

/// One connection.
#[derive(Clone, Debug, Serialize)]
pub struct ConnectionHealth {
    /// Its name, as the broker's management pages show it.
    pub name: String,
    /// Whether it is there, and the broker answers.
    #[serde(rename = "up")]
    pub is_up: bool,
    /// The broker it is connected to.
    pub endpoint: Option<String>,
    /// Why the broker takes no publishes on it, while it does not.
    pub blocked: Option<String>,
    /// Which objects of the topology could not be declared on it, and why. The client tries again.
    #[serde(serialize_with = "texts")]
    pub not_restored: Vec<(String, Error)>,
    /// Why it is not there.
    #[serde(serialize_with = "text")]
    pub error: Option<Error>,
}

impl ConnectionHealth {
    /// Whether it is up, with its topology, and not blocked.
    pub fn is_ready(&self) -> bool {
        self.is_up && self.blocked.is_none() && self.not_restored.is_empty()
    }
}

/// One consumer.
#[derive(Clone, Debug, Serialize)]
pub struct ConsumerHealth {
    /// The queue it consumes.
    pub queue: String,
    /// Whether the broker delivers to it.
    #[serde(rename = "live")]
    pub is_live: bool,
    /// Since when it has been so.
    #[serde(rename = "seconds", serialize_with = "seconds_since")]
    pub since: Instant,
    /// Why not.
    #[serde(serialize_with = "text")]
    pub error: Option<Error>,
}

/// One publisher.
#[derive(Clone, Debug, Serialize)]
pub struct PublisherHealth {
    /// The exchange it publishes to.
    pub exchange: String,
    /// How many of its messages have no outcome yet.
    pub unconfirmed: usize,
    /// Since when what is published waits: there is no channel, the broker takes no publishes, or it has not confirmed the oldest
    /// message for more than ten seconds.
    #[serde(rename = "held_back_seconds", serialize_with = "seconds_since")]
    pub held_back_since: Option<Instant>,
    /// Why the broker takes no publishes, while it does not.
    pub blocked: Option<String>,
    /// Why it will never publish again.
    #[serde(serialize_with = "text")]
    pub error: Option<Error>,
}

impl PublisherHealth {
    /// Whether the broker takes what is published.
    pub fn is_ready(&self) -> bool {
        self.held_back_since.is_none() && self.error.is_none()
    }
}

/// One who calls a service, or gathers.
#[derive(Clone, Debug, Serialize)]
pub struct CallerHealth {
    /// What it does: `calling service "prices"`.
    pub what: String,
    /// How many of its calls have no reply yet.
    pub in_flight: usize,
    /// Why the broker did not let it call the last time, or why it will never call again.
    #[serde(serialize_with = "text")]
    pub error: Option<Error>,
}

/// One channel pool.
#[derive(Clone, Debug, Serialize)]
pub struct PoolHealth {
    /// How many channels it is to have; 0 if each borrower gets one of its own.
    pub size: usize,
    /// How many of them are open; one that is borrowed counts, since only its borrower knows.
    pub open: usize,
    /// How many nobody uses, open or to be opened for the next borrower.
    pub idle: usize,
    /// How many are lent.
    pub borrowed: usize,
    /// How many borrowers wait for one.
    pub waiting: usize,
    /// Why the last channel that was to be opened could not be.
    #[serde(serialize_with = "text")]
    pub error: Option<Error>,
}

pub(crate) fn of_line(line: &ManagedConnection) -> ConnectionHealth {
    let mut health = ConnectionHealth {
        name: line.name.clone(),
        is_up: false,
        endpoint: None,
        blocked: None,
        not_restored: line.not_restored(),
        error: None,
    };
    match line.state() {
        State::Up(up) => {
            let is_unanswered = up.connection.is_unanswered();
            health.is_up = up.connection.is_usable() && !is_unanswered;
            health.error = is_unanswered.then(|| Error::unanswered(&up.endpoint));
            health.endpoint = Some(up.endpoint.to_string());
            health.blocked = line.blocked().map(|blocked| blocked.reason);
        }
        State::Down(error) => health.error = error,
        State::Ended(error) => health.error = Some(error),
    }
    health
}
