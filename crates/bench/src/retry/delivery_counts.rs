//! Which messages there are, and what became of them.

use std::sync::atomic::{AtomicU8, Ordering};

use super::Job;
use crate::countdown::Countdown;
use crate::message::number;
use crate::meter::Failure;

/// What becomes of a delivery, for either candidate.
pub(super) enum Verdict {
    Success,
    FailsNow,
    FailsForGood,
}

/// Every message by its number, with how often it was delivered.
pub(super) struct DeliveryCounts {
    job: Job,
    deliveries: Vec<AtomicU8>,
    /// The messages that have come as far as the job wants them.
    done: Countdown,
}

impl DeliveryCounts {
    pub(super) fn new(job: Job, messages: u64) -> Self {
        let deliveries = (0..messages).map(|_| AtomicU8::new(0)).collect();
        DeliveryCounts { job, deliveries, done: Countdown::new(messages) }
    }

    /// The handler of both candidates.
    pub(super) fn handle(&self, body: &[u8]) -> Verdict {
        let before = self.count(body).unwrap_or(0);
        match (self.job, before) {
            (Job::FailOnce, 0) => Verdict::FailsNow,
            (Job::FailOnce, _) => Verdict::Success,
            (Job::Park | Job::Replay, _) => Verdict::FailsForGood,
        }
    }

    /// A delivery of a message, and how many there were before; `None` if there is no such message.
    pub(super) fn count(&self, body: &[u8]) -> Option<u8> {
        let number = usize::try_from(number(body)?).ok()?;
        let before = self.deliveries.get(number)?.fetch_add(1, Ordering::Relaxed);
        if before == u8::from(self.job == Job::FailOnce) {
            self.done.add(1);
        }
        Some(before)
    }

    /// Waits until every message has been delivered as often as the job needs.
    pub(super) async fn all_done(&self) {
        self.done.done().await;
    }

    /// Fails unless every message was delivered exactly so many times.
    pub(super) fn expect_each(&self, times: u8) -> Result<(), Failure> {
        let found = |delivered: &AtomicU8| delivered.load(Ordering::Relaxed);
        let wrong = self.deliveries.iter().filter(|delivered| found(delivered) != times).count();
        match wrong {
            0 => Ok(()),
            wrong => Err(format!("{wrong} messages did not come {times} times").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::numbered;

    #[tokio::test]
    async fn a_message_fails_once_and_then_succeeds() {
        let counts = DeliveryCounts::new(Job::FailOnce, 2);
        for number in [0, 1] {
            assert!(matches!(counts.handle(&numbered(number, 9)), Verdict::FailsNow));
        }
        assert!(counts.expect_each(1).is_ok());
        for number in [0, 1] {
            assert!(matches!(counts.handle(&numbered(number, 9)), Verdict::Success));
        }
        counts.all_done().await;
        assert!(counts.expect_each(2).is_ok());
        assert_eq!(counts.count(&numbered(1, 9)), Some(2));
        assert!(counts.expect_each(2).is_err());
    }

    #[test]
    fn there_is_no_other_message() {
        let counts = DeliveryCounts::new(Job::Park, 2);
        assert_eq!(counts.count(&numbered(2, 9)), None);
        assert_eq!(counts.count(b"short"), None);
    }
}
