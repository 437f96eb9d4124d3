//! What a lost connection leaves open: the broker learns later than we that it is gone, and gives back what was out; and of messages
//! that were acked just before, nobody knows whether the ack has arrived.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::walk::Taken;
use crate::connection::Client;
use crate::error::Error;

/// How long is waited for messages whose acks have not arrived. There may be none.
const FOR_DOUBTFUL: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(100);

/// Messages that were acked and may come again: so many of each likeness.
#[derive(Debug, Default)]
pub(super) struct Doubtful {
    alike: HashMap<u64, u64>,
    /// How many of them can come at most.
    most: u64,
    /// How many more there are since the last loss.
    latest: u64,
    /// How many messages the queue has when all that was out is back, and every ack has arrived; nothing before a loss.
    expected: Option<u64>,
}

impl Doubtful {
    /// A connection is lost, with acks that may not have arrived. So many messages will be there if they have.
    pub(super) fn add(&mut self, messages: Vec<Taken>, expected: u64) {
        self.expected = Some(expected);
        self.latest = messages.len() as u64;
        for taken in messages {
            *self.alike.entry(taken.message.likeness()).or_default() += 1;
        }
    }

    /// Waits until the broker has given back what was out, at most for the client's timeout: others may have taken some meanwhile. Says
    /// how many messages there are.
    pub(super) async fn until_given_back(
        &mut self,
        client: &Client,
        queue: &str,
        depth: u64,
    ) -> Result<u64, Error> {
        let Some(expected) = self.expected else { return Ok(depth) };
        let began = Instant::now();
        let depth = loop {
            let depth = u64::from(client.inspect_queue(queue).await?.messages);
            let patience = match depth < expected {
                true => client.core().options.timeout,
                false => FOR_DOUBTFUL,
            };
            if depth >= expected + self.latest || began.elapsed() >= patience {
                break depth;
            }
            sleep(PAUSE).await;
        };
        // If there are fewer than there should be, the count tells nothing.
        let back = depth.checked_sub(expected).unwrap_or(self.latest);
        self.most += back.min(self.latest);
        (self.expected, self.latest) = (None, 0);
        Ok(depth)
    }

    /// Whether this is one of them. It is none after that.
    pub(super) fn has(&mut self, taken: &Taken) -> bool {
        if self.is_empty() {
            return false;
        }
        let likeness = taken.message.likeness();
        let Some(count) = self.alike.get_mut(&likeness) else { return false };
        *count -= 1;
        if *count == 0 {
            self.alike.remove(&likeness);
        }
        self.most -= 1;
        true
    }

    pub(super) fn is_empty(&self) -> bool {
        self.alike.is_empty() || self.most == 0
    }
}
