//! Deleting a queue together with the objects that retrying has put beside it.

use std::fmt;

use crate::amqp::{
    Channel, ConsumeOptions, DeleteExchange, DeleteQueue, GetOptions, ReplyCode, Table, Value,
};
use crate::connection::Client;
use crate::error::{Error, ErrorKind};
use crate::retry::{Retry, RetryPolicy, WorkQueue};
use crate::topology::{Destination, QueueType, Topology};

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
    /// How many messages are ready in a queue; once it is deleted, how many went with it, because they came at the last moment.
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

impl Client {
    /// Deletes a queue with its retry, wait and parking objects, unless there are messages in them.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leveret::Error> {
    /// use leveret::{Client, Queue, Topology};
    ///
    /// let client = Client::embedded().await?;
    /// client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
    /// let deleted = client.queue_removal("jobs").run().await?;
    /// assert!(deleted.iter().any(|object| object.name == "jobs" && object.is_there));
    /// # Ok(())
    /// # }
    /// ```
    pub fn queue_removal(&self, queue: impl Into<String>) -> QueueRemoval {
        QueueRemoval::new(self, queue.into())
    }
}

impl QueueRemoval {
    pub(crate) fn new(client: &Client, queue: String) -> Self {
        let retry = RetryPolicy::default().into();
        QueueRemoval { client: client.clone(), queue, retry, further: Vec::new() }
    }

    /// How its consumers retry: that names the objects. [`RetryPolicy::default`] otherwise.
    ///
    /// What a design shares between queues stays: see [`RetryProfile::belongings`](crate::retry::RetryProfile::belongings).
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
    /// exchange of its wait queues, unless it dead-letters there: such a queue goes first, since it would lose messages without
    /// the others. If deleting stops half-way, the error names what is gone.
    ///
    /// Stop publishers and consumers before, and wait until consumers have settled what they have: AMQP does not tell of messages
    /// that are delivered and not acknowledged, and they are deleted with their queue. A classic queue is deleted by the broker only
    /// while it is empty; quorum queues know no such condition. What is published at that moment may go with a queue of either type,
    /// confirmed or not.
    pub async fn run(&self) -> Result<Vec<Belonging>, Error> {
        let mut plan = self.plan().await?;
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
        let mut gone = Vec::new();
        for belonging in plan.iter_mut().filter(|belonging| belonging.is_there) {
            let deleted = match belonging.is_queue {
                true => {
                    self.delete_queue(belonging).await.map(|messages| belonging.messages = messages)
                }
                false => self.delete_exchange(&belonging.name).await,
            };
            match deleted {
                Ok(()) => gone.push(belonging.to_string()),
                Err(error) if gone.is_empty() => return Err(error),
                Err(error) => {
                    let text = format!(
                        "only a part of what belongs to queue {:?} is deleted: {}. Delete the rest later, or declare again what \
                         is gone",
                        self.queue,
                        gone.join(", ")
                    );
                    return Err(Error::caused(error.kind(), text, error));
                }
            }
        }
        Ok(plan)
    }

    /// Deletes a queue that is still empty. Says how many messages went with it all the same.
    async fn delete_queue(&self, belonging: &Belonging) -> Result<u32, Error> {
        let occupied = |what: &str| {
            let text = format!("cannot delete {belonging}: {what}, which came meanwhile");
            Error::new(ErrorKind::Conflict, text)
        };
        let queue = belonging.name.as_str();
        if let Some(found) = occupation(&self.look_at(true, queue.to_owned()).await?) {
            return Err(occupied(&found));
        }
        let when = match self.type_of(queue).await? {
            Some(QueueType::Classic) => DeleteQueue { if_unused: true, if_empty: true },
            Some(QueueType::Stream) => DeleteQueue::default(),
            // Its counts are 0 as well while its leader does not answer, and it knows no condition: 540 costs the connection.
            _ if self.has_message(queue).await? => {
                return Err(occupied(&format!("{belonging} has a message")));
            }
            _ => DeleteQueue::default(),
        };
        self.client.delete_queue(queue, when).await.map_err(|error| match error.reply_code() {
            Some(ReplyCode::PRECONDITION_FAILED) => occupied("it has messages or consumers"),
            _ => error,
        })
    }

    /// The type of a queue, as the broker tells it when it refuses a consumer with an argument of streams. A stream takes that one,
    /// and delivers nothing: it means to wait for what is yet to come.
    async fn type_of(&self, queue: &str) -> Result<Option<QueueType>, Error> {
        let arguments = Table::from_pairs([("x-stream-offset", Value::from("next"))]);
        let arguments = arguments.map_err(|error| Error::invalid(error.to_string()))?;
        let consume = |channel: Channel| {
            let arguments = arguments.clone();
            let options = ConsumeOptions { arguments, prefetch: 1, ..ConsumeOptions::default() };
            async move {
                match channel.consume(queue, options).await {
                    Ok(_) => Ok(Some(QueueType::Stream)),
                    Err(error) if error.is_connection_error() => Err(error),
                    Err(error) => {
                        let is_classic = error.to_string().contains("rabbit_classic_queue");
                        Ok(is_classic.then_some(QueueType::Classic))
                    }
                }
            }
        };
        self.client
            .on_channel(&format!("cannot find out the type of queue {queue:?}"), consume)
            .await
    }

    /// Whether a message can be taken out of a queue, as far as this user may read. It goes back when the channel is closed.
    async fn has_message(&self, queue: &str) -> Result<bool, Error> {
        let what = format!("cannot look into queue {queue:?}");
        let get = move |channel: Channel| async move {
            match channel.get(queue, GetOptions::default()).await {
                Ok(got) => Ok(got.is_some()),
                Err(error) if error.reply_code() == Some(ReplyCode::ACCESS_REFUSED) => Ok(false),
                Err(error) => Err(error),
            }
        };
        self.client.on_channel(&what, get).await
    }

    /// Wait queues, the exchanges that lead to them alone, the queue, all else. A queue that dead-letters goes first: without the
    /// others, what it dead-letters would be lost.
    fn order(&self) -> Result<Vec<(bool, String)>, Error> {
        let work = WorkQueue::undeclared(&self.queue);
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
        let it = (true, self.queue.clone());
        let dead_letters = topology.queues().iter().any(|queue| {
            queue.name() == self.queue && queue.arguments.get("x-dead-letter-exchange").is_some()
        });
        let mut order = if dead_letters { vec![it.clone()] } else { Vec::new() };
        order.extend(waits.iter().map(|name| (true, (*name).to_owned())));
        order.extend(self.further.iter().filter(|name| !is_wait(name)).map(|n| (true, n.clone())));
        let exchanges = || topology.exchanges().iter().map(|exchange| exchange.name());
        let of_waits = exchanges().filter(|name| !leads_to(name, &is_other));
        order.extend(of_waits.map(|name| (false, name.to_owned())));
        if !dead_letters {
            order.push(it);
        }
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
