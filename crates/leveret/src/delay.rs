//! Delayed messages: the broker keeps them until their time has come, without a plugin.
//!
//! ```text
//!  publish_in --> Steps: the delay in binary --> Ready: ladder and target are declared, once
//!                                                  |
//!  message + headers of its bits and target ------> publisher of the exchange leveret.delay --> the ladder
//! ```

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::amqp::{Properties, Table, Value};
use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::message::{IntoMessage, Message};
use crate::mover::kept;
use crate::publisher::{Publisher, Ticket};
use crate::topology::QueueType;

pub(crate) mod ladder;
pub(crate) mod ready;
mod relay;
mod steps;

use ladder::{Target, header};
use steps::{LEVELS, Steps};

impl Publisher {
    /// Publishes a message that arrives after a delay, and waits until the broker has taken it: it is safe from then on.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), leveret::Error> {
    /// use std::time::Duration;
    /// use leveret::{Client, Queue, Topology};
    ///
    /// let client = Client::embedded().await?; // or Client::connect("amqp://localhost")
    /// client.apply(&Topology::new().queue(Queue::quorum("reminders"))).await?;
    ///
    /// let publisher = client.publisher("").build().await?;
    /// publisher.publish_in("reminders", "renew the domain", Duration::from_secs(360 * 86_400)).await?;
    /// publisher.publish_in("reminders", "drink some water", Duration::from_secs(3600)).await?;
    /// assert_eq!(client.delays().pending().await?, 2);
    ///
    /// let mut reminders = client.consumer("reminders").stream().await?;
    /// let first = reminders.next().await.expect("a reminder")?; // an hour later
    /// assert_eq!(first.body(), "drink some water");
    /// first.ack()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Delays are up to eight years and a half long, and are rounded up: up to ten minutes to an eighth of a second, beyond
    /// that to a second. A message is never early; it is late by what the broker takes, a few milliseconds for each
    /// queue that it waits in. The delay counts from when the broker takes the message. With no delay it is published as
    /// by [`publish`](Publisher::publish).
    ///
    /// # On the way
    ///
    /// Messages wait in queues `leveret.delay.00` to `.30`, each of which has one waiting time, so that none waits behind a
    /// longer one. They are made when they are first needed, or by [`Delays::declare`]. A message keeps its routing key,
    /// properties and headers, and gets some more headers that begin with `leveret-delay-`, and `x-death`. Where it
    /// was dead-lettered before is forgotten. If it has an expiration, that waits in the header `x-leveret-expiration`
    /// and does not come back: no broker can put it back in place. Give the target queue a TTL instead. Where the
    /// messages wait in quorum queues, the same goes for a priority (`x-leveret-priority`): it would let one message hold
    /// up others.
    ///
    /// A delay is no retry, and is not counted as one.
    ///
    /// # When its time has come
    ///
    /// The target, a queue if this publisher's is the default exchange and else its exchange, has to exist when the
    /// message is published: otherwise the error is [`ErrorKind::Missing`]. If it is deleted before the message is
    /// due, the message is parked in the queue `leveret.delay.unroutable`, see [`Delays::unroutable`].
    ///
    /// If the target exchange is there, but has no queue for the message, it is parked in the same place by the client: each
    /// that has published with a delay to an exchange takes the last step for the messages of all, until it is closed. The
    /// message may then come twice if something breaks, as with any confirmed publish. **If no such client is there, or if the
    /// message has `BCC` or a `user-id`, the broker takes that step, and drops what the exchange has no queue for**, as it
    /// does with everything that is dead-lettered; the message is two seconds late then. Where that can happen, give the
    /// exchange an [alternate](crate::Exchange::alternate): `leveret.delay.unroutable` will do.
    ///
    /// `CC` and `BCC` are honoured by the target exchange. With the default exchange they are refused: publish a message for
    /// each queue.
    ///
    /// The user needs the permission to configure, write and read `leveret\.delay.*`, and to bind the target (write).
    pub async fn publish_in(
        &self,
        routing_key: &str,
        message: impl IntoMessage,
        delay: Duration,
    ) -> Result<(), Error> {
        self.send_in(routing_key, message, delay).await?.await
    }

    /// Publishes a message that arrives at a time, or at once if that has passed, and waits until the broker has taken
    /// it. See [`publish_in`](Publisher::publish_in).
    ///
    /// The time is turned into a delay by the clock of this machine, now: if the broker is away for a while before it
    /// takes the message, that comes on top.
    pub async fn publish_at(
        &self,
        routing_key: &str,
        message: impl IntoMessage,
        time: SystemTime,
    ) -> Result<(), Error> {
        self.publish_in(routing_key, message, until(time)).await
    }

    /// Publishes a message that arrives after a delay, and gives a ticket to await the outcome by. See
    /// [`publish_in`](Publisher::publish_in), and [`send`](Publisher::send) for what it waits for.
    pub async fn send_in(
        &self,
        routing_key: &str,
        message: impl IntoMessage,
        delay: Duration,
    ) -> Result<Ticket, Error> {
        let Some(steps) = Steps::of(delay)? else { return self.send(routing_key, message).await };
        let message = message.into_message()?;
        let target = Target::of(self.exchange(), routing_key, can_be_relayed(&message));
        let (body, mut properties) = addressed(message, &target, steps)?;
        let ready = &self.client().core().delays;
        let is_relayed = matches!(target, Target::Relayed(_));
        ready.ensure(self.client(), steps.top(), target).await?;
        if is_relayed {
            ready.relay(self.client());
        }
        if ready.has_quorum() {
            level_priority(&mut properties)?;
        }
        let message = Message::with_properties(body, properties);
        self.to_ladder().await?.send(routing_key, message).await
    }

    /// Publishes a message that arrives at a time, and gives a ticket to await the outcome by. See
    /// [`publish_at`](Publisher::publish_at).
    pub async fn send_at(
        &self,
        routing_key: &str,
        message: impl IntoMessage,
        time: SystemTime,
    ) -> Result<Ticket, Error> {
        self.send_in(routing_key, message, until(time)).await
    }
}

fn until(time: SystemTime) -> Duration {
    time.duration_since(SystemTime::now()).unwrap_or_default()
}

/// Whether a client can send it on as it is: the broker takes `BCC` away before anybody sees it, and a `user-id` from
/// nobody but that user.
fn can_be_relayed(message: &Message) -> bool {
    let Some(extra) = &message.extra else { return true };
    let headers = extra.properties.headers.as_ref();
    let is_copied_blind = headers.is_some_and(|headers| headers.get("BCC").is_some());
    !is_copied_blind && extra.properties.user_id.is_none()
}

/// A message's body and properties, with what leads it through the ladder.
fn addressed(
    message: Message,
    target: &Target,
    steps: Steps,
) -> Result<(Bytes, Properties<'static>), Error> {
    message.check()?;
    let Message { body, extra } = message;
    let mut properties = extra.map(|extra| extra.properties).unwrap_or_default();
    let mut headers = properties.headers.take().unwrap_or_default();
    if matches!(target, Target::Queue(_)) && has_copies(&headers) {
        let text = "a delayed message cannot have CC or BCC with the default exchange: publish one for each queue, or use \
                    an exchange that the queues are bound to";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    forget_the_past(&mut headers);
    put(&mut headers, header::LEVEL, i64::from(steps.top()))?;
    for (level, waits) in steps.below_top() {
        put(&mut headers, &header::bit(level), waits)?;
    }
    let (name, value) = target.header();
    put(&mut headers, name, value)?;
    if let Some(expiration) = properties.expiration.take() {
        // It may not expire while it waits.
        put(&mut headers, kept::EXPIRATION, expiration.to_str_lossy().as_ref())?;
    }
    properties.headers = Some(headers);
    Ok((body, properties))
}

/// The priority that a quorum queue takes a message for that has none.
const USUAL_PRIORITY: u8 = 4;

/// In quorum queues (from 4.0 on) a message of higher priority overtakes the others, and nothing behind the first one
/// expires: they would wait until its time has come. So all wait with the same.
fn level_priority(properties: &mut Properties<'static>) -> Result<(), Error> {
    match properties.priority {
        Some(priority) if priority != USUAL_PRIORITY => {
            properties.priority = Some(USUAL_PRIORITY);
            let headers = properties.headers.get_or_insert_default();
            put(headers, kept::PRIORITY, i64::from(priority))
        }
        _ => Ok(()),
    }
}

fn put<'v>(headers: &mut Table<'_>, name: &str, value: impl Into<Value<'v>>) -> Result<(), Error> {
    headers
        .insert(name, value)
        .map_err(|error| Error::caused(ErrorKind::Invalid, format!("header {name:?}"), error))
}

fn has_copies(headers: &Table<'_>) -> bool {
    headers.get("CC").is_some() || headers.get("BCC").is_some()
}

/// Removes what an earlier delay or dead-lettering left. RabbitMQ before 4.0 believes the `x-death` of a client: it would
/// take a second time in a queue of the ladder for a cycle, and drop the message.
fn forget_the_past(headers: &mut Table<'_>) {
    let is_past = |name: &str| {
        name == "x-death"
            || [header::PREFIX, "x-first-death-", "x-last-death-"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
    };
    let names = headers.iter().map(|(name, _)| name.to_str_lossy().into_owned());
    let past: Vec<String> = names.filter(|name| is_past(name)).collect();
    for name in past {
        headers.remove(name);
    }
}

/// The delayed messages of a virtual host, those of all clients: see [`Publisher::publish_in`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use leveret::{Client, QueueType};
///
/// let client = Client::embedded().await?;
/// let delays = client.delays();
/// delays.declare(QueueType::Quorum).await?; // otherwise of the broker's default type, when first needed
/// println!("{} wait, {} found nobody", delays.pending().await?, delays.unroutable().await?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Delays {
    client: Client,
}

impl Delays {
    pub(crate) fn new(client: Client) -> Self {
        Delays { client }
    }

    /// Declares the queues in which delayed messages wait, all of them. If they exist with another type, it is an error of
    /// the kind [`ErrorKind::Conflict`]; publishing uses them as they are.
    ///
    /// Quorum queues are replicated, and let go of a message only once it has arrived in the next queue. If a node fails
    /// in that moment, the message may come three minutes late, since RabbitMQ waits as long before it sends it again.
    /// Classic queues do not wait for the next one: a node that fails in that moment may lose the message.
    pub async fn declare(&self, queue_type: QueueType) -> Result<(), Error> {
        if queue_type == QueueType::Stream {
            let text = "messages cannot wait in streams: choose classic or quorum queues";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        self.client.core().delays.declare(&self.client, queue_type).await
    }

    /// How many messages wait. The queues are asked one after the other: what moves meanwhile may be counted twice, or not,
    /// and what is between two queues is not counted.
    pub async fn pending(&self) -> Result<u64, Error> {
        let mut pending = self.ready_in(ladder::EXIT).await? + self.ready_in(ladder::RELAY).await?;
        for level in 0..LEVELS {
            pending += self.ready_in(&ladder::name(level)).await?;
        }
        Ok(pending)
    }

    /// How many messages are parked in the queue `leveret.delay.unroutable`: their target was gone when they were due, or had
    /// no queue for them.
    pub async fn unroutable(&self) -> Result<u64, Error> {
        self.ready_in(ladder::UNROUTABLE).await
    }

    /// A queue that does not exist, since it was not needed yet, has none.
    async fn ready_in(&self, queue: &str) -> Result<u64, Error> {
        match self.client.inspect_queue(queue).await {
            Ok(info) => Ok(info.messages.into()),
            Err(error) if error.kind() == ErrorKind::Missing => Ok(0),
            Err(error) => Err(error),
        }
    }
}
