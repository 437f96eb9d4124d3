//! Batches: many messages on one channel, confirmed as a whole.

use std::fmt;

use super::span::PublishSpan;
use super::{Publisher, Ticket};
use crate::error::Error;
use crate::message::IntoMessage;

/// Which messages of a batch were not confirmed, and why.
#[derive(Clone, Debug)]
pub struct BatchError {
    confirmed: usize,
    failed: Vec<(usize, Error)>,
}

impl BatchError {
    /// How many messages of the batch the broker has taken.
    pub fn confirmed(&self) -> usize {
        self.confirmed
    }

    /// Those it has not, by their place in the batch, and why.
    pub fn failed(&self) -> &[(usize, Error)] {
        &self.failed
    }
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.confirmed + self.failed.len();
        write!(f, "{} of {total} messages were not confirmed", self.failed.len())?;
        match self.failed.first() {
            Some((index, error)) => write!(f, "; the first is number {index}: {error}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for BatchError {}

impl Publisher {
    /// Publishes messages, each with its routing key, in order on one channel, and waits until all have their outcome.
    ///
    /// It succeeds if all are confirmed; the error says which were not, the others being safe. A batch that is
    /// interrupted by the loss of the connection is completed when the broker is back, as any publish is.
    pub async fn publish_batch<K, M>(
        &self,
        messages: impl IntoIterator<Item = (K, M)>,
    ) -> Result<usize, BatchError>
    where
        K: AsRef<str>,
        M: IntoMessage,
    {
        let span = PublishSpan::of_batch(self.exchange());
        let mut tickets: Vec<Result<Ticket, Error>> = Vec::new();
        for (routing_key, message) in messages {
            let within = span.for_message();
            tickets.push(self.send_within(&within, routing_key.as_ref(), message).await);
        }
        span.count(tickets.len());
        let mut report = BatchError { confirmed: 0, failed: Vec::new() };
        for (index, ticket) in tickets.into_iter().enumerate() {
            let outcome = match ticket {
                Ok(ticket) => ticket.await,
                Err(error) => Err(error),
            };
            match outcome {
                Ok(()) => report.confirmed += 1,
                Err(error) => report.failed.push((index, error)),
            }
        }
        match report.failed.first() {
            None => Ok(report.confirmed),
            Some((_, error)) => {
                span.record::<()>(&Err(error.clone()));
                Err(report)
            }
        }
    }
}
