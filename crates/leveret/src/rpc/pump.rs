//! Takes replies to the desk at once, where they are read, and not in a task that has to be woken first: a broker sends
//! replies one by one, and each would cost two wake-ups instead of one.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use futures_core::Stream as _;
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
    Reading(Consumer),
    /// Why, if it has an error.
    Ended(Option<amqp::Error>),
}

impl Wake for Pump {
    fn wake(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        let mut state = lock(&self.state);
        while let State::Reading(consumer) = &mut *state {
            match Pin::new(consumer).poll_next(&mut Context::from_waker(&waker)) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(delivery))) => self.shared.receive(Reply::of(&delivery)),
                Poll::Ready(end) => *state = State::Ended(end.and_then(Result::err)),
            }
        }
        self.ended.notify_one();
    }
}

/// A pump at work. Dropped, it lets go of its consumer.
pub(super) struct Pumping(Arc<Pump>);

impl Pumping {
    /// Begins to take replies to the desk.
    pub(super) fn start(shared: &Arc<Shared>, consumer: Consumer) -> Self {
        let pump = Arc::new(Pump {
            shared: Arc::clone(shared),
            state: Mutex::new(State::Reading(consumer)),
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
