//! Walking over the messages of a queue from its head: each is taken out, or left at its place.
//!
//! What was seen stays with the walk, unsettled, until the walk ends: so nothing is seen twice, and what was not
//! taken out goes back to where it was.
//!
//! ```text
//!  page: a consumer with a prefetch of so many, cancelled when it has them   (getting them one by one is 100 times slower)
//!    |
//!    +--> ack       taken out
//!    +--> nothing   left: goes back with all others at the end
//! ```
//!
//! Where the broker counts what goes back, to drop it beyond a limit that may be 0, nothing is given back. What stays is put
//! in anew at the end of the queue, page by page: once around, and all are in their order again.
//!
//! ```text
//!  [ 1 2 3 4 5 ] --> 1 2 put in anew, confirmed, acked --> [ 3 4 5 1 2 ] --> ... --> [ 1 2 3 4 5 ]
//! ```
//!
//! They are marked, so that the walk knows where it began, though others take messages and add some.
//!
//! How messages go back decides whether they keep their place, and whether the broker counts it. Asked of the nodes:
//!
//! | quorum queue | nack | channel closed |
//! |---|---|---|
//! | 3.x, no delivery limit | goes to the end | keeps its place, counts |
//! | 3.x, delivery limit | keeps its place, counts | the same |
//! | 4.0 to 4.2 | keeps its place, counts | the same |
//! | from 4.3 on | keeps its place, does not count | keeps its place, counts |
//!
//! A classic queue puts it back at its place either way, and counts nothing. Limits are arguments, policies (the lower one is
//! in force) or, from 4.0 on, 20 by default, and no broker tells them: so before 4.3 every quorum queue is taken to have one.
//!
//! A quorum queue hands out first what was given back, in the order in which it was given back. So a walk that ends among
//! messages that were given back before goes on until they end, and gives all of them back in their order.
//!
//! Quorum queues put back what the consumers of a channel had consumer by consumer, in any order of these. So pages are given
//! back one by one, the first one first; where they go back by closing a channel, each has its own.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

mod back;

use super::acks::Acks;
use super::kind::{Kind, kind_of};
use super::mark::{Mark, key_without_mark, without_mark};
use super::message::ParkedMessage;
use crate::amqp::{
    Channel, Connection, ConsumeOptions, Consumer, Delivery, GetOptions, deadline_in,
};
use crate::connection::managed::Up;
use crate::connection::{Client, version};
use crate::error::{Error, ErrorKind};

/// How many messages the first page has: how large they are is not known before.
const FIRST_PAGE: u64 = 16;
/// How many messages a page has at most.
const MAX_PAGE: u64 = 1000;
/// How many bytes a page should have at most.
const PAGE_BYTES: u64 = 8 * 1024 * 1024;

/// After this long without a message the broker is asked whether there is one.
const IDLE: Duration = Duration::from_millis(100);

/// How many messages a page has at most where what stays is put in anew: if the connection is lost, the broker gives back
/// what is out, and counts it.
const MAX_RENEWED_PAGE: u64 = 100;

/// Messages with a higher priority are handed out before others by quorum queues, from 4.0 on.
const NORMAL_PRIORITY: u8 = 4;

/// How many pages may be out where each has a channel of its own. A connection has 2047 channels.
const MAX_CHANNELS: usize = 1000;

/// A message in the hands of a walk.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) place: Place,
    pub(super) message: Arc<ParkedMessage>,
    /// Who has put it in anew.
    pub(super) marks: Vec<String>,
    /// Whether that was who walks here.
    pub(super) is_ours: bool,
}

/// Which delivery a message was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) page: usize,
    pub(super) tag: u64,
}

/// Messages that were taken together.
#[derive(Debug)]
struct Page {
    channel: Arc<Channel>,
    /// Those of them that were not acked.
    open: BTreeSet<u64>,
}

impl Page {
    fn new(channel: Arc<Channel>) -> Self {
        Page { channel, open: BTreeSet::new() }
    }
}

/// How messages go back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GiveBack {
    ByNack,
    ByClosing,
}

#[derive(Debug)]
pub(super) struct Walk {
    client: Client,
    queue: String,
    connection: Connection,
    pages: Vec<Page>,
    /// The consumer of the present page.
    consumer: Option<Consumer>,
    give_back: GiveBack,
    /// Whether what stays has to be put in anew, because the broker may count what is given back.
    renews: bool,
    /// Whether its channel may hold back acks, to tell the queue later.
    may_hold_back: bool,
    /// Whether there may be no consumer, since the queue may be gone with it.
    gets: bool,
    has_priorities: bool,
    /// Whether a message with a high priority was seen.
    has_seen_early: bool,
    mark: Mark,
    /// How many of ours came one after the other.
    ours_in_a_row: u32,
    next_size: u64,
    seen: u64,
    is_at_end: bool,
    is_over: bool,
    /// The last message seen had been given back before.
    is_among_returned: bool,
    acks: Acks,
}

impl Walk {
    /// A walk that stands before the first message, and how many there are.
    pub(super) async fn begin(
        client: &Client,
        queue: &str,
        mark: Mark,
    ) -> Result<(Walk, u64), Error> {
        let what = format!("cannot look into queue {queue:?}");
        let name = client.queue_name(queue);
        let patience = client.core().options.timeout;
        client.core().check_open()?;
        let queue = &name;
        let open = |up: Up| async move {
            let channel = up.connection.open_channel().await?;
            let depth = channel.inspect_queue(queue).await?.messages;
            Ok((up.connection, channel, depth))
        };
        let home = client.core().home();
        let opened = home.attempt(what, deadline_in(patience), patience, open).await;
        let (connection, channel, depth) = opened.inspect_err(|error| {
            if !matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Closed) {
                client.core().kinds.forget(&name);
            }
        })?;
        let version = version(connection.server_properties());
        let kind = kind_of(client, &name, version).await;
        match kind {
            Kind::DeletesItself => return Err(deletes_itself(&name)),
            Kind::Stream => return Err(is_stream(&name)),
            Kind::MayBeQuorum | Kind::MayDeleteItself | Kind::Other => {}
        }
        let mut walk = Walk::new(client.clone(), name, &connection, channel, mark);
        walk.renews = version < (4, 3) && kind == Kind::MayBeQuorum;
        // A quorum queue confirms a republished message after the acks that were sent before it.
        walk.may_hold_back = kind == Kind::MayBeQuorum && !walk.renews;
        walk.gets = kind == Kind::MayDeleteItself;
        Ok((walk, u64::from(depth)))
    }

    fn new(
        client: Client,
        queue: String,
        connection: &Connection,
        channel: Channel,
        mark: Mark,
    ) -> Self {
        let version = version(connection.server_properties());
        Walk {
            client,
            queue,
            connection: connection.clone(),
            pages: vec![Page::new(Arc::new(channel))],
            consumer: None,
            give_back: if version >= (4, 0) { GiveBack::ByNack } else { GiveBack::ByClosing },
            renews: false,
            may_hold_back: false,
            gets: false,
            has_priorities: version >= (4, 0),
            has_seen_early: false,
            mark,
            ours_in_a_row: 0,
            next_size: FIRST_PAGE,
            seen: 0,
            is_at_end: false,
            is_over: false,
            is_among_returned: false,
            acks: Acks::default(),
        }
    }

    /// The channel of the present page: there always is one.
    fn channel(&self) -> Arc<Channel> {
        Arc::clone(&self.pages[self.pages.len() - 1].channel)
    }

    async fn turn_page(&mut self) -> Result<Arc<Channel>, Error> {
        // What is put in anew is acked with its page, so that there is nothing to be given back in order.
        if self.seen == 0 || self.renews {
            return Ok(self.channel());
        }
        let channel = match self.give_back {
            GiveBack::ByNack => self.channel(),
            GiveBack::ByClosing if self.pages.len() >= MAX_CHANNELS => {
                let text = format!(
                    "{} messages of queue {:?} were seen, and more cannot be held on this broker: set a limit",
                    self.seen, self.queue
                );
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            GiveBack::ByClosing => {
                let opened = self.connection.open_channel().await;
                Arc::new(opened.map_err(|error| self.failed(error))?)
            }
        };
        self.pages.push(Page::new(Arc::clone(&channel)));
        Ok(channel)
    }

    /// Adds the next messages to a page, at most so many; none if there are no more. What was taken before stays out until it is
    /// acked or the walk ends.
    pub(super) async fn page(&mut self, most: u64, page: &mut Vec<Taken>) -> Result<(), Error> {
        if self.is_at_end {
            return Ok(());
        }
        let channel = self.turn_page().await?;
        let size = most.min(self.next_size).max(1);
        match self.gets {
            true => self.get(&channel, page, size).await?,
            false => self.consume(&channel, page, size).await?,
        }
        let bytes: usize = page.iter().map(|taken| taken.message.size()).sum();
        let average = (bytes as u64 / (page.len() as u64).max(1)).max(1);
        let largest = if self.renews { MAX_RENEWED_PAGE } else { MAX_PAGE };
        self.next_size = (PAGE_BYTES / average).clamp(1, largest);
        Ok(())
    }

    /// By a consumer, which is the faster way.
    async fn consume(
        &mut self,
        channel: &Channel,
        page: &mut Vec<Taken>,
        size: u64,
    ) -> Result<(), Error> {
        self.begin_consuming(channel, size).await?;
        self.fill(page, size).await?;
        self.stop_consuming(page).await
    }

    async fn begin_consuming(&mut self, channel: &Channel, size: u64) -> Result<(), Error> {
        let options = ConsumeOptions { prefetch: size as u16, ..ConsumeOptions::default() };
        let consuming = channel.consume(&self.queue, options).await;
        self.consumer = Some(consuming.map_err(|error| self.failed(error))?);
        self.acks.are_answered();
        Ok(())
    }

    /// Ends the consumer, if there is one, and takes what was on its way to it.
    pub(super) async fn stop_consuming(&mut self, page: &mut Vec<Taken>) -> Result<(), Error> {
        let Some(consumer) = &mut self.consumer else { return Ok(()) };
        let cancelled = consumer.cancel().await;
        cancelled.map_err(|error| self.failed(error))?;
        self.fill(page, u64::MAX).await?;
        self.consumer = None;
        Ok(())
    }

    /// One by one, without a consumer.
    async fn get(
        &mut self,
        channel: &Channel,
        page: &mut Vec<Taken>,
        size: u64,
    ) -> Result<(), Error> {
        while (page.len() as u64) < size && !self.is_at_end {
            let got = channel.get(&self.queue, GetOptions::default()).await;
            let got = got.map_err(|error| self.failed(error))?;
            self.acks.are_answered();
            match got {
                Some(delivery) => page.push(self.taken(delivery)),
                None => self.is_at_end = true,
            }
        }
        Ok(())
    }

    /// Takes what the consumer gets, until it has so many, ends, or there are no more.
    async fn fill(&mut self, page: &mut Vec<Taken>, size: u64) -> Result<(), Error> {
        // The broker answers: it is told before the caller's own patience ends.
        let patience = self.client.core().options.timeout / 2;
        let mut since = Instant::now();
        let mut was_empty = false;
        while (page.len() as u64) < size {
            let Some(consumer) = &mut self.consumer else { return Ok(()) };
            match timeout(IDLE, consumer.next()).await {
                Ok(None) => return Ok(()),
                Ok(Some(Err(error))) => return Err(self.failed(error)),
                Ok(Some(Ok(delivery))) => {
                    (since, was_empty) = (Instant::now(), false);
                    page.push(self.taken(delivery));
                }
                Err(_) => {
                    let info = self.channel().inspect_queue(&self.queue).await;
                    let info = info.map_err(|error| self.failed(error))?;
                    // RabbitMQ tells of a quorum queue whose leader does not answer that it has neither messages nor consumers.
                    let is_empty = info.messages == 0 && info.consumers > 0;
                    // Asked twice: what was on its way when it was asked first has arrived by then.
                    if is_empty && was_empty {
                        self.is_at_end = true;
                        return Ok(());
                    }
                    was_empty = is_empty;
                    if since.elapsed() > patience {
                        let text = format!(
                            "queue {:?} gives no messages, though it is not empty: another consumer has it for itself, its leader \
                             does not answer, or it is no queue to take messages from",
                            self.queue
                        );
                        return Err(Error::new(ErrorKind::Broker, text));
                    }
                }
            }
        }
        Ok(())
    }

    fn taken(&mut self, delivery: Delivery) -> Taken {
        let tag = delivery.delivery_tag();
        self.is_among_returned = delivery.redelivered() && is_of_quorum_queue(&delivery);
        let redelivered = delivery.redelivered();
        let (source, raw, body) = delivery.leave();
        let page = self.pages.len() - 1;
        self.pages[page].open.insert(tag);
        let (exchange, key) = (source.exchange(), source.routing_key());
        let (marks, raw) = without_mark(&exchange, &key, &raw);
        let key = key_without_mark(&exchange, key, &self.queue);
        let (exchange, key) = (exchange.to_str_lossy(), key.to_str_lossy());
        let is_ours = self.mark.is_among(&marks);
        self.seen += u64::from(!is_ours);
        let message = Arc::new(ParkedMessage::new(self.seen, &exchange, &key, &raw, &body));
        self.look_out_for_ours(is_ours, redelivered, &message);
        Taken { place: Place { page, tag }, message, marks, is_ours }
    }

    /// Notes how many of ours have come one after the other. What others give back comes before its turn, and tells nothing.
    fn look_out_for_ours(&mut self, is_ours: bool, redelivered: bool, message: &ParkedMessage) {
        let is_early = self.comes_early(message);
        self.has_seen_early |= is_early;
        match (is_ours, redelivered) {
            (true, true) => {}
            (true, false) if !is_early => self.ours_in_a_row += 1,
            _ => self.ours_in_a_row = 0,
        }
    }

    /// Whether all that was there has been seen, since the messages that come are those that were put in anew. One of them is not
    /// enough: of two kinds of priority, quorum queues hand out two messages of the one for each of the other.
    pub(super) fn is_around(&self) -> bool {
        self.ours_in_a_row >= 2
    }

    /// Whether a message with a high priority was seen: others may come before it.
    pub(super) fn has_seen_early(&self) -> bool {
        self.has_seen_early
    }

    /// Begins anew before the first message.
    pub(super) fn begin_anew(&mut self, mark: Mark) {
        self.mark = mark;
        self.ours_in_a_row = 0;
        self.go_on_after(0);
    }

    pub(super) fn mark(&self) -> &Mark {
        &self.mark
    }

    /// It is in the queue as a new message, and to be acked with others.
    pub(super) fn ack(&mut self, place: Place) {
        self.acks.add(place);
    }

    /// It is out of the queue for good, and to be acked with others.
    pub(super) fn let_go(&mut self, taken: Taken) {
        self.acks.add_for_good(taken);
    }

    /// Acks what waits for it, if that is much. Where what stays is put in anew, all of a page are acked in the end, by one ack.
    pub(super) fn send_many_acks(&mut self) -> Result<(), Error> {
        match self.acks.are_many() && !self.renews {
            true => self.send_acks(),
            false => Ok(()),
        }
    }

    /// Acks all that wait for it.
    pub(super) fn send_acks(&mut self) -> Result<(), Error> {
        let places = self.acks.take();
        for places in places.chunk_by(|one, next| one.page == next.page) {
            let tags: Vec<u64> = places.iter().map(|place| place.tag).collect();
            let page = &mut self.pages[places[0].page];
            page.open.retain(|tag| tags.binary_search(tag).is_err());
            let sent = page.channel.ack_all(&tags);
            self.acks.went_out_as(sent.map_err(|error| self.failed(error))?);
        }
        Ok(())
    }

    /// How many messages there are to be taken; an error if what was taken is no longer in our hands.
    pub(super) async fn check_held(&mut self) -> Result<u64, Error> {
        let answer = self.channel().inspect_queue(&self.queue).await;
        let ready = answer.map_err(|error| self.failed(error))?.messages;
        self.acks.are_answered();
        Ok(u64::from(ready))
    }

    /// Which messages are out only if their acks have arrived.
    pub(super) fn doubtful(&mut self) -> Vec<Taken> {
        self.acks.doubtful()
    }

    /// How many messages were acked, and how many of these acks the broker has taken for sure.
    pub(super) fn acked(&self) -> (u64, u64) {
        self.acks.count()
    }

    /// Whether what stays must not be left, but put in anew.
    pub(super) fn renews(&self) -> bool {
        self.renews
    }

    /// Whether a message would come again before others if it were put in anew.
    pub(super) fn comes_early(&self, message: &ParkedMessage) -> bool {
        self.has_priorities && message.properties().priority > Some(NORMAL_PRIORITY)
    }

    /// How many messages were seen.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// The next message has the place after this one.
    pub(super) fn go_on_after(&mut self, position: u64) {
        self.seen = position;
        self.is_at_end = false;
    }

    fn failed(&self, error: crate::amqp::Error) -> Error {
        Error::from_amqp(format!("going through queue {:?}", self.queue), error)
    }
}

/// Quorum queues tell how often a message was delivered or given back; others do not.
fn is_of_quorum_queue(delivery: &Delivery) -> bool {
    let has = |name| delivery.raw_properties().header(name).is_some();
    has("x-delivery-count") || has("x-acquired-count")
}

fn is_stream(queue: &str) -> Error {
    let text = format!(
        "queue {queue:?} is a stream, which keeps its messages whoever reads them: there is nothing to be taken out or put back; \
         read it with a consumer that has an x-stream-offset"
    );
    Error::new(ErrorKind::Invalid, text)
}

fn deletes_itself(queue: &str) -> Error {
    let text = format!(
        "queue {queue:?} deletes itself with its last consumer: looking into it would delete it and its messages; \
         declare it without auto-delete"
    );
    Error::new(ErrorKind::Invalid, text)
}
