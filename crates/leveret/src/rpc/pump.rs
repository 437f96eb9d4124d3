//! Takes replies to the desk at once, where they are read, and not in a task that has to be woken first: a broker sends
//! replies one by one, and each would cost two wake-ups instead of one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use tokio::sync::Notify;

use super::asker::Shared;
use super::reply::Reply;
use crate::amqp::{self, Consumer, lock};

/// Being woken, it takes what came to the desk.
#[derive(Debug)]
struct Pump {
    shared: Arc<Shared>,
    state: Mutex<State>,
    /// Nothing more comes.
    ended: Notify,
}

#[derive(Debug)]
enum State {
    Reading(Reading),
    /// Why, if it has an error.
    Ended(Option<amqp::Error>),
}

#[derive(Debug)]
struct Reading {
    consumer: Consumer,
    /// Who got a reply, and is to be told.
    answered: VecDeque<Waker>,
}

impl Pump {
    /// Takes what came to the desk, and gives the wakers of those that are answered.
    fn take_replies(self: &Arc<Self>) -> VecDeque<Waker> {
        let waker = Waker::from(Arc::clone(self));
        let mut state = lock(&self.state);
        let State::Reading(reading) = &mut *state else { return VecDeque::new() };
        let end = loop {
            match reading.consumer.poll_ready(&mut Context::from_waker(&waker)) {
                Poll::Pending => break None,
                Poll::Ready(Ok(true)) => {
                    if let Some(delivery) = reading.consumer.take() {
                        let (_, content) = delivery.split();
                        let reply = Reply::new(content.properties, content.body);
                        reading.answered.extend(self.shared.receive(reply.correlation_id(), reply));
                    }
                }
                Poll::Ready(end) => break Some(end.err()),
            }
        };
        if reading.answered.len() > 1 {
            reading.consumer.expect(reading.answered.len());
        }
        let answered = std::mem::take(&mut reading.answered);
        if let Some(end) = end {
            let ended = std::mem::replace(&mut *state, State::Ended(end));
            drop(state);
            drop(ended);
            self.ended.notify_one();
        }
        answered
    }
}

/// Wakes callers, one right after the other: the thread that the runtime wakes for the first of them finds the others as well.
struct Answered<'a> {
    pump: &'a Pump,
    wakers: VecDeque<Waker>,
}

impl Answered<'_> {
    fn wake(&mut self) {
        while let Some(waker) = self.wakers.pop_front() {
            waker.wake();
        }
    }
}

impl Drop for Answered<'_> {
    /// Should one of them panic, the others are not forgotten.
    fn drop(&mut self) {
        if !self.wakers.is_empty()
            && let State::Reading(reading) = &mut *lock(&self.pump.state)
        {
            reading.answered.append(&mut self.wakers);
        }
    }
}

impl Wake for Pump {
    /// A waker is foreign code, which may drop what this pump belongs to: nothing is locked while it runs.
    fn wake(self: Arc<Self>) {
        let wakers = self.take_replies();
        Answered { pump: &self, wakers }.wake();
    }
}

/// A pump at work. Dropped, it lets go of its consumer.
pub(super) struct Pumping(Arc<Pump>);

impl Pumping {
    /// Begins to take replies to the desk.
    pub(super) fn start(shared: &Arc<Shared>, consumer: Consumer) -> Self {
        let pump = Arc::new(Pump {
            shared: Arc::clone(shared),
            state: Mutex::new(State::Reading(Reading { consumer, answered: VecDeque::new() })),
            ended: Notify::new(),
        });
        Arc::clone(&pump).wake();
        Pumping(pump)
    }

    /// Waits until nothing more comes. Says why, if it was not asked for.
    pub(super) async fn ended(&self) -> Option<amqp::Error> {
        loop {
            if let State::Ended(error) = &*lock(&self.0.state) {
                return error.clone();
            }
            self.0.ended.notified().await;
        }
    }
}

impl Drop for Pumping {
    fn drop(&mut self) {
        // The consumer holds the pump as its waker, and the pump the consumer. It is dropped when nothing is locked.
        let _reading = std::mem::replace(&mut *lock(&self.0.state), State::Ended(None));
    }
}

#[cfg(all(test, feature = "embedded"))]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::super::Replies;
    use super::super::asker::{Asker, Settings, declare_reply_queue};
    use super::super::correlation::CorrelationId;
    use super::super::desk::Wanted;
    use super::*;
    use crate::amqp::{ConsumeOptions, Properties, Publish};
    use crate::connection::Client;
    use crate::publisher::OnLoss;
    use crate::telemetry::Strays;

    /// Holds what a reply wakes it from, and drops that then.
    #[derive(Default)]
    struct Dropping {
        pumping: Mutex<Option<Pumping>>,
        dropped: Notify,
    }

    impl Wake for Dropping {
        fn wake(self: Arc<Self>) {
            let pumping = lock(&self.pumping).take();
            drop(pumping);
            self.dropped.notify_one();
        }
    }

    /// Has a reply come to a pump that its waker drops.
    async fn is_dropped() -> bool {
        let client = Client::embedded().await.unwrap();
        let settings = Settings {
            what: "calling".to_owned(),
            exchange: String::new(),
            replies: Replies::Queue,
            on_loss: OnLoss::Fail,
            max_in_flight: 1,
        };
        let asker = Asker::new(&client, settings, Strays::new("numbers"));
        let shared = asker.shared();
        let up = client.core().publishing().up().await.unwrap();
        let channel = up.connection.open_channel().await.unwrap().into_confirm().await.unwrap();
        let queue = declare_reply_queue(&channel).await.unwrap();
        let options = ConsumeOptions { auto_ack: true, ..ConsumeOptions::default() };
        let consumer = channel.consume(&queue, options).await.unwrap();
        let (id, dropping) = (CorrelationId::fresh(), Arc::new(Dropping::default()));
        let waker = Waker::from(Arc::clone(&dropping));
        {
            let mut desk = lock(&shared.desk);
            desk.open(id, Wanted::One, None, None);
            assert!(desk.poll(id, &mut Context::from_waker(&waker)).is_pending());
        }
        *lock(&dropping.pumping) = Some(Pumping::start(&shared, consumer));
        let text = id.to_text();
        let correlation_id = Some(text.as_short_str());
        let properties = Properties { correlation_id, ..Properties::default() };
        let reply = Publish { routing_key: &queue, properties, ..Publish::default() };
        drop(channel.publish(&reply).await.unwrap());
        timeout(Duration::from_secs(10), dropping.dropped.notified()).await.is_ok()
    }

    #[test]
    fn a_caller_may_drop_the_pump_that_wakes_it() {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
        let is_dropped = runtime.block_on(is_dropped());
        // A thread that waits for itself would never end.
        runtime.shutdown_background();
        assert!(is_dropped);
    }
}
