//! Publishing the rows of a batch.

use leveret::{Error, ErrorKind, Ticket};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Shared;
use super::waves::Waves;
use crate::dialect::{Refused, Row, Settled};

/// What became of a batch.
#[derive(Debug, Default)]
pub(super) struct Sent {
    pub(super) settled: Settled,
    /// For how long those that were sent had been waiting, in seconds.
    pub(super) ages: Vec<f64>,
    /// Why the rest was not sent, if that has nothing to do with the messages.
    pub(super) broker: Option<Error>,
}

/// A message that is under way, or why it is not.
struct UnderWay {
    row: Row,
    outcome: Result<Ticket, Fault>,
}

/// Why a message was not sent.
enum Fault {
    /// What is in its row cannot be read.
    Unreadable(String),
    Failed(Error),
}

/// Publishes rows, wave by wave, until all have their outcome, the time is over, the broker is away or the relay stops.
pub(super) async fn publish(
    shared: &Shared,
    rows: Vec<Row>,
    stopped: &watch::Receiver<bool>,
) -> Sent {
    let deadline = Instant::now() + shared.settings.patience;
    let mut waves = Waves::new(rows, shared.settings.order);
    let mut sent = Sent::default();
    sent.settled.keep = shared.settings.keep.is_some();
    loop {
        let wave = waves.next();
        if wave.is_empty() {
            return sent;
        }
        for under_way in send(shared, wave, &mut sent).await {
            settle(shared, under_way, &mut waves, &mut sent).await;
        }
        if sent.broker.is_some() || *stopped.borrow() || Instant::now() >= deadline {
            return sent;
        }
    }
}

/// Sends the messages of a wave, in order. If the broker takes no more, the rest is not even tried.
async fn send(shared: &Shared, wave: Vec<Row>, sent: &mut Sent) -> Vec<UnderWay> {
    let mut all = Vec::with_capacity(wave.len());
    for mut row in wave {
        let outcome = match row.take_message() {
            Ok(message) => send_one(shared, &row, message).await.map_err(Fault::Failed),
            Err(fault) => Err(Fault::Unreadable(fault)),
        };
        if let Err(Fault::Failed(error)) = &outcome
            && !is_of_message(shared, error)
        {
            sent.broker = Some(error.clone());
            break;
        }
        all.push(UnderWay { row, outcome });
    }
    all
}

async fn send_one(shared: &Shared, row: &Row, message: leveret::Message) -> Result<Ticket, Error> {
    let publisher = shared.publishers.to(&row.exchange, row.mandatory).await?;
    publisher.send(&row.routing_key, message).await
}

/// Waits for the outcome of a message, and notes it.
async fn settle(shared: &Shared, under_way: UnderWay, waves: &mut Waves, sent: &mut Sent) {
    let UnderWay { row, outcome } = under_way;
    let outcome = match outcome {
        Ok(ticket) => ticket.await.map_err(Fault::Failed),
        Err(fault) => Err(fault),
    };
    let (error, again_in) = match outcome {
        Ok(()) => {
            sent.settled.sent.push(row.id);
            sent.ages.push(row.age);
            return;
        }
        Err(Fault::Unreadable(fault)) => (fault, None),
        Err(Fault::Failed(error)) if is_of_message(shared, &error) => {
            let tries = row.attempts.unsigned_abs();
            let again = tries + 1 < shared.settings.attempts;
            let again_in = again.then(|| shared.settings.backoff.longest(tries));
            (error.to_string(), again_in)
        }
        Err(Fault::Failed(error)) => {
            waves.hold(row.ordering_key.as_deref());
            sent.broker.get_or_insert(error);
            return;
        }
    };
    waves.hold(row.ordering_key.as_deref());
    let Row { id, exchange, routing_key, .. } = row;
    sent.settled.refused.push(Refused { id, exchange, routing_key, error, again_in });
}

/// Whether the broker has something against this message, and not against us.
fn is_of_message(shared: &Shared, error: &Error) -> bool {
    use ErrorKind::{Broker, Invalid, Missing, Nacked, Payload, Refused, Unroutable};
    match error.kind() {
        Unroutable | Nacked | Missing | Invalid | Payload | Broker => true,
        // One may not publish there; or not even log in.
        Refused => shared.is_connected(),
        _ => false,
    }
}
