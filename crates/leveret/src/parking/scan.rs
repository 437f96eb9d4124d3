//! Goes through the messages of a queue from its head, page by page: each leaves the queue, or goes back to its place at the end.
//!
//! ```text
//!  page: a consumer with a prefetch, cancelled when it has as many   (basic.get makes 200 to 1000 messages a second)
//!    +--> ack       leaves the queue
//!    +--> nothing   stays unsettled, so that nothing is seen twice; goes back with all others at the end
//! ```
//!
//! A quorum queue hands out first what was given back, in the order in which it came back. So a scan that ends among messages that
//! were given back before goes on until they end, and gives all of them back in their order.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::ParkingLot;
use super::held::{HeldMessages, Place, Taken};
use super::known_queue::ScanMode;
use super::message::ParkedMessage;
use crate::amqp::Content;
use crate::connection::Client;
use crate::error::{Error, ErrorKind};

/// How many messages the first page has: how large they are is not known before.
const FIRST_PAGE: u64 = 16;
/// How many messages a page has at most.
const MAX_PAGE: u64 = 1000;
/// How many bytes a page should have at most.
const PAGE_BYTES: u64 = 8 * 1024 * 1024;

/// After this long without a message the broker is asked whether there is one.
const IDLE: Duration = Duration::from_millis(100);

/// A message that was taken, and is held until it is settled.
#[derive(Clone, Debug)]
pub(super) struct TakenMessage {
    pub(super) place: Place,
    pub(super) message: Arc<ParkedMessage>,
}

#[derive(Debug)]
pub(super) struct QueueScan {
    client: Client,
    queue: String,
    pub(super) held: Arc<HeldMessages>,
    mode: ScanMode,
    next_size: u64,
    seen: u64,
    is_at_end: bool,
    /// Whether the last message had been given back before, to a quorum queue.
    is_among_returned: bool,
}

impl QueueScan {
    /// A scan before the first message, and how many messages are ready as far as the broker says: RabbitMQ says 0 of a quorum
    /// queue whose leader is silent.
    pub(super) async fn begin(lot: &ParkingLot) -> Result<(Self, u64), Error> {
        let (held, depth, version) = HeldMessages::open(&lot.client, &lot.queue).await?;
        let mode = ScanMode::choose(lot, version).await?;
        let scan = QueueScan {
            client: lot.client.clone(),
            queue: lot.queue.clone(),
            held,
            mode,
            next_size: FIRST_PAGE,
            seen: 0,
            is_at_end: false,
            is_among_returned: false,
        };
        Ok((scan, depth))
    }

    /// How many messages were seen.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// The next messages, at most so many; none if there are no more.
    pub(super) async fn page(&mut self, most: u64) -> Result<Vec<TakenMessage>, Error> {
        let mut page = Vec::new();
        if self.is_at_end {
            return Ok(page);
        }
        self.held.begin_page().await?;
        let size = most.min(self.next_size).max(1);
        match self.mode.by_get {
            true => self.get(&mut page, size).await?,
            false => self.consume(&mut page, size).await?,
        }
        self.held.check_not_released()?;
        let bytes: usize = page.iter().map(|taken| taken.message.size()).sum();
        let average = (bytes as u64 / (page.len() as u64).max(1)).max(1);
        self.next_size = (PAGE_BYTES / average).clamp(1, MAX_PAGE);
        Ok(page)
    }

    async fn consume(&mut self, page: &mut Vec<TakenMessage>, size: u64) -> Result<(), Error> {
        self.held.consume(size as u16).await?;
        self.fill(page, size).await?;
        self.held.cancel().await?;
        self.fill(page, u64::MAX).await
    }

    async fn get(&mut self, page: &mut Vec<TakenMessage>, size: u64) -> Result<(), Error> {
        while (page.len() as u64) < size && !self.is_at_end {
            match self.held.get().await? {
                Some(taken) => page.push(self.taken(taken)),
                None => self.is_at_end = true,
            }
        }
        Ok(())
    }

    /// Takes what the consumer gets, until it has so many, ends, or there are no more.
    async fn fill(&mut self, page: &mut Vec<TakenMessage>, size: u64) -> Result<(), Error> {
        // The broker answers: the scan gives up before a caller with the client's timeout does.
        let patience = self.client.core().options.timeout / 2;
        let mut since = Instant::now();
        let mut was_empty = false;
        while (page.len() as u64) < size {
            match timeout(IDLE, self.held.next()).await {
                Ok(None) => return Ok(()),
                Ok(Some(taken)) => {
                    (since, was_empty) = (Instant::now(), false);
                    page.push(self.taken(taken?));
                }
                Err(_) => {
                    let (ready, consumers) = self.held.prove().await?;
                    // A silent leader has no consumers either.
                    let is_empty = ready == 0 && consumers > 0;
                    // Asked twice: what was on its way when it was asked first has arrived by then.
                    if is_empty && was_empty {
                        self.is_at_end = true;
                        return Ok(());
                    }
                    was_empty = is_empty;
                    if since.elapsed() > patience {
                        return Err(self.gives_nothing());
                    }
                }
            }
        }
        Ok(())
    }

    fn taken(&mut self, taken: Taken) -> TakenMessage {
        let Taken { place, content: Content { method: info, properties, body } } = taken;
        // Quorum queues count deliveries in a header; others do not.
        let has = |name| properties.header(name).is_some();
        self.is_among_returned =
            info.redelivered() && (has("x-delivery-count") || has("x-acquired-count"));
        self.seen += 1;
        let (exchange, key) = (info.exchange(), info.routing_key());
        let (exchange, key) = (exchange.to_str_lossy(), key.to_str_lossy());
        let message = ParkedMessage::new(self.seen, &exchange, &key, &properties, &body);
        TakenMessage { place, message: Arc::new(message) }
    }

    /// Gives back what was not acked, and returns when it is there.
    pub(super) async fn end(&mut self) -> Result<(), Error> {
        if self.held.is_behind() && !self.mode.by_get {
            self.catch_up().await?;
        }
        while self.held.holds_some() && self.is_among_returned && !self.is_at_end {
            self.page(u64::MAX).await?;
        }
        self.held.give_back().await
    }

    /// Begins and ends a consumer, for which a quorum queue has to catch up with acks. What it gets is one page more.
    async fn catch_up(&mut self) -> Result<(), Error> {
        self.held.begin_page().await?;
        self.held.consume(1).await?;
        self.held.cancel().await?;
        self.fill(&mut Vec::new(), u64::MAX).await
    }

    fn gives_nothing(&self) -> Error {
        let text = format!(
            "queue {:?} gives no messages, though it is not empty: another consumer has it for itself, its leader does not \
             answer, or it is no queue to take messages from",
            self.queue
        );
        Error::new(ErrorKind::Broker, text)
    }
}
