//! How a walk gives back what it has left at its place.

use tokio::time::sleep;

use super::{GiveBack, IDLE, Walk};
use crate::error::Error;

impl Walk {
    /// Gives back what was not acked, and returns when it is there.
    pub(in crate::parking) async fn end(&mut self) -> Result<(), Error> {
        self.is_over = true;
        self.send_acks()?;
        // Closing would not tell whether the acks were taken.
        let mut back = self.check_held().await?;
        for page in &self.pages {
            let given_back = match (self.give_back, page.open.last()) {
                (GiveBack::ByClosing, _) => page.channel.close().await,
                (GiveBack::ByNack, Some(tag)) => page.channel.requeue_through(*tag),
                (GiveBack::ByNack, None) => Ok(()),
            };
            given_back.map_err(|error| self.failed(error))?;
            back += page.open.len() as u64;
            // Two channels that are closed one after the other may arrive in any order at the queue.
            if self.give_back == GiveBack::ByClosing {
                self.until_back(back).await;
            }
        }
        // Before the channel is closed: with it, a quorum queue that is slow forgets acks that it was not told of yet. What is given back
        // comes to it after them.
        self.until_back(back).await;
        self.channel().close().await.map_err(|error| self.failed(error))?;
        Ok(())
    }

    fn has_open(&self) -> bool {
        self.pages.iter().any(|page| !page.open.is_empty())
    }

    /// Whether it may not end here. A quorum queue hands out first what was given back, in the order in which it was: so all
    /// that was given back before and follows has to be given back anew, or it would stand before what we give back.
    pub(in crate::parking) fn is_among_returned(&self) -> bool {
        self.has_open() && self.is_among_returned && !self.is_at_end && !self.renews
    }

    /// Whether it came to its end.
    pub(in crate::parking) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whoever looks next should see what was given back, and nothing tells when it is there. If others take messages meanwhile, it
    /// is not waited for long.
    async fn until_back(&self, expected: u64) {
        for _ in 0..40 {
            match self.client.inspect_queue(&self.queue).await {
                Ok(info) if self.has_open() && u64::from(info.messages) < expected => {
                    sleep(IDLE / 4).await;
                }
                _ => return,
            }
        }
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        // An error is one of a connection that is gone, and with it all that was held.
        let _ = self.send_acks();
        for page in &self.pages {
            match (self.give_back, page.open.last()) {
                // Closing would count. What the consumer still has follows when it is dropped; then the channel is closed.
                (GiveBack::ByNack, Some(tag)) => drop(page.channel.requeue_through(*tag)),
                (GiveBack::ByNack, None) => {}
                // Before the consumer is dropped, which would give back one by one what it has.
                (GiveBack::ByClosing, _) => page.channel.close_now(),
            }
        }
    }
}
