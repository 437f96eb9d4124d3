//! Messages that a scan has taken and not settled, and how they go back.
//!
//! How a message goes back decides whether it keeps its place, and whether the broker counts it. Asked of the nodes:
//!
//! | quorum queue | nack | channel closed |
//! |---|---|---|
//! | 3.x, no delivery limit | goes to the end | keeps its place, counts |
//! | 3.x, delivery limit | keeps its place, counts | the same |
//! | 4.0 to 4.2 | keeps its place, counts | the same |
//! | from 4.3 on | keeps its place, does not count | keeps its place, counts |
//!
//! A classic queue puts it back at its place either way, and counts nothing.
//!
//! Quorum queues put back what the consumers of a channel had consumer by consumer, in any order of these. So pages go back one by
//! one, the first one first; where they go back by closing a channel, each has its own.
//!
//! RabbitMQ's channel tells a quorum queue of 32 acks or returns at once. It holds back further ones until the queue has caught
//! up, tells them in another order, and forgets them if it is closed before. To begin and to end a consumer takes until then.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use tokio::time::sleep;

use super::known_queue::is_stream;
use crate::amqp::{
    Channel, Connection, ConsumeOptions, Consumer, Content, Delivery, DeliveryInfo, GetOptions,
    deadline_in, lock,
};
use crate::connection::managed::LiveConnection;
use crate::connection::registry::Members;
use crate::connection::{Client, version};
use crate::error::{Error, ErrorKind};

/// How often to ask whether given-back messages have arrived, and how many times at most.
const RETURN_POLL: Duration = Duration::from_millis(25);
const MAX_RETURN_POLLS: u32 = 40;

/// So many pages are given back together: fewer than a quorum queue is told of at once.
const PAGES_TOGETHER: usize = 16;

/// How many pages may be out where each has a channel of its own. A connection has 2047 channels.
const MAX_CHANNELS: usize = 1000;

/// Which delivery a message was: its page and its delivery tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    page: usize,
    tag: u64,
}

/// A message that was taken.
pub(super) struct Taken {
    pub(super) place: Place,
    pub(super) content: Content<DeliveryInfo>,
}

/// Messages that were taken together.
#[derive(Debug)]
struct Page {
    channel: Arc<Channel>,
    /// The delivery tags that are not settled.
    open: BTreeSet<u64>,
}

impl Page {
    fn new(channel: Channel) -> Self {
        Page { channel: Arc::new(channel), open: BTreeSet::new() }
    }
}

/// How messages go back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReturnBy {
    Nack,
    Closing,
}

/// What a scan holds. The client has it as well, to give it back when it is closed.
#[derive(Debug)]
pub(crate) struct HeldMessages {
    client: Client,
    queue: String,
    connection: Connection,
    return_by: ReturnBy,
    state: Mutex<State>,
    /// Locked by the owner that gives everything back; others wait for it.
    pub(super) release: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
struct State {
    pages: Vec<Page>,
    consumer: Option<Consumer>,
    /// How many acks were sent since the broker has answered last.
    unproven: u64,
    /// Whether a queue may not have caught up with acks: no consumer was begun since.
    is_behind: bool,
    /// Everything is about to go back: nothing more may be taken.
    is_released: bool,
    /// Everything was settled before: what follows only gives back the rest.
    is_ending: bool,
    is_given_back: bool,
}

impl HeldMessages {
    /// Opens a channel to a queue. Returns how many messages are ready there, and the version of the broker, too.
    pub(super) async fn open(
        client: &Client,
        queue: &str,
    ) -> Result<(Arc<Self>, u64, (u32, u32)), Error> {
        let core = client.core();
        core.check_open()?;
        let queue = client.queue_name(queue);
        let (what, timeout) = (format!("cannot look into queue {queue:?}"), core.options.timeout);
        let asked = &queue;
        let open = |up: LiveConnection| async move {
            let channel = up.connection.open_channel().await?;
            let depth = channel.inspect_queue(asked).await?.messages;
            Ok((up.connection, channel, depth))
        };
        let opened = core.home().attempt(what, deadline_in(timeout), timeout, open).await;
        let (connection, channel, depth) = opened?;
        let version = version(connection.server_properties());
        let return_by = if version >= (4, 0) { ReturnBy::Nack } else { ReturnBy::Closing };
        let state = State {
            pages: vec![Page::new(channel)],
            consumer: None,
            unproven: 0,
            is_behind: false,
            is_released: false,
            is_ending: false,
            is_given_back: false,
        };
        let client = client.clone();
        let (state, release) = (Mutex::new(state), Arc::default());
        let held = HeldMessages { client, queue, connection, return_by, state, release };
        let held = Arc::new(held);
        core.extensions.get::<Members<HeldMessages>>().add(&held);
        Ok((held, u64::from(depth), version))
    }

    fn channel(&self) -> Arc<Channel> {
        let state = lock(&self.state);
        // There is one page at least.
        Arc::clone(&state.pages[state.pages.len() - 1].channel)
    }

    pub(super) fn check_not_released(&self) -> Result<(), Error> {
        match lock(&self.state).is_released {
            true => Err(Error::closed("the client")),
            false => Ok(()),
        }
    }

    /// Begins a page, on a channel of its own if pages go back by closing theirs.
    pub(super) async fn begin_page(&self) -> Result<(), Error> {
        self.check_not_released()?;
        let pages = {
            let mut state = lock(&self.state);
            let last = &state.pages[state.pages.len() - 1];
            if last.open.is_empty() {
                return Ok(());
            }
            if self.return_by == ReturnBy::Nack {
                let channel = Arc::clone(&last.channel);
                state.pages.push(Page { channel, open: BTreeSet::new() });
                return Ok(());
            }
            state.pages.len()
        };
        if pages >= MAX_CHANNELS {
            let text = format!(
                "{pages} pages of queue {:?} are held, and no more can be on this broker: set a limit",
                self.queue
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let channel = self.connection.open_channel().await.map_err(|error| self.failed(error))?;
        lock(&self.state).pages.push(Page::new(channel));
        Ok(())
    }

    /// Begins a consumer that gets so many messages.
    pub(super) async fn consume(&self, prefetch: u16) -> Result<(), Error> {
        let options = ConsumeOptions { prefetch, ..ConsumeOptions::default() };
        let begun = self.channel().consume(&self.queue, options).await;
        let consumer = begun.map_err(|error| self.failed(error))?;
        self.check_not_released()?;
        let mut state = lock(&self.state);
        (state.unproven, state.is_behind) = (0, false);
        state.consumer = Some(consumer);
        Ok(())
    }

    /// The next delivery of the consumer; `None` once it has ended.
    pub(super) async fn next(&self) -> Option<Result<Taken, Error>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&self, context: &mut Context<'_>) -> Poll<Option<Result<Taken, Error>>> {
        let mut state = lock(&self.state);
        let Some(consumer) = &mut state.consumer else { return Poll::Ready(None) };
        let next = ready!(Pin::new(consumer).poll_next(context));
        Poll::Ready(next.map(|taken| match taken {
            Ok(delivery) if delivery.raw_properties().header("x-stream-offset").is_some() => {
                Err(is_stream(&self.queue))
            }
            Ok(delivery) => Ok(state.hold(delivery)),
            Err(error) => Err(self.failed(error)),
        }))
    }

    /// Takes one message without a consumer.
    pub(super) async fn get(&self) -> Result<Option<Taken>, Error> {
        let got = self.channel().get(&self.queue, GetOptions::default()).await;
        let delivery = got.map_err(|error| self.failed(error))?;
        self.check_not_released()?;
        let mut state = lock(&self.state);
        state.unproven = 0;
        Ok(delivery.map(|delivery| state.hold(delivery)))
    }

    /// Cancels the consumer. What was on its way is still handed out by [`next`](Self::next).
    pub(super) async fn cancel(&self) -> Result<(), Error> {
        let Some(mut consumer) = lock(&self.state).consumer.take() else { return Ok(()) };
        let cancelled = consumer.cancel().await;
        lock(&self.state).consumer = Some(consumer);
        cancelled.map_err(|error| self.failed(error))
    }

    /// Takes a message out of the queue for good.
    pub(super) fn ack(&self, place: Place) -> Result<(), Error> {
        let mut state = lock(&self.state);
        let page = &mut state.pages[place.page];
        if !page.open.remove(&place.tag) {
            return Err(Error::closed("the client"));
        }
        let acked = page.channel.ack(place.tag);
        (state.unproven, state.is_behind) = (state.unproven + 1, true);
        acked.map_err(|error| self.failed(error))
    }

    /// Whether a slow queue may not have caught up with acks.
    pub(super) fn is_behind(&self) -> bool {
        lock(&self.state).is_behind
    }

    /// How many of the last acks the broker may not have taken.
    pub(super) fn unproven(&self) -> u64 {
        lock(&self.state).unproven
    }

    /// Makes sure by a round trip that the broker has taken the acks. Returns what is ready in the queue, and its consumers.
    pub(super) async fn prove(&self) -> Result<(u64, u32), Error> {
        let answer = self.channel().inspect_queue(&self.queue).await;
        let info = answer.map_err(|error| self.failed(error))?;
        lock(&self.state).unproven = 0;
        Ok((u64::from(info.messages), info.consumers))
    }

    /// Gives back everything, unless that was done before, and returns when it is there. Nothing can be taken afterwards.
    pub(crate) async fn give_back(&self) -> Result<(), Error> {
        let _alone = self.release.lock().await;
        self.give_back_alone().await
    }

    /// The same for the owner that has locked `release`.
    pub(super) async fn give_back_alone(&self) -> Result<(), Error> {
        {
            let mut state = lock(&self.state);
            state.is_released = true;
            state.is_ending = !state.is_behind;
            if state.is_given_back {
                return Ok(());
            }
        }
        // A consumer whose beginning was interrupted is cancelled by its channel before that answers twice.
        self.prove().await?;
        self.drain().await?;
        self.return_pages().await
    }

    /// Ends the consumer, and holds what was on its way to it.
    async fn drain(&self) -> Result<(), Error> {
        self.cancel().await?;
        while let Some(taken) = self.next().await {
            taken?;
        }
        lock(&self.state).consumer = None;
        Ok(())
    }

    async fn return_pages(&self) -> Result<(), Error> {
        let (mut expected, _) = self.prove().await?;
        lock(&self.state).is_ending = true;
        let (count, holds_some) = (self.pages(), self.holds_some());
        for number in 0..count {
            let (channel, open) = lock(&self.state).release_page(number);
            let returned = match (self.return_by, open.last()) {
                (ReturnBy::Closing, _) => channel.close().await,
                (ReturnBy::Nack, Some(tag)) => channel.requeue_through(*tag),
                (ReturnBy::Nack, None) => Ok(()),
            };
            returned.map_err(|error| self.failed(error))?;
            expected += open.len() as u64;
            // Two channels that are closed one after the other may arrive at the queue in any order.
            let is_many = (number + 1) % PAGES_TOGETHER == 0 || number + 1 == count;
            if holds_some && (self.return_by == ReturnBy::Closing || is_many) {
                self.until_ready(expected).await;
            }
        }
        let closed = self.channel().close().await;
        lock(&self.state).is_given_back = true;
        closed.map_err(|error| self.failed(error))
    }

    fn pages(&self) -> usize {
        lock(&self.state).pages.len()
    }

    /// Whether there is something to be given back.
    pub(super) fn holds_some(&self) -> bool {
        lock(&self.state).pages.iter().any(|page| !page.open.is_empty())
    }

    pub(super) fn is_given_back(&self) -> bool {
        lock(&self.state).is_given_back
    }

    /// Whether only the return of messages was left to do.
    pub(super) fn is_ending(&self) -> bool {
        lock(&self.state).is_ending
    }

    /// The next scan should find what was given back, and nothing tells when it is there. If others take messages meanwhile, this
    /// does not wait for long.
    async fn until_ready(&self, expected: u64) {
        for _ in 0..MAX_RETURN_POLLS {
            match self.client.inspect_queue(&self.queue).await {
                Ok(info) if u64::from(info.messages) < expected => sleep(RETURN_POLL).await,
                _ => return,
            }
        }
    }

    pub(super) fn failed(&self, error: crate::amqp::Error) -> Error {
        Error::from_amqp(format!("going through queue {:?}", self.queue), error)
    }
}

impl State {
    /// Until it is settled, or given back with its page.
    fn hold(&mut self, delivery: Delivery) -> Taken {
        let (page, tag) = (self.pages.len() - 1, delivery.delivery_tag());
        self.pages[page].open.insert(tag);
        let (acker, content) = delivery.split();
        acker.forget();
        Taken { place: Place { page, tag }, content }
    }

    fn release_page(&mut self, number: usize) -> (Arc<Channel>, BTreeSet<u64>) {
        let page = &mut self.pages[number];
        (Arc::clone(&page.channel), std::mem::take(&mut page.open))
    }
}
