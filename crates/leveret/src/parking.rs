//! Parking lots: looking at messages that are not tried again, and replaying them.

use std::ops::ControlFlow;
use std::time::Duration;

use tokio::time::sleep;

use crate::connection::{Client, ClientEvent};
use crate::error::{Error, ErrorKind};

mod acks;
mod convoy;
mod doubtful;
mod filter;
mod groups;
mod hand;
mod held;
mod json;
pub(crate) mod kind;
mod mark;
mod message;
mod pace;
mod run;
mod staying;
mod target;
mod task;
mod transfer;
mod walk;
mod written;

pub use filter::Filter;
pub use groups::Group;
pub use message::{ParkedMessage, PastError, Story};
pub use target::{Draft, Target};
pub use task::{NotDone, Progress, Task};
pub use transfer::{Export, Import, Imported};

pub(crate) use hand::Hands;
pub(crate) use kind::Kinds;
pub(crate) use mark::key_without_mark;

use groups::Groups;
use task::Action;

/// The least pause between two looks at the depth.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

/// A queue with messages that failed. From [`Client::parking_lot`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::Error> {
/// use std::time::Duration;
/// use leveret::{Client, Failure, Filter, Message, Queue, Topology};
///
/// let client = Client::embedded().await?;
/// client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
/// let publisher = client.publisher("").build().await?;
/// publisher.publish("jobs", Message::new("job 1").message_id("1")).await?;
///
/// // A handler that parks what it gets, in the queue `jobs.parked`.
/// let mut events = client.watch();
/// let parked = async { while !matches!(events.next().await, Some(leveret::ClientEvent::Parked { .. })) {} };
/// let handler = async || Err::<(), _>(Failure::permanent("no such customer: 17").kind("data"));
/// client.consumer("jobs").handle(handler).run_until(parked).await?;
///
/// let lot = client.parking_lot("jobs.parked");
/// for message in lot.list(&Filter::new(), 10).await? {
///     println!("{} {:?} {:?}", message.position(), message.message_id(), message.story().error);
/// }
/// for group in lot.groups(&Filter::new()).await? {
///     assert_eq!((group.count, group.error.as_deref()), (1, Some("no such customer: #")));
/// }
///
/// let done = lot.replay().filter(Filter::new().kind("data")).rate(100.0).run().await?;
/// assert_eq!(done.done, 1);
/// assert_eq!((lot.depth().await?, client.inspect_queue("jobs").await?.messages), (0, 1));
/// # Ok(())
/// # }
/// ```
///
/// Looking takes messages out of the queue for a moment and puts them back at their place; the broker marks them as
/// redelivered. Meanwhile others who look, and consumers, do not see them. Any number of messages is gone through in pages of
/// at most 1000 messages or some megabytes.
///
/// # Quorum queues
///
/// RabbitMQ before 4.3 counts how often a message of a quorum queue is given back, and drops it beyond the delivery limit of
/// the queue, which may be 0 and which nobody is told. There nothing is given back: messages that stay are put to the end of
/// the lot as new ones, each confirmed before the old one is acked, until all are in their order again. So every look goes
/// through the whole lot, what is parked meanwhile comes to stand among the others, and who looks needs the permission to write
/// to the default exchange. How a message had come into the lot is noted in its headers; `CC`, and a `user_id` of somebody else, are in
/// headers from then on, from which they are taken when it is replayed. Since they are new ones, their delivery
/// counts and times to live begin anew: do not look into queues all the time that others work on. And their routing key is
/// another one: do not look into a quorum queue that dead-letters by the keys of its messages, for what dies there afterwards goes to
/// the queues that are bound by the name of the lot, and to no others. From 4.3 on looking is not counted, and changes none of
/// this.
///
/// While others take messages from the lot or add some, every message that is there all the time is shown once; what somebody else has
/// out at the moment is not seen. (With priorities, from 4.3 on and in classic queues, what is added meanwhile with a higher one comes
/// first, and as many of the last are not shown.) Two who look, or do something, at the same time hide messages from each other, up to half of
/// the lot: let one be done before the other begins. To know its own messages again, a look before 4.3 gives them a routing key
/// that begins with `leveret.look.`; that is not shown here or by [consumers](Client::consumer) of this crate, and seen only by
/// others who take them, and where they are dead-lettered to.
///
/// From 4.3 on a quorum queue hands out first what was given back. To keep the order, whoever stops in the middle of messages
/// that were looked at before goes on to the last of them: the first ten of a million messages cost as much as all of them, the
/// second time. A queue with a delayed retry of type `all` or `returned` holds back what was looked at as long as it says: it is not to be
/// seen meanwhile.
///
/// The order may change if others take messages or look at the same time, or if a look is dropped or cut off: before 4.3 what it has gone
/// past is then behind what it has not.
///
/// # What is out
///
/// A look or task that is dropped loses nothing, and goes no further: what it has out at that moment is put back by a task of the
/// client's own, which has the client's [timeout](crate::ClientBuilder::timeout) for that. [`Client::close`] waits for it, no longer than
/// that, and puts back what others have out who are not done. So close the client before the program ends.
///
/// If the process is killed or the connection is lost, the broker gives back what is out, and every version counts that: all that was
/// seen, and before 4.3 a page of at most 100 messages, and on 4.0 to 4.2 all those with a priority above 4. The same happens to a page if
/// the broker takes no messages for long in the middle of a task because its memory or disk is short, or if within a minute after a look
/// somebody makes a quorum queue in the place of a classic one. A quorum queue whose delivery limit is 0 drops or dead-letters them then, as
/// it does with those of any consumer; nobody who looks can do something against that, or is told the limit, since a policy may have
/// set it. Lots that this crate makes have a limit out of reach: it takes a policy to lower it.
///
/// # Permissions
///
/// Streams are not looked into: nothing is taken out of them. Nor is a queue that deletes itself with its last consumer: that would delete
/// it. Who may not declare it is not told
/// that it does; from classic queues messages are then taken one by one without a consumer, which is slower and deletes nothing.
///
/// The permission to read is enough to look into classic queues, and from 4.3 on into all. What kind of queue it is can only be asked
/// by what the broker refuses and notes in its log: once for a quorum queue, once a minute at most for another one.
#[derive(Clone, Debug)]
pub struct ParkingLot {
    client: Client,
    queue: String,
}

impl Client {
    /// A queue with messages that failed, to look at them and to replay them. Any queue can be one, those of other systems
    /// too.
    pub fn parking_lot(&self, queue: impl Into<String>) -> ParkingLot {
        ParkingLot::new(self.clone(), queue.into())
    }
}

impl ParkingLot {
    pub(crate) fn new(client: Client, queue: String) -> Self {
        ParkingLot { client, queue }
    }

    /// The name of its queue.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// How many messages it has.
    pub async fn depth(&self) -> Result<u64, Error> {
        Ok(u64::from(self.client.inspect_queue(&self.queue).await?.messages))
    }

    /// The first messages that are meant, at most so many. They stay where they are.
    pub async fn list(&self, filter: &Filter, limit: usize) -> Result<Vec<ParkedMessage>, Error> {
        let mut found = Vec::new();
        // A lost connection lets it begin anew.
        let mut last = 0;
        let look = |walk, message: &ParkedMessage| {
            if walk != last {
                found.clear();
            }
            last = walk;
            found.push(message.clone().compact());
            ControlFlow::Continue(())
        };
        self.look_by_walk(look).filter(filter.clone()).limit(limit as u64).run().await?;
        Ok(found)
    }

    /// Shows messages one by one, however many there are, until it is told to stop. They stay where they are.
    ///
    /// After a lost connection it begins anew with the first, when as many are there as before. It waits for them as long as the client's
    /// [timeout](crate::ClientBuilder::timeout) is: what somebody has out still is not shown.
    pub fn look<'a>(
        &self,
        mut look: impl FnMut(&ParkedMessage) -> ControlFlow<()> + Send + 'a,
    ) -> Task<'a> {
        self.look_by_walk(move |_, message| look(message))
    }

    /// The same, and tells each time which walk it is: after a lost connection, another one.
    fn look_by_walk<'a>(
        &self,
        look: impl FnMut(u32, &ParkedMessage) -> ControlFlow<()> + Send + 'a,
    ) -> Task<'a> {
        Task::new(&self.client, &self.queue, Action::Look(Box::new(look)))
    }

    /// The messages that are meant, by queue, kind and text of their last error; the largest group first.
    pub async fn groups(&self, filter: &Filter) -> Result<Vec<Group>, Error> {
        let mut groups = Groups::default();
        let mut last = 0;
        let look = |walk, message: &ParkedMessage| {
            if walk != last {
                groups = Groups::default();
            }
            last = walk;
            groups.add(message);
            ControlFlow::Continue(())
        };
        self.look_by_walk(look).filter(filter.clone()).run().await?;
        Ok(groups.finish())
    }

    /// Sends messages back to where they came from, as they were before they failed: all that was counted and noted is
    /// taken off, and `expiration` is what it was.
    ///
    /// They go through the exchange in `x-leveret-return`, if there is one, under their own routing key; else straight to
    /// the queue. No other queue gets a copy, whatever their `CC` says.
    pub fn replay<'a>(&self) -> Task<'a> {
        self.replay_to(Target::Origin)
    }

    /// The same, but to another place. For messages that do not tell where they came from.
    pub fn replay_to<'a>(&self, target: Target) -> Task<'a> {
        Task::new(&self.client, &self.queue, Action::Replay { target, edit: None })
    }

    /// Changes messages and replays them. The closure gets each message, and what is about to be sent.
    ///
    /// ```
    /// # async fn example(lot: leveret::ParkingLot) -> Result<(), leveret::Error> {
    /// use leveret::{Filter, Target};
    ///
    /// lot.edit(|_message, draft| {
    ///     draft.body = "{}".into();
    ///     draft.target = Target::queue("jobs.slow");
    /// })
    /// .filter(Filter::new().message_id("17"))
    /// .run()
    /// .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn edit<'a>(&self, edit: impl FnMut(&ParkedMessage, &mut Draft) + Send + 'a) -> Task<'a> {
        let action = Action::Replay { target: Target::Origin, edit: Some(Box::new(edit)) };
        Task::new(&self.client, &self.queue, action)
    }

    /// Moves messages to another queue or exchange as they are. They keep their story, and can be replayed from there.
    pub fn move_to<'a>(&self, target: Target) -> Task<'a> {
        Task::new(&self.client, &self.queue, Action::Move(target))
    }

    /// Drops messages.
    pub fn purge<'a>(&self) -> Task<'a> {
        Task::new(&self.client, &self.queue, Action::Purge)
    }

    /// Asks for the depth every so often, and announces [`ClientEvent::LotFilled`] when it has passed the threshold, and
    /// [`ClientEvent::LotDrained`] when it is no longer above it. It goes on until it is dropped or the client is closed.
    ///
    /// ```
    /// # async fn example(lot: leveret::ParkingLot) {
    /// use std::time::Duration;
    ///
    /// let watch = tokio::spawn(async move { lot.watch(1000, Duration::from_secs(60)).await });
    /// # watch.abort();
    /// # }
    /// ```
    pub async fn watch(&self, threshold: u64, every: Duration) {
        let mut is_over = false;
        loop {
            match self.depth().await {
                Ok(depth) if depth > threshold && !is_over => {
                    is_over = true;
                    let queue = self.queue.clone();
                    self.client.core().announce(ClientEvent::LotFilled { queue, depth, threshold });
                }
                Ok(depth) if depth <= threshold && is_over => {
                    is_over = false;
                    let queue = self.queue.clone();
                    self.client.core().announce(ClientEvent::LotDrained { queue, depth });
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Closed => return,
                // The connection comes back, and a queue may be declared later.
                Err(error) => tracing::debug!(queue = self.queue, "cannot be watched: {error}"),
            }
            sleep(every.max(LEAST_PAUSE)).await;
        }
    }
}
