//! How a walk gives back what it has left at its place.

use tokio::time::sleep;

use super::{GiveBack, IDLE, Walk};
use crate::error::Error;

/// So many pages are given back together: fewer than a quorum queue is told of at once.
const TOGETHER: usize = 16;

impl Walk {
    /// Gives back what was not acked, and returns when it is there.
    pub(in crate::parking) async fn end(&mut self) -> Result<(), Error> {
        self.is_over = true;
        self.catch_up().await?;
        // Closing would not tell whether the acks were taken.
        let mut back = self.check_held().await?;
        for (number, page) in (1..).zip(&self.pages) {
            let given_back = match (self.give_back, page.open.last()) {
                (GiveBack::ByClosing, _) => page.channel.close().await,
                (GiveBack::ByNack, Some(tag)) => page.channel.requeue_through(*tag),
                (GiveBack::ByNack, None) => Ok(()),
            };
            given_back.map_err(|error| self.failed(error))?;
            back += page.open.len() as u64;
            // Two channels that are closed one after the other may arrive in any order at the queue, and so does what its channel holds
            // back from one that has not caught up.
            let is_many = self.may_hold_back && number % TOGETHER == 0;
            if self.give_back == GiveBack::ByClosing || is_many {
                self.until_back(back).await;
            }
        }
        // Before the channel is closed, which forgets what a quorum queue that is slow was not told of yet.
        self.until_back(back).await;
        self.channel().close().await.map_err(|error| self.failed(error))?;
        Ok(())
    }

    /// Acks all that wait for it, and waits until a quorum queue has caught up with that: before, the channel would hold back what is given
    /// back, to tell it in another order; and if it is closed, forget both. To begin and to end a consumer takes as long as that. What it
    /// gets is one page more.
    pub(in crate::parking) async fn catch_up(&mut self) -> Result<(), Error> {
        self.send_acks()?;
        if !self.may_hold_back || self.acks.are_for_sure() {
            return Ok(());
        }
        self.check_held().await?;
        if self.acks.are_for_sure() {
            return Ok(());
        }
        let channel = self.turn_page().await?;
        self.begin_consuming(&channel, 1).await?;
        self.stop_consuming(&mut Vec::new()).await
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
