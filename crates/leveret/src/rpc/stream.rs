//! A call with several replies.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use tokio::time::{Sleep, sleep};

use super::Rpc;
use super::call::within;
use super::channel::ReplyReceiver;
use super::pending_calls::ReplyMode;
use super::reply::FromReply;
use crate::amqp::deadline_in;
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
        let StreamCall { rpc, method, message, timeout: limit, buffer, .. } = self;
        let span = PublishSpan::of_call(rpc.service(), method);
        let request = rpc.request(method, message?)?;
        let channel = &rpc.inner.channel;
        let sending = async {
            let permit = Some(channel.permit().await?);
            channel.send(request, ReplyMode::Stream { buffer }, permit, &span).await
        };
        let sent = within(limit, rpc.describe(method), sending).await;
        span.record(&sent);
        Ok(ReplyStream {
            receiver: Some(sent?),
            what: rpc.describe(method).to_string(),
            limit,
            timer: limit.map(|limit| Box::pin(sleep(limit))),
            reply: PhantomData,
        })
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
/// Numbered replies come once each, also if the service dies in between and another instance repeats them from the first one on.
#[must_use = "replies come as they are read"]
pub struct ReplyStream<R> {
    /// `None` once it ended.
    receiver: Option<ReplyReceiver>,
    what: String,
    /// How long each reply may take, and the timer of the next one.
    limit: Option<Duration>,
    timer: Option<Pin<Box<Sleep>>>,
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
        let Some(receiver) = &mut self.receiver else { return Poll::Ready(None) };
        let reply = match receiver.poll_next(context) {
            Poll::Ready(Some(Ok(reply))) => R::from_reply(reply),
            Poll::Ready(Some(Err(failure))) => Err(failure.into_error(&self.what)),
            Poll::Ready(None) => {
                self.receiver = None;
                return Poll::Ready(None);
            }
            Poll::Pending => {
                let Some(timer) = &mut self.timer else { return Poll::Pending };
                ready!(timer.as_mut().poll(context));
                Err(Error::timed_out(&self.what, self.limit.unwrap_or_default()))
            }
        };
        if reply.is_err() {
            self.receiver = None;
        } else if let (Some(limit), Some(timer)) = (self.limit, &mut self.timer) {
            timer.as_mut().reset(deadline_in(limit));
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
