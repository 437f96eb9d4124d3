//! A call: one request, one reply.

use std::fmt;
use std::future::ready;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::Either;
use futures_util::stream::FuturesUnordered;
use tokio::time::{sleep, timeout};

use super::asker::{Question, Room, Seat, TakenRoom};
use super::desk::{Answer, Failed, Wanted};
use super::reply::{FromReply, Reply};
use super::{Rpc, What};
use crate::error::{Error, ErrorKind};
use crate::message::Message;
use crate::publisher::PublishSpan;
use crate::telemetry::Began;

/// No request is sent again sooner than this.
const SHORTEST: Duration = Duration::from_millis(1);

/// A call that is not made yet: await it. See [`Rpc::call`].
#[must_use = "a call is made when it is awaited"]
pub struct Call<'r, R> {
    rpc: &'r Rpc,
    method: &'r str,
    message: Result<Message, Error>,
    timeout: Option<Duration>,
    resend_after: Option<Duration>,
    reply: PhantomData<fn() -> R>,
}

impl<'r, R: FromReply> Call<'r, R> {
    pub(super) fn new(rpc: &'r Rpc, method: &'r str, message: Result<Message, Error>) -> Self {
        let timeout = rpc.inner.timeout;
        Call { rpc, method, message, timeout, resend_after: None, reply: PhantomData }
    }

    /// How long it may take as a whole, waiting for a connection included.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// At least once: if there is no reply after this long, because request or reply was lost or it takes its time, the request is
    /// sent again, with the same message id; then after twice that time, and so on, until the
    /// [timeout](Self::timeout). A reply to any of them counts. They are one of the calls that [may be under
    /// way](crate::RpcBuilder::max_in_flight). That a copy reaches nobody ends the call only if no other can have.
    ///
    /// The service may get several of them, so it should be one for which that is the same as one, or that handles them
    /// [exactly once](crate::ServiceBuilder::exactly_once).
    pub fn resend_after(mut self, time: Duration) -> Self {
        self.resend_after = Some(time);
        self
    }
}

async fn ask(
    rpc: &Rpc,
    method: &str,
    message: Message,
    room: Room,
    span: &PublishSpan,
) -> Result<Reply, Error> {
    let question = Question { room, ..rpc.question(method, message, Wanted::One) };
    let mut seat = rpc.inner.asker.ask(question, span).await?;
    reply(rpc, method, seat.next().await)
}

fn reply(rpc: &Rpc, method: &str, answer: Option<Answer>) -> Result<Reply, Error> {
    answer.unwrap_or(Err(Failed::NoValue)).map_err(|failed| failed.into_error(rpc.what(method)))
}

/// Waits for an answer for so long.
async fn in_time(
    rpc: &Rpc,
    method: &str,
    patience: Option<Duration>,
    asking: impl Future<Output = Result<Reply, Error>>,
) -> Result<Reply, Error> {
    match patience {
        None => asking.await,
        Some(patience) => match timeout(patience, asking).await {
            Ok(answered) => answered,
            Err(_) => Err(Error::timed_out(rpc.what(method), patience)),
        },
    }
}

/// Asks again while there is no answer, waiting twice as long each time.
async fn ask_again(
    rpc: &Rpc,
    method: &str,
    message: Message,
    span: &PublishSpan,
    first: Duration,
) -> Result<Reply, Error> {
    let message = message.identified();
    let mut pause = first.max(SHORTEST);
    let _room = room_for_all(rpc).await?;
    let mut under_way = FuturesUnordered::new();
    let mut may_have_come = false;
    loop {
        under_way.push(ask(rpc, method, message.clone(), Room::OfItsCall, span));
        let again = sleep(pause);
        tokio::pin!(again);
        loop {
            tokio::select! {
                Some(answer) = under_way.next() => match answer {
                    Err(error) if may_be_lost(&error) => {
                        may_have_come |= error.kind() == ErrorKind::Lost;
                        tracing::debug!("a request is sent again: {error}");
                    }
                    // Nobody got this one, and somebody may be at work on another.
                    Err(error)
                        if reached_nobody(&error) && (may_have_come || !under_way.is_empty()) =>
                    {
                        tracing::debug!("a copy of a request reaches nobody: {error}");
                    }
                    answer => return answer,
                },
                () = &mut again => break,
            }
        }
        pause = pause.saturating_mul(2);
    }
}

/// One room for all copies of a request, waited for as long as the call lasts.
async fn room_for_all(rpc: &Rpc) -> Result<TakenRoom, Error> {
    loop {
        match rpc.inner.asker.take_room().await {
            Err(error) if may_be_lost(&error) => {}
            taken => return taken,
        }
    }
}

/// Whether another copy may do better.
fn may_be_lost(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Lost | ErrorKind::TimedOut | ErrorKind::Nacked)
}

/// Whether there is no queue for it.
fn reached_nobody(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unroutable | ErrorKind::Missing)
}

impl<'r, R: FromReply> IntoFuture for Call<'r, R> {
    type Output = Result<R, Error>;
    type IntoFuture = CallFuture<'r, R>;

    fn into_future(self) -> CallFuture<'r, R> {
        CallFuture { stage: Stage::New(self) }
    }
}

/// A call that is awaited. It begins when it is polled for the first time, and is forgotten when it is dropped.
///
/// Most requests can be sent at once. Those need nothing to wait with.
#[must_use = "a call is made when it is awaited"]
pub struct CallFuture<'r, R> {
    stage: Stage<'r, R>,
}

enum Stage<'r, R> {
    New(Call<'r, R>),
    /// The request is on its way, and the desk knows how long the reply may take.
    Sent(Begun<'r>, Seat),
    /// All others: it waits for room, a channel or a queue of its own first, is to be sent again, or could not be sent.
    Waiting(Begun<'r>, Pin<Box<dyn Future<Output = Result<Reply, Error>> + Send + 'r>>),
    Done,
}

/// What is known of a call from its beginning to its end.
struct Begun<'r> {
    rpc: &'r Rpc,
    method: &'r str,
    span: PublishSpan,
    began: Began,
}

impl<'r, R: FromReply> Stage<'r, R> {
    fn begin(call: Call<'r, R>) -> Result<Self, Error> {
        let Call { rpc, method, message, timeout, resend_after, .. } = call;
        let message = message?;
        let span = PublishSpan::of_call(rpc.service(), method);
        let begun = Begun { rpc, method, span, began: rpc.inner.counts.begin() };
        if let Some(first) = resend_after {
            let span = begun.span.clone();
            let asking = async move { ask_again(rpc, method, message, &span, first).await };
            return Ok(Stage::Waiting(begun, Box::pin(in_time(rpc, method, timeout, asking))));
        }
        let question = Question { patience: timeout, ..rpc.question(method, message, Wanted::One) };
        Ok(match rpc.inner.asker.ask(question, &begun.span) {
            Either::Left(asked) => match asked.into_inner() {
                Ok(seat) => Stage::Sent(begun, seat),
                Err(error) => Stage::Waiting(begun, Box::pin(ready(Err(error)))),
            },
            Either::Right(asking) => {
                let asking = async move { reply(rpc, method, asking.await?.next().await) };
                Stage::Waiting(begun, Box::pin(in_time(rpc, method, timeout, asking)))
            }
        })
    }
}

impl<R: FromReply> Future for CallFuture<'_, R> {
    type Output = Result<R, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<R, Error>> {
        let stage = &mut self.get_mut().stage;
        if let Stage::New(_) = stage
            && let Stage::New(call) = std::mem::replace(stage, Stage::Done)
        {
            *stage = Stage::begin(call)?;
        }
        let (begun, answered) = match stage {
            Stage::Sent(begun, seat) => {
                let answer = ready!(seat.poll_next(context));
                let answered = reply(begun.rpc, begun.method, answer);
                (begun, answered)
            }
            Stage::Waiting(begun, asking) => (begun, ready!(asking.as_mut().poll(context))),
            Stage::New(_) | Stage::Done => panic!("a call was polled after it was done"),
        };
        begun.end(&answered);
        // Reading the reply may take its time, which is not the call's.
        *stage = Stage::Done;
        Poll::Ready(answered.and_then(R::from_reply))
    }
}

impl Begun<'_> {
    fn end(&self, answered: &Result<Reply, Error>) {
        let failed = answered.as_ref().err().map(Error::kind);
        self.rpc.inner.counts.end(self.began, failed);
        self.span.record(answered);
    }
}

impl<R> fmt::Debug for Call<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let What { service, method } = self.rpc.what(self.method);
        write!(f, "Call({method:?} of {service:?})")
    }
}

impl<R> fmt::Debug for CallFuture<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match &self.stage {
            Stage::New(_) => "not begun",
            Stage::Sent(..) => "sent",
            Stage::Waiting(..) => "waiting",
            Stage::Done => "done",
        };
        write!(f, "CallFuture({stage})")
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn a_call_may_go_to_another_thread_whatever_it_gives() {
        fn may_go<T: Send + Unpin>() {}
        may_go::<CallFuture<'static, Rc<()>>>();
    }
}
