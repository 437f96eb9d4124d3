//! Calls that wait for the broker's reply.
//!
//! Replies of one kind come in the order of the calls. Those of different kinds may overtake each other: RabbitMQ's
//! queues answer `basic.consume` and `basic.cancel` themselves, its channels the rest.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use leveret_wire::{Content, Method, ShortStr, method::basic};
use tokio::sync::oneshot;

use super::connection::Core;
use super::consumer::ConsumerQueue;
use super::delivery::is_of_stream;
use super::error::{Error, ErrorKind};
use super::link::ChannelState;
use super::lock;

/// How many calls of a channel may be under way, those included that nobody waits for any longer.
const MAX_WAITING: usize = 8192;

/// What a call was answered with.
#[derive(Debug)]
pub(super) enum Reply {
    Method(Method<'static>),
    /// `basic.get-ok` with its message.
    Got(Got),
}

impl Reply {
    fn name(&self) -> &'static str {
        match self {
            Reply::Method(method) => method.name(),
            Reply::Got(_) => basic::GetOk::NAME,
        }
    }
}

/// The message of a `basic.get-ok`. If nobody takes it, it goes back to its queue.
#[derive(Debug)]
pub(super) struct Got {
    content: Option<Box<Content<basic::GetOk<'static>>>>,
    core: Arc<Core>,
    channel: Arc<ChannelState>,
    auto_ack: bool,
}

impl Got {
    pub(super) fn new(
        content: Content<basic::GetOk<'static>>,
        core: &Arc<Core>,
        channel: &Arc<ChannelState>,
    ) -> Self {
        let (core, channel) = (Arc::clone(core), Arc::clone(channel));
        Got { content: Some(Box::new(content)), core, channel, auto_ack: false }
    }

    pub(super) fn take(mut self) -> Option<Box<Content<basic::GetOk<'static>>>> {
        self.content.take()
    }

    /// The broker counts it as settled.
    fn set_auto_ack(&mut self) {
        self.auto_ack = true;
        if let Some(content) = &self.content {
            lock(&self.channel.settled).mark(content.method.delivery_tag);
        }
    }
}

impl Drop for Got {
    fn drop(&mut self) {
        if let Some(content) = self.content.take()
            && !self.auto_ack
        {
            let tag = content.method.delivery_tag;
            self.core.requeue(&self.channel, tag, is_of_stream(&content.properties));
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
    /// Whether the message of a `basic.get` is settled by being sent.
    Get { auto_ack: bool },
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

/// A consumer to which the broker delivers from now on.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) queue: Arc<ConsumerQueue>,
    /// It is to be cancelled at once: nobody wants it any longer.
    pub(super) unwanted: bool,
}

/// The calls of one channel, oldest first.
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
        if state.waiting.len() >= MAX_WAITING {
            let text = format!(
                "{MAX_WAITING} calls on the channel are without a reply; {name} was not sent"
            );
            return Err(Error::new(ErrorKind::Timeout, text));
        }
        send()?;
        let (reply, receiver) = oneshot::channel();
        state.waiting.push_back(Call { name, reply, subject });
        Ok(receiver)
    }

    /// Whether a reply is outstanding.
    pub(super) fn is_waiting(&self) -> bool {
        !lock(&self.0).waiting.is_empty()
    }

    /// A reply came. Gives back the consumer that begins if it was for a `basic.consume`.
    pub(super) fn reply(&self, mut reply: Reply) -> Result<Option<Begun>, Error> {
        let (call, closed) = {
            let State { waiting, closed } = &mut *lock(&self.0);
            let asked = waiting.iter().position(|call| call.is_answered_by(&reply));
            (asked.and_then(|place| waiting.remove(place)), closed.is_some())
        };
        let Some(call) = call else {
            // Who asked may have closed the channel at this very moment.
            if closed {
                return Ok(None);
            }
            let text = format!("the broker sent {}, and nobody had asked", reply.name());
            return Err(Error::protocol(text));
        };
        if let (Subject::Get { auto_ack: true }, Reply::Got(got)) = (&call.subject, &mut reply) {
            got.set_auto_ack();
        }
        // Before the caller knows: it may cancel the consumer at once.
        let begun = match call.subject {
            Subject::Consumer(_, Some(queue)) => Some(Begun { unwanted: queue.begin(), queue }),
            _ => None,
        };
        // The caller may have gone.
        drop(call.reply.send(Ok(reply)));
        Ok(begun)
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

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::OnceLock;
    use std::task::{Context, Wake, Waker};

    use super::super::consumer::Bound;
    use super::*;

    /// Who cancels a consumer at the very moment it is told that there is one.
    struct Hasty {
        queue: Arc<ConsumerQueue>,
        could_cancel: OnceLock<bool>,
    }

    impl Wake for Hasty {
        fn wake(self: Arc<Self>) {
            self.could_cancel.set(self.queue.begin_cancel()).unwrap();
        }
    }

    #[test]
    fn a_consumer_can_be_cancelled_as_soon_as_it_is_known() {
        let tag = ShortStr::from_static("hasty");
        let bound = Bound { messages: 1, bytes: 1 };
        let queue = Arc::new(ConsumerQueue::new(tag.clone(), false, false, bound));
        let calls = Calls::default();
        let subject = Subject::Consumer(tag.clone(), Some(Arc::clone(&queue)));
        let mut reply = pin!(calls.begin(basic::Consume::NAME, subject, || Ok(())).unwrap());
        let hasty = Arc::new(Hasty { queue, could_cancel: OnceLock::new() });
        let waker = Waker::from(Arc::clone(&hasty));
        assert!(reply.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());

        let consume_ok = Method::BasicConsumeOk(basic::ConsumeOk { consumer_tag: tag });
        let begun = calls.reply(Reply::Method(consume_ok)).unwrap().unwrap();
        assert!(!begun.unwanted);
        assert_eq!(hasty.could_cancel.get(), Some(&true));
    }
}
