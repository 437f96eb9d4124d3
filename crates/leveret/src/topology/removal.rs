//! Deleting a queue together with the objects that retrying has put beside it.

use std::fmt;

use crate::amqp::{Channel, DeleteExchange, DeleteQueue, ReplyCode};
use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::retry::profile::WorkQueue;
use crate::retry::{Retry, RetryPolicy};
use crate::topology::{Destination, Topology};

/// Deletes a queue with its retry, wait and parking objects, as long as there is no message in any of them. From
/// [`Client::queue_removal`].
#[derive(Clone, Debug)]
#[must_use = "nothing is deleted until it is run"]
pub struct QueueRemoval {
    client: Client,
    queue: String,
    retry: Retry,
    further: Vec<String>,
}

/// An object that belongs to a queue, as it was found on the broker.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Belonging {
    /// Whether it is a queue, and not an exchange.
    pub is_queue: bool,
    /// Its name.
    pub name: String,
    /// Whether it is on the broker.
    pub is_there: bool,
    /// How many messages are ready in a queue.
    pub messages: u32,
    /// How many consumers a queue has.
    pub consumers: u32,
}

impl fmt::Display for Belonging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_queue { "queue" } else { "exchange" };
        write!(f, "{kind} {:?}", self.name)
    }
}

impl QueueRemoval {
    pub(crate) fn new(client: &Client, queue: String) -> Self {
        let retry = RetryPolicy::default().into();
        QueueRemoval { client: client.clone(), queue, retry, further: Vec::new() }
    }

    /// How its consumers retry: that names the objects. [`RetryPolicy::default`] otherwise.
    ///
    /// Of [`CoverArt`](crate::CoverArt) and [`Orb`](crate::Orb), which share all other objects between queues, the queue alone is
    /// deleted. Of [`Chandra`](crate::Chandra), the primary exchange and a shared dead-letter exchange stay.
    pub fn retry(mut self, retry: impl Into<Retry>) -> Self {
        self.retry = retry.into();
        self
    }

    /// Another queue that belongs to it: a wait queue of an earlier policy, or one that a handler has asked for by
    /// [`Failure::retry_after`](crate::Failure::retry_after).
    pub fn also(mut self, queue: impl Into<String>) -> Self {
        self.further.push(queue.into());
        self
    }

    /// What belongs to the queue, in the order in which it is deleted. Changes nothing.
    pub async fn plan(&self) -> Result<Vec<Belonging>, Error> {
        let mut found = Vec::new();
        for (is_queue, name) in self.order()? {
            found.push(self.look_at(is_queue, name).await?);
        }
        Ok(found)
    }

    /// Deletes all of it, and says what was there.
    ///
    /// If a queue has messages or consumers, nothing is deleted. Neither is the queue itself if another queue is bound to the
    /// exchange of its wait queues. Publishers should have ended before: what is published meanwhile may be deleted, too.
    pub async fn run(&self) -> Result<Vec<Belonging>, Error> {
        let plan = self.plan().await?;
        let occupied: Vec<_> = plan.iter().filter_map(occupation).collect();
        if !occupied.is_empty() {
            let text = format!(
                "cannot delete queue {:?} with all that belongs to it: {}. Nothing was deleted: replay or purge the messages, \
                 and stop the consumers",
                self.queue,
                occupied.join("; ")
            );
            return Err(Error::new(ErrorKind::Conflict, text));
        }
        for belonging in plan.iter().filter(|belonging| belonging.is_there) {
            if !belonging.is_queue {
                self.delete_exchange(&belonging.name).await?;
                continue;
            }
            // Quorum queues know no condition, so it is asked for once more.
            let now = self.look_at(true, belonging.name.clone()).await?;
            if let Some(occupied) = occupation(&now) {
                let text = format!(
                    "cannot delete {now}: {occupied}, which came meanwhile. What was deleted before was empty"
                );
                return Err(Error::new(ErrorKind::Conflict, text));
            }
            self.client.delete_queue(&belonging.name, DeleteQueue::default()).await?;
        }
        Ok(plan)
    }

    /// Wait queues, the exchanges that lead to them alone, the queue, all else.
    fn order(&self) -> Result<Vec<(bool, String)>, Error> {
        let work = WorkQueue::Unknown(self.queue.clone());
        let topology = self.retry.profile().belongings(&work)?;
        let leads_to = |exchange: &str, is_it: &dyn Fn(&str) -> bool| {
            let from = topology.bindings().iter().filter(|binding| binding.source() == exchange);
            from.into_iter().any(|binding| match binding.destination() {
                Destination::Queue(queue) => is_it(queue),
                Destination::Exchange(_) => false,
            })
        };
        let waits = waiting_in(&topology);
        let is_wait = |queue: &str| waits.contains(&queue);
        let is_other = |queue: &str| !is_wait(queue);
        let mut order: Vec<_> = waits.iter().map(|name| (true, (*name).to_owned())).collect();
        order.extend(self.further.iter().filter(|name| !is_wait(name)).map(|n| (true, n.clone())));
        let exchanges = || topology.exchanges().iter().map(|exchange| exchange.name());
        let of_waits = exchanges().filter(|name| !leads_to(name, &is_other));
        order.extend(of_waits.map(|name| (false, name.to_owned())));
        order.push((true, self.queue.clone()));
        let others = topology.queues().iter().map(|queue| queue.name());
        let others = others.filter(|name| is_other(name) && *name != self.queue);
        order.extend(others.map(|name| (true, name.to_owned())));
        let rest = exchanges().filter(|name| leads_to(name, &is_other));
        order.extend(rest.map(|name| (false, name.to_owned())));
        Ok(order)
    }

    async fn look_at(&self, is_queue: bool, name: String) -> Result<Belonging, Error> {
        let what = format!("cannot inspect {name:?}");
        let asked = name.as_str();
        let ask = move |channel: Channel| async move {
            let answer = match is_queue {
                true => {
                    channel.inspect_queue(asked).await.map(|info| (info.messages, info.consumers))
                }
                false => channel.inspect_exchange(asked).await.map(|()| (0, 0)),
            };
            match answer {
                Ok(counts) => Ok(Some(counts)),
                Err(error) if error.reply_code() == Some(ReplyCode::NOT_FOUND) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let found = self.client.on_channel(&what, ask).await?;
        let (messages, consumers) = found.unwrap_or_default();
        Ok(Belonging { is_queue, name, is_there: found.is_some(), messages, consumers })
    }

    async fn delete_exchange(&self, name: &str) -> Result<(), Error> {
        let unused = DeleteExchange::IfUnused;
        self.client.delete_exchange(name, unused).await.map_err(|error| {
            if error.reply_code() != Some(ReplyCode::PRECONDITION_FAILED) {
                return error;
            }
            let text = format!(
                "exchange {name:?} stays, since something is bound to it that does not belong to queue {:?} as far as is known. \
                 Name further wait queues, or take away the binding",
                self.queue
            );
            Error::caused(ErrorKind::Conflict, text, error)
        })
    }
}

/// The queues in which messages wait to be tried again: those that dead-letter.
fn waiting_in(topology: &Topology) -> Vec<&str> {
    let waits = topology.queues().iter().filter(|queue| {
        let has = |name: &str| queue.arguments.get(name).is_some();
        has("x-dead-letter-exchange") && has("x-message-ttl")
    });
    waits.map(|queue| queue.name()).collect()
}

/// What keeps a queue from being deleted.
fn occupation(belonging: &Belonging) -> Option<String> {
    let Belonging { messages, consumers, .. } = belonging;
    let counted = |count: u32, what: &str| match count {
        0 => None,
        1 => Some(format!("1 {what}")),
        _ => Some(format!("{count} {what}s")),
    };
    let counts = [counted(*messages, "message"), counted(*consumers, "consumer")];
    let counts: Vec<_> = counts.into_iter().flatten().collect();
    (!counts.is_empty()).then(|| format!("{belonging} has {}", counts.join(" and ")))
}
