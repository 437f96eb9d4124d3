//! Delayed messages: the broker keeps them until their time has come, without a plugin.
//!
//! ```text
//!  publish_in --> Steps: the delay in binary --> Ready: ladder and target are declared, once
//!                                                  |
//!  message + headers of its bits and target ------> publisher of the exchange leveret.delay --> the ladder
//! ```

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::amqp::{Connection, Properties, Table, Value};
use crate::connection::managed::State;
use crate::connection::{Client, version};
use crate::error::{Error, ErrorKind};
use crate::forwarder::{ForwardedMessage, kept};
use crate::message::{IntoMessage, Message};
use crate::publisher::{Publisher, Ticket};
use crate::retry::stamp;
use crate::topology::{QueueType, Topology};

pub(crate) mod ladder;
pub(crate) mod ready;
mod relay;
mod room;
mod steps;

use ladder::{Target, header};
use ready::Ready;
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
    /// that to a second. A message is never early. The delay counts from when the broker takes the message. With no
    /// delay it is published as by [`publish`](Publisher::publish).
    ///
    /// The message waits in quorum queues that dead-letter at least once, unless [`Delays::declare`] has made classic ones.
    /// RabbitMQ has such queues from 3.10 on, with the feature flag `stream_queue`. Then a node that is killed loses no
    /// message. One that was moving between two queues may come twice, and three minutes late.
    ///
    /// # On the way
    ///
    /// Messages wait in queues `leveret.delay.00` to `.30`, each of which has one waiting time, so that none waits behind a
    /// longer one. They are made when they are first needed, or by [`Delays::declare`]. A message keeps its routing key,
    /// properties and headers, and gets some more headers of text that begin with `leveret-delay-`. A queue target gets it
    /// with these and with what the broker says of its waits in `x-death` and `x-first-death-*`; an exchange to which a client
    /// takes it gets it without. Where it was dead-lettered before is forgotten. If it has an expiration, that waits in the header `x-leveret-expiration`
    /// and does not come back: no broker can put it back in place. Give the target queue a TTL instead. On RabbitMQ 4.0
    /// to 4.2 the same goes for a priority (`x-leveret-priority`) where messages wait in quorum queues: there, a message of
    /// high priority holds up others.
    ///
    /// The broker notes in the headers where a message has waited. If there is no room for that in a frame, the message is
    /// refused ([`ErrorKind::Invalid`]).
    ///
    /// A delay is no retry, and is not counted as one.
    ///
    /// # When its time has come
    ///
    /// The target, a queue if this publisher's is the default exchange and else its exchange, has to exist when the
    /// message is published: otherwise the error is [`ErrorKind::Missing`]. If it is deleted before the message is
    /// due, the message is parked in the queue `leveret.delay.unroutable`, see [`Delays::unroutable`].
    ///
    /// If the target exchange is there, but has no queue for the message, it is parked in the same place. The broker would drop
    /// it; so the last step to an exchange is taken by a client, which hears of it: each that has published with a delay to
    /// an exchange, or was told to [`relay`](Delays::relay), does so for the messages of all, until it is closed. **If no
    /// such client is there, what is due to exchanges waits in the queue `leveret.delay.relay` until one is**, and
    /// comes late, but is not lost. The message may come twice if something breaks, as with any confirmed publish. What the
    /// client cannot publish for another reason, because its user may not or a queue is full, waits longer and longer, a
    /// quarter of an hour in all, and is then parked. A `user-id` is kept in the header `x-leveret-user-id` if the client
    /// that takes the step is another user's.
    ///
    /// No client is needed for an exchange that this one has declared with `leveret.delay.unroutable` as its
    /// [alternate](crate::Exchange::alternate): there the broker takes the step.
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
        let core = self.client().core();
        let target = core.remembered.look(|known| Target::of(known, self.exchange(), routing_key));
        let (body, mut properties) = addressed(message, &target, steps)?;
        room::check(self.client(), &properties, routing_key, steps).await?;
        let ready = Ready::of(core);
        let is_relayed = matches!(target, Target::Relayed(_));
        ready.ensure(self.client(), steps.top(), Some(target)).await?;
        if is_relayed {
            ready.relay(self.client());
        }
        if ready.has_quorum() && priorities_overtake(self.client()) {
            level_priority(&mut properties)?;
        }
        let message = Message::with_properties(body, properties);
        let core = Arc::clone(core);
        // A queue of the ladder was deleted. The next message declares it again.
        let was_deleted = move || Ready::of(&core).was_deleted(ladder::ENTRY);
        self.companion(ladder::ENTRY, was_deleted).await?.send(routing_key, message).await
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
    put(&mut headers, header::LEVEL, steps.top().to_string())?;
    for (level, waits) in steps.below_top() {
        put(&mut headers, &header::bit(level), waits.to_string())?;
    }
    let (name, value) = target.header();
    put(&mut headers, name, value)?;
    if matches!(target, Target::Relayed(_))
        && let Some(copies) = headers.remove("BCC")
    {
        // The client that sends it on has to know of them.
        put(&mut headers, kept::BLIND_COPIES, copies)?;
    }
    if let Some(expiration) = properties.expiration.take() {
        // It may not expire while it waits.
        put(&mut headers, kept::EXPIRATION, expiration.to_str_lossy().as_ref())?;
    }
    properties.headers = Some(headers);
    Ok((body, properties))
}

/// The priority that a quorum queue takes a message for that has none.
const USUAL_PRIORITY: u8 = 4;

/// Whether a message of higher priority overtakes others in a quorum queue, and holds up their expiration: RabbitMQ 4.0 to
/// 4.2, and maybe a broker of unknown version. Quorum queues of 3.10 to 3.13 have no priorities; those of 4.3 look for
/// expired messages of each priority.
fn priorities_overtake(client: &Client) -> bool {
    match client.core().home().state() {
        State::Up(up) => match version(up.connection.server_properties()) {
            (0, 0) => true,
            version => ((4, 0)..(4, 3)).contains(&version),
        },
        State::Down(_) | State::Ended(_) => true,
    }
}

/// All messages wait with the same priority, so that none holds up others.
fn level_priority(properties: &mut Properties<'static>) -> Result<(), Error> {
    match properties.priority {
        Some(priority) if priority != USUAL_PRIORITY => {
            properties.priority = Some(USUAL_PRIORITY);
            let headers = properties.headers.get_or_insert_default();
            put(headers, kept::PRIORITY, priority.to_string())
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
    remove_where(headers, is_past);
}

fn remove_where(headers: &mut Table<'_>, is_meant: impl Fn(&str) -> bool) {
    let names = headers.iter().map(|(name, _)| name.to_str_lossy().into_owned());
    let meant: Vec<String> = names.filter(|name| is_meant(name)).collect();
    for name in meant {
        headers.remove(name);
    }
}

/// Removes what led a message through the ladder. Earlier versions wrote numbers and truth values there, and Orb's programs
/// refuse a message with any header that is neither text nor a list.
pub(crate) fn forget_steps(parcel: &mut ForwardedMessage) {
    let Some(headers) = &mut parcel.properties.headers else { return };
    remove_where(headers, |name| name.starts_with(header::PREFIX));
    if headers.is_empty() {
        parcel.properties.headers = None;
    }
    let priority = parcel.header(kept::PRIORITY).and_then(|priority| stamp::count(&priority));
    if let Some(priority) = priority {
        parcel.set_header(kept::PRIORITY, priority.to_string());
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
/// delays.declare(QueueType::Quorum).await?; // all 31 levels now; by default each level when it is first needed
/// println!("{} wait, {} found nobody", delays.pending().await?, delays.unroutable().await?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Delays {
    client: Client,
}

impl Client {
    /// Binds targets of delayed messages again: a target that was deleted and is declared now has lost its binding.
    pub(crate) async fn bind_delayed(&self, connection: &Connection, topology: &Topology) {
        let core = self.core();
        let bindings = Ready::of(core).bindings_for(topology);
        if bindings.is_empty() {
            return;
        }
        let (_, failed) = core.remembered.apply(connection, &bindings).await;
        for (name, error) in failed {
            tracing::warn!("delayed messages will be parked: cannot restore {name}: {error}");
        }
    }

    /// The delayed messages: how many there are, and where they wait.
    pub fn delays(&self) -> Delays {
        Delays::new(self.clone())
    }
}

impl Delays {
    pub(crate) fn new(client: Client) -> Self {
        Delays { client }
    }

    /// Declares the queues in which delayed messages wait, all of them. Without it, they are quorum queues. If they exist
    /// with another type, it is an error of the kind [`ErrorKind::Conflict`]; publishing uses them as they are, and says so
    /// once in the log.
    ///
    /// Quorum queues are replicated, and let go of a message only once it has arrived in the next queue. If a node fails
    /// in that moment, the message may come three minutes late, since RabbitMQ waits as long before it sends it again.
    /// Classic queues do not wait for the next one: **a node that fails in that moment loses the message.** A broker
    /// before RabbitMQ 3.10 has nothing else: there, declare classic queues before the first delayed message.
    pub async fn declare(&self, queue_type: QueueType) -> Result<(), Error> {
        if queue_type == QueueType::Stream {
            let text = "messages cannot wait in streams: choose classic or quorum queues";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ready::of(self.client.core()).declare(&self.client, queue_type).await
    }

    /// Takes the last step of delayed messages to exchanges, of all clients, until this one is closed. Whoever publishes
    /// with a delay to an exchange does so without being told; this is for programs that stay where those that publish come
    /// and go. See [`Publisher::publish_in`].
    pub async fn relay(&self) -> Result<(), Error> {
        let ready = Ready::of(self.client.core());
        ready.ensure(&self.client, 0, None).await?;
        ready.relay(&self.client);
        Ok(())
    }

    /// How many messages wait. The queues are asked one after the other: what moves meanwhile may be counted twice, or not,
    /// and what is between two queues is not counted. So are messages for a target that is full: at most 32 of them wait between the
    /// last queue and the target.
    pub async fn pending(&self) -> Result<u64, Error> {
        let mut pending = self.ready_in(ladder::EXIT).await? + self.ready_in(ladder::RELAY).await?;
        for level in 0..LEVELS {
            pending += self.ready_in(&ladder::name(level)).await?;
        }
        Ok(pending)
    }

    /// How many messages are parked in the queue `leveret.delay.unroutable`: their target was gone when they were due, had no
    /// queue for them, or would not take them for a quarter of an hour.
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
