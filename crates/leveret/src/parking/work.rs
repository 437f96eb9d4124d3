//! What a task has taken and published. It is wound up in order even if the task fails or is dropped.
//!
//! ```text
//!  page --> decided --> window: published --confirmed--> acked
//!             |            +--refused--+
//!             +--> stays <-------------+
//!                    |
//!                    +--> held, and given back at the end
//! ```

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::timeout;

use super::ParkingLot;
use super::held::HeldMessages;
use super::scan::{QueueScan, TakenMessage};
use super::window::PublishWindow;
use crate::amqp::RawProperties;
use crate::connection::Client;
use crate::error::{Error, ErrorKind};
use crate::forwarder::ForwardedMessage;
use crate::random;

const WHAT: &str = "sending on a parked message";

/// A scan, and what has come of it.
pub(super) struct ScanWork {
    pub(super) scan: QueueScan,
    pub(super) open: Unsettled,
}

/// Messages that were taken and are not settled.
pub(super) struct Unsettled {
    client: Client,
    queue: String,
    held: Arc<HeldMessages>,
    pub(super) window: PublishWindow<TakenMessage>,
    /// What the task has not decided about.
    pub(super) page: VecDeque<TakenMessage>,
}

impl ScanWork {
    /// Work that holds nothing yet, and how many messages are ready as far as the broker says.
    pub(super) async fn begin(lot: &ParkingLot) -> Result<(Self, u64), Error> {
        let (scan, depth) = QueueScan::begin(lot).await?;
        let open = Unsettled {
            client: lot.client.clone(),
            queue: lot.client.queue_name(&lot.queue),
            held: Arc::clone(&scan.held),
            window: PublishWindow::new(&lot.client, WHAT),
            page: VecDeque::new(),
        };
        Ok((ScanWork { scan, open }, depth))
    }
}

impl Drop for ScanWork {
    fn drop(&mut self) {
        let held = &self.scan.held;
        if held.is_given_back() {
            return;
        }
        // If it is locked, the client gives everything back.
        let Ok(alone) = Arc::clone(&held.release).try_lock_owned() else { return };
        let open = self.open.take();
        let client = open.client.clone();
        client.core().spawn(async move {
            let _alone = alone;
            open.wind_up().await;
        });
    }
}

impl Unsettled {
    fn take(&mut self) -> Self {
        Unsettled {
            client: self.client.clone(),
            queue: self.queue.clone(),
            held: Arc::clone(&self.held),
            window: mem::replace(&mut self.window, PublishWindow::new(&self.client, WHAT)),
            page: mem::take(&mut self.page),
        }
    }

    /// Whether this user may publish to the default exchange. Better not to take any message if not.
    pub(super) async fn check_publishing(&self) -> Result<(), Error> {
        let key = format!("leveret.nowhere.{:x}", random::number());
        let nowhere =
            ForwardedMessage::new(String::new(), key, &RawProperties::default(), &Bytes::new());
        match self.window.mover().deliver(nowhere).await {
            Err(error) if error.kind() == ErrorKind::Unroutable => Ok(()),
            other => other,
        }
    }

    /// Gives back everything that is not settled, whatever becomes of what was published.
    pub(super) async fn release(&mut self) -> Result<(), Error> {
        let release = Arc::clone(&self.held.release);
        let _alone = release.lock().await;
        self.release_alone().await
    }

    async fn release_alone(&mut self) -> Result<(), Error> {
        while self.window.pop().is_some() {}
        self.page.clear();
        self.held.give_back_alone().await
    }

    /// For a task that was dropped: acks what is confirmed in time, and gives back the rest.
    async fn wind_up(mut self) {
        let patience = self.client.core().options.timeout;
        let confirms = async {
            while let Ok(Some((taken, outcome))) = self.window.next_outcome().await {
                match outcome {
                    Ok(()) => drop(self.held.ack(taken.place)),
                    Err(_) => self.page.push_back(taken),
                }
            }
        };
        let _ = timeout(patience / 2, confirms).await;
        let error = match timeout(patience / 2, self.release_alone()).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => Error::timed_out("giving back what was taken", patience),
        };
        let queue = self.queue.as_str();
        tracing::warn!(queue, "the broker gives back what was taken, and may count it: {error}");
    }
}
