//! Takes replies to the desk at once, where they are read, and not in a task that has to be woken first: a broker sends
//! replies one by one, and each would cost two wake-ups instead of one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use tokio::sync::Notify;

use super::asker::Shared;
use super::reply::Reply;
use crate::amqp::{self, Consumer, Parts, lock};

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

impl Reading {
    /// One right after the other: the thread that the runtime wakes for the first of them finds the others as well.
    fn wake_answered(&mut self) {
        if self.answered.len() > 1 {
            self.consumer.expect(self.answered.len());
        }
        // Should one of them panic, the others are not forgotten.
        while let Some(waker) = self.answered.pop_front() {
            waker.wake();
        }
    }
}

impl Wake for Pump {
    fn wake(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        let mut state = lock(&self.state);
        let State::Reading(reading) = &mut *state else { return };
        let end = loop {
            match reading.consumer.poll_ready(&mut Context::from_waker(&waker)) {
                Poll::Pending => break None,
                Poll::Ready(Ok(true)) => {
                    // They are not to be settled, so they may be taken apart.
                    if let Some(Parts { letter, .. }) = reading.consumer.take() {
                        let reply = Reply::new(letter.properties, letter.body);
                        reading.answered.extend(self.shared.receive(reply.correlation_id(), reply));
                    }
                }
                Poll::Ready(end) => break Some(end.err()),
            }
        };
        reading.wake_answered();
        if let Some(end) = end {
            *state = State::Ended(end);
            self.ended.notify_one();
        }
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
        // The consumer holds the pump as its waker, and the pump the consumer.
        *lock(&self.0.state) = State::Ended(None);
    }
}
