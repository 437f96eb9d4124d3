//! A call with several replies.

use std::fmt;
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use tokio::time::{Sleep, sleep, timeout};

use super::Rpc;
use super::asker::Seat;
use super::desk::Wanted;
use super::reply::FromReply;
use crate::error::Error;
use crate::message::Message;
use crate::publisher::PublishSpan;

/// How many replies may wait to be read, unless said otherwise.
const BUFFER: usize = 1024;

/// A call with several replies that is not made yet: await it, and it gives a [`ReplyStream`]. See [`Rpc::stream`].
#[must_use = "a call is made when it is awaited"]
pub struct StreamCall<'r, R> {
    rpc: &'r Rpc,
    method: &'r str,
    message: Result<Message, Error>,
    timeout: Option<Duration>,
    buffer: usize,
    reply: PhantomData<fn() -> R>,
}

impl<'r, R: FromReply> StreamCall<'r, R> {
    pub(super) fn new(rpc: &'r Rpc, method: &'r str, message: Result<Message, Error>) -> Self {
        let timeout = rpc.inner.timeout;
        StreamCall { rpc, method, message, timeout, buffer: BUFFER, reply: PhantomData }
    }

    /// How long each reply may take, from the request or from the reply before.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How many replies may wait to be read. With one more the stream ends with an error, since nothing but the reader
    /// could hold the service back. 1024 by default.
    pub fn buffer(mut self, replies: usize) -> Self {
        self.buffer = replies.max(1);
        self
    }

    async fn run(self) -> Result<ReplyStream<R>, Error> {
        let StreamCall { rpc, method, message, timeout: patience, buffer, .. } = self;
        let span = PublishSpan::of_call(rpc.service(), method);
        let question = rpc.question(method, message?, Wanted::Stream { buffer });
        let asking = rpc.inner.asker.ask(question, &span);
        let asked = match patience {
            None => asking.await,
            Some(patience) => match timeout(patience, asking).await {
                Ok(asked) => asked,
                Err(_) => Err(Error::timed_out(rpc.what(method), patience)),
            },
        };
        span.record(&asked);
        let what = rpc.what(method).to_string();
        let (seat, overdue) = (Some(asked?), patience.map(|patience| Box::pin(sleep(patience))));
        Ok(ReplyStream { seat, what, patience, overdue, reply: PhantomData })
    }
}

impl<'r, R: FromReply + 'r> IntoFuture for StreamCall<'r, R> {
    type Output = Result<ReplyStream<R>, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'r>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

impl<R> fmt::Debug for StreamCall<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamCall({:?} of {:?})", self.method, self.rpc.service())
    }
}

/// The replies to one call, in order, up to the last one. It ends after an error. Dropping it forgets the call.
///
/// Replies that are numbered come once each, also if the service died in their midst and another one began anew.
#[must_use = "replies come as they are read"]
pub struct ReplyStream<R> {
    /// `None` once it ended.
    seat: Option<Seat>,
    what: String,
    patience: Option<Duration>,
    overdue: Option<Pin<Box<Sleep>>>,
    reply: PhantomData<fn() -> R>,
}

impl<R: FromReply> ReplyStream<R> {
    /// The next reply, or `None` after the last one.
    ///
    /// Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<Result<R, Error>> {
        std::future::poll_fn(|context| self.poll_reply(context)).await
    }

    fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<R, Error>>> {
        let Some(seat) = &mut self.seat else { return Poll::Ready(None) };
        let answer = match seat.poll_next(context) {
            Poll::Ready(answer) => answer,
            Poll::Pending => {
                let Some(overdue) = &mut self.overdue else { return Poll::Pending };
                ready!(pin!(overdue).poll(context));
                self.seat = None;
                let late = Error::timed_out(&self.what, self.patience.unwrap_or_default());
                return Poll::Ready(Some(Err(late)));
            }
        };
        let reply = match answer {
            Some(Ok(reply)) => R::from_reply(reply),
            Some(Err(failed)) => Err(failed.into_error(&self.what)),
            None => {
                self.seat = None;
                return Poll::Ready(None);
            }
        };
        if reply.is_err() {
            self.seat = None;
        } else if let Some(patience) = self.patience {
            self.overdue = Some(Box::pin(sleep(patience)));
        }
        Poll::Ready(Some(reply))
    }
}

impl<R: FromReply> Stream for ReplyStream<R> {
    type Item = Result<R, Error>;

    fn poll_next(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<R, Error>>> {
        self.get_mut().poll_reply(context)
    }
}

impl<R> fmt::Debug for ReplyStream<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReplyStream({})", self.what)
    }
}
