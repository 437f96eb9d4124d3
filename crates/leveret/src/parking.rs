//! Parking lots: looking at messages that are not tried again, and replaying them.

use std::ops::ControlFlow;
use std::time::Duration;

use tokio::time::sleep;

use crate::connection::{Client, ClientEvent};
use crate::error::{Error, ErrorKind};
use crate::topology::QueueType;

mod export;
mod filter;
mod groups;
mod held;
mod import;
mod json;
mod known_queue;
mod message;
mod rate;
mod run;
mod scan;
mod target;
mod task;
mod window;
mod work;

pub use export::Export;
pub use filter::Filter;
pub use groups::Group;
pub use import::{Import, Imported};
pub use message::{ParkedMessage, PastError, Story};
pub use target::{Draft, Target};
pub use task::{NotDone, Progress, Task};

pub(crate) use held::HeldMessages;

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
/// A look takes messages out of the queue for a moment, and gives them back at their place. It changes nothing of them; the broker
/// marks them as redelivered. Meanwhile consumers and other looks do not see them: let one look be done before the next begins.
///
/// A quorum queue hands out first what was given back. To keep the order, a look that stops among messages that were looked at
/// before goes on to the last of them: the first ten of a million messages cost as much as all of them, the second time.
///
/// # Brokers that count
///
/// RabbitMQ before 4.3 counts how often a message of a quorum queue is given back, and drops it beyond a delivery limit that no
/// client can see. There a queue is looked into if its limit is known to be out of reach, as that of every lot that this crate
/// has declared (a policy with a lower `delivery-limit` must not apply to such lots: nothing tells the client of it). The client
/// knows that of queues that it has declared, and finds out whether another one was declared like a lot. Classic queues
/// count nothing: say so by [`queue_type`](Self::queue_type) where that cannot be found out. Otherwise a look is refused before
/// anything is taken, unless [counted returns are allowed](Self::allow_counted_returns).
///
/// On every version the broker counts what it gives back because a connection is lost or a process killed.
///
/// # What is held
///
/// A look or task that is dropped loses nothing: what it holds is put back by a task of the client's own. [`Client::close`] waits
/// for that, up to the client's [timeout](crate::ClientBuilder::timeout), so close the client before the program ends.
///
/// # Permissions
///
/// A look needs the permission to read. With the one to configure, too, the client finds out what a queue is that it has not declared:
/// without it, messages are taken one by one, which is slower, and before RabbitMQ 4.3 such a queue counts as one that
/// may drop them. Streams, and queues that delete themselves with their last consumer, are refused.
#[derive(Clone, Debug)]
pub struct ParkingLot {
    client: Client,
    queue: String,
    queue_type: Option<QueueType>,
    allows_counted_returns: bool,
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
        ParkingLot { client, queue, queue_type: None, allows_counted_returns: false }
    }

    /// Says of what type the queue is, where the client cannot know it.
    #[must_use]
    pub fn queue_type(mut self, queue_type: QueueType) -> Self {
        self.queue_type = Some(queue_type);
        self
    }

    /// Accepts that a broker before RabbitMQ 4.3 counts each look against the delivery limit of a quorum queue, and drops or
    /// dead-letters messages that were looked at more often than that.
    #[must_use]
    pub fn allow_counted_returns(mut self) -> Self {
        self.allows_counted_returns = true;
        self
    }

    /// The name of its queue.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// How many messages it has.
    pub async fn depth(&self) -> Result<u64, Error> {
        Ok(u64::from(self.client.inspect_queue(&self.queue).await?.messages))
    }

    /// The first messages that the filter selects, at most so many. They stay where they are.
    pub async fn list(&self, filter: &Filter, limit: usize) -> Result<Vec<ParkedMessage>, Error> {
        let mut found = Vec::new();
        // A lost connection lets it begin again.
        let mut last = 0;
        let look = |scan, message: &ParkedMessage| {
            if scan != last {
                found.clear();
            }
            last = scan;
            found.push(message.clone().compact());
            ControlFlow::Continue(())
        };
        self.look_by_scan(look).filter(filter.clone()).limit(limit as u64).run().await?;
        Ok(found)
    }

    /// Shows messages one by one, however many there are, until the closure says to stop. They stay where they are.
    ///
    /// After a lost connection it begins again with the first message, when as many are there as before. It waits for them as long
    /// as the client's [timeout](crate::ClientBuilder::timeout) is.
    pub fn look<'a>(
        &self,
        mut look: impl FnMut(&ParkedMessage) -> ControlFlow<()> + Send + 'a,
    ) -> Task<'a> {
        self.look_by_scan(move |_, message| look(message))
    }

    /// The same, and tells each time which scan it is: after a lost connection, another one.
    fn look_by_scan<'a>(
        &self,
        look: impl FnMut(u32, &ParkedMessage) -> ControlFlow<()> + Send + 'a,
    ) -> Task<'a> {
        Task::new(self, Action::Look(Box::new(look)))
    }

    /// The messages that the filter selects, by queue, kind and text of their last error; the largest group first.
    pub async fn groups(&self, filter: &Filter) -> Result<Vec<Group>, Error> {
        let mut groups = Groups::default();
        let mut last = 0;
        let look = |scan, message: &ParkedMessage| {
            if scan != last {
                groups = Groups::default();
            }
            last = scan;
            groups.add(message);
            ControlFlow::Continue(())
        };
        self.look_by_scan(look).filter(filter.clone()).run().await?;
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
        Task::new(self, Action::Replay { target, edit: None })
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
        Task::new(self, action)
    }

    /// Moves messages to another queue or exchange as they are. They keep their story, and can be replayed from there.
    pub fn move_to<'a>(&self, target: Target) -> Task<'a> {
        Task::new(self, Action::Move(target))
    }

    /// Drops messages.
    pub fn purge<'a>(&self) -> Task<'a> {
        Task::new(self, Action::Purge)
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
