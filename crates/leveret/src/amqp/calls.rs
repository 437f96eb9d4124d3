//! Calls that wait for the broker's reply.
//!
//! Replies of one kind come in the order of the calls. Those of different kinds may overtake each other: RabbitMQ's
//! queues answer `basic.consume` and `basic.cancel` themselves, its channels the rest.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use leveret_wire::{Content, Method, ShortStr, method::basic};
use tokio::sync::oneshot;

use super::consumer::ConsumerQueue;
use super::error::Error;
use super::lock;

/// What a call was answered with.
#[derive(Debug)]
pub(super) enum Reply {
    Method(Method<'static>),
    /// `basic.get-ok` with its message.
    Got(Box<Content<basic::GetOk<'static>>>),
}

impl Reply {
    fn name(&self) -> &'static str {
        match self {
            Reply::Method(method) => method.name(),
            Reply::Got(_) => basic::GetOk::NAME,
        }
    }
}

/// A call under way.
#[derive(Debug)]
struct Call {
    name: &'static str,
    reply: oneshot::Sender<Result<Reply, Error>>,
    subject: Subject,
}

/// What the reader has to know of a call when its reply comes.
#[derive(Debug)]
pub(super) enum Subject {
    /// Nothing.
    None,
    /// Which consumer is begun or cancelled: two of them may be answered in any order. Deliveries may follow the reply
    /// to a `basic.consume` at once, so it comes with the queue for them.
    Consumer(ShortStr<'static>, Option<Arc<ConsumerQueue>>),
    /// Whether the message of a `basic.get` is settled by being sent. If not, and the caller has gone, it goes back.
    Get { auto_ack: bool },
}

/// What the reader has to do about a reply.
#[derive(Debug)]
pub(super) enum Replied {
    Done,
    /// Deliveries for this consumer may follow.
    Begin(Arc<ConsumerQueue>),
    /// Nobody waits any longer for the message with this tag.
    GiveBack(u64),
}

impl Call {
    fn is_answered_by(&self, reply: &Reply) -> bool {
        let consumer = match reply {
            Reply::Method(Method::BasicConsumeOk(reply)) => Some(&reply.consumer_tag),
            Reply::Method(Method::BasicCancelOk(reply)) => Some(&reply.consumer_tag),
            _ => None,
        };
        answers(self.name, reply.name())
            && match &self.subject {
                Subject::Consumer(tag, _) => consumer == Some(tag),
                _ => true,
            }
    }
}

/// The calls of one channel, oldest first. Each has a task that waits, so their number is bounded by that of tasks.
#[derive(Debug, Default)]
pub(super) struct Calls(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Call>,
    closed: Option<Error>,
}

impl Calls {
    /// Sends a call and remembers who waits for its reply, both or neither.
    pub(super) fn begin(
        &self,
        name: &'static str,
        subject: Subject,
        send: impl FnOnce() -> Result<(), Error>,
    ) -> Result<oneshot::Receiver<Result<Reply, Error>>, Error> {
        let mut state = lock(&self.0);
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        send()?;
        let (reply, receiver) = oneshot::channel();
        state.waiting.push_back(Call { name, reply, subject });
        Ok(receiver)
    }

    /// A reply came.
    pub(super) fn reply(&self, reply: Reply) -> Result<Replied, Error> {
        let call = {
            let waiting = &mut lock(&self.0).waiting;
            let asked = waiting.iter().position(|call| call.is_answered_by(&reply));
            asked.and_then(|place| waiting.remove(place))
        };
        let Some(call) = call else {
            let text = format!("the broker sent {}, and nobody had asked", reply.name());
            return Err(Error::protocol(text));
        };
        let unclaimed = call.reply.send(Ok(reply)).err();
        Ok(match (call.subject, unclaimed) {
            (Subject::Consumer(_, Some(queue)), _) => Replied::Begin(queue),
            (Subject::Get { auto_ack: false }, Some(Ok(Reply::Got(got)))) => {
                Replied::GiveBack(got.method.delivery_tag)
            }
            _ => Replied::Done,
        })
    }

    /// Fails all calls under way and to come.
    pub(super) fn close(&self, error: &Error) {
        let waiting = {
            let mut state = lock(&self.0);
            state.closed.get_or_insert_with(|| error.clone());
            std::mem::take(&mut state.waiting)
        };
        for call in waiting {
            let _ = call.reply.send(Err(error.clone()));
        }
    }
}

/// `queue.declare` is answered by `queue.declare-ok`, and `basic.get` by one of two.
fn answers(call: &str, reply: &str) -> bool {
    reply.strip_suffix("-ok") == Some(call)
        || (call, reply) == (basic::Get::NAME, basic::GetEmpty::NAME)
}
