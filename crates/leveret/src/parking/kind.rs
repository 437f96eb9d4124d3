//! Of what kind a queue is: whether it may count what is given back, and whether it deletes itself. Brokers do not tell that to
//! who asks, but in what they refuse.
//!
//! ```text
//!  consume with an argument of streams   --> 406: ... of queue type rabbit_quorum_queue       with the permission to read
//!  declare with a type that there is not --> 406: auto_delete is another one, namely true     with the one to configure
//! ```
//!
//! Neither has an effect: nothing is delivered, and no queue made, even if it is gone meanwhile. A stream is the only queue that
//! takes the first one, and there it means to wait for what is yet to come. Passive declarations would need no permission, and
//! tell nothing: their arguments are not looked at.
//!
//! Each question costs a channel, and the broker a line in its log. So the answers are remembered.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::amqp::{Channel, ConsumeOptions, Error, QueueOptions, Table, Value, lock};
use crate::connection::{Client, version};
use crate::error::Conflict;

const OF_STREAMS: &str = "x-stream-offset";
const TYPE: &str = "x-queue-type";
/// What the broker calls a stream.
const STREAM: &str = "rabbit_stream_queue";
const NO_TYPE: &str = "leveret-asks-what-it-is";

/// Brokers before this one are not known to refuse arguments of consumers.
const CHECKS_CONSUMERS: (u32, u32) = (3, 10);

/// What matters about a queue to who looks into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A quorum queue, or there is no telling.
    MayBeQuorum,
    /// A stream: nothing is taken out of it.
    Stream,
    /// It is gone with its last consumer, and its messages with it.
    DeletesItself,
    /// The same, or not: this user is not told.
    MayDeleteItself,
    Other,
}

/// The kind of a queue, remembered or asked for.
pub(super) async fn kind_of(client: &Client, queue: &str, version: (u32, u32)) -> Kind {
    let kinds = &client.core().kinds;
    if let Some(kind) = kinds.get(queue) {
        return kind;
    }
    let kind = ask(client, queue, version).await;
    kinds.remember(queue, kind);
    kind
}

async fn ask(client: &Client, queue: &str, version: (u32, u32)) -> Kind {
    let queue_type = match version >= CHECKS_CONSUMERS {
        true => type_of(client, queue).await,
        false => None,
    };
    // No others delete themselves.
    let is_classic = match queue_type.as_deref() {
        Some("rabbit_classic_queue") => true,
        Some("rabbit_quorum_queue") => return Kind::MayBeQuorum,
        Some(STREAM) => return Kind::Stream,
        Some(_) => return Kind::Other,
        None => false,
    };
    match deletes_itself(client, queue).await {
        Some(true) => Kind::DeletesItself,
        _ if !is_classic => Kind::MayBeQuorum,
        Some(false) => Kind::Other,
        None => Kind::MayDeleteItself,
    }
}

/// The same, as it is now and not as it is remembered.
pub(crate) async fn kind_now(client: &Client, queue: &str) -> Result<Kind, crate::Error> {
    let version = version(client.core().home().up().await?.connection.server_properties());
    Ok(ask(client, queue, version).await)
}

/// What the broker calls the type of a queue.
async fn type_of(client: &Client, queue: &str) -> Option<String> {
    let arguments = Table::from_pairs([(OF_STREAMS, Value::from("next"))]).ok()?;
    let options = ConsumeOptions { arguments, prefetch: 1, ..ConsumeOptions::default() };
    let consume = move |channel: Channel| {
        let options = options.clone();
        async move { channel.consume(queue, options).await.map(drop) }
    };
    match refusal(client, consume).await? {
        None => Some(STREAM.to_owned()),
        Some(text) => text.rsplit_once(" of queue type ").map(|(_, name)| name.trim().to_owned()),
    }
}

/// Whether a queue deletes itself, if the broker tells.
async fn deletes_itself(client: &Client, queue: &str) -> Option<bool> {
    let arguments = Table::from_pairs([(TYPE, Value::from(NO_TYPE))]).ok()?;
    // That is what is compared first.
    for durable in [true, false] {
        let arguments = arguments.clone();
        let options = QueueOptions { durable, arguments, ..QueueOptions::default() };
        let declare = move |channel: Channel| {
            let options = options.clone();
            async move { channel.declare_queue(queue, options).await.map(drop) }
        };
        let conflict = Conflict::read(queue, &refusal(client, declare).await??)?;
        match conflict.argument.as_str() {
            "durable" => {}
            "auto_delete" => return Some(conflict.found == "true"),
            _ => return Some(false),
        }
    }
    None
}

/// What the broker says against something, if it does; nothing if it cannot be asked.
async fn refusal<F>(client: &Client, attempt: impl Fn(Channel) -> F) -> Option<Option<String>>
where
    F: Future<Output = Result<(), Error>>,
{
    let attempt = |channel| {
        let attempt = attempt(channel);
        async move {
            match attempt.await {
                Ok(()) => Ok(None),
                Err(error) if error.is_connection_error() => Err(error),
                Err(error) => Ok(Some(error.to_string())),
            }
        }
    };
    client.on_channel("asking what kind of queue it is", attempt).await.ok()
}

/// What a client remembers of queues. It forgets what it deletes, all when it declares or connects anew, and a queue that
/// somebody had trouble to look into.
#[derive(Debug, Default)]
pub(crate) struct Kinds(Mutex<HashMap<String, (Kind, Instant)>>);

/// How many are remembered; beyond this all are asked for again.
const MAX_KNOWN: usize = 1000;

/// How long that a queue counts nothing is relied on: somebody may have made it anew as another one, and that would cost messages.
/// To take it for a quorum queue costs none.
const TRUSTED_FOR: Duration = Duration::from_secs(60);

impl Kinds {
    fn get(&self, queue: &str) -> Option<Kind> {
        let (kind, since) = *lock(&self.0).get(queue)?;
        (kind == Kind::MayBeQuorum || since.elapsed() < TRUSTED_FOR).then_some(kind)
    }

    fn remember(&self, queue: &str, kind: Kind) {
        let mut kinds = lock(&self.0);
        if kinds.len() >= MAX_KNOWN {
            kinds.clear();
        }
        kinds.insert(queue.to_owned(), (kind, Instant::now()));
    }

    pub(crate) fn forget(&self, queue: &str) {
        lock(&self.0).remove(queue);
    }

    pub(crate) fn forget_all(&self) {
        lock(&self.0).clear();
    }
}
