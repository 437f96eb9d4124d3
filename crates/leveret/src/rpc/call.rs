//! A call: one request, one reply.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{sleep, timeout};

use super::Rpc;
use super::pending_calls::ReplyMode;
use super::reply::{FromReply, Reply};
use super::request::Request;
use crate::error::{Error, ErrorKind};
use crate::message::Message;
use crate::publisher::PublishSpan;

/// No request is sent again sooner than this.
const MIN_RESEND_PAUSE: Duration = Duration::from_millis(1);

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
    /// [timeout](Self::timeout). A reply to any copy counts. All copies are one of the [calls in
    /// flight](crate::RpcBuilder::max_in_flight). A copy that reaches no queue fails the call only if no other copy can have
    /// reached one.
    ///
    /// The service may get several copies, so its method should be idempotent, or handle requests
    /// [exactly once](crate::ServiceBuilder::exactly_once).
    pub fn resend_after(mut self, time: Duration) -> Self {
        self.resend_after = Some(time);
        self
    }
}

async fn run(
    rpc: &Rpc,
    method: &str,
    message: Result<Message, Error>,
    limit: Option<Duration>,
    resend_after: Option<Duration>,
) -> Result<Reply, Error> {
    let message = message?;
    let span = PublishSpan::of_call(rpc.service(), method);
    let began = rpc.inner.counts.begin();
    let calling = async {
        match resend_after {
            None => {
                let request = rpc.request(method, message)?;
                let channel = &rpc.inner.channel;
                let permit = Some(channel.permit().await?);
                let mut receiver = channel.send(request, ReplyMode::One, permit, &span).await?;
                rpc.reply(method, receiver.next().await)
            }
            Some(pause) => Box::pin(resend(rpc, method, message, pause, &span)).await,
        }
    };
    let result = within(limit, rpc.describe(method), calling).await;
    rpc.inner.counts.end(began, result.as_ref().err().map(Error::kind));
    span.record(&result);
    result
}

/// Gives `calling` its time limit, if it has one. `what` is what takes too long.
pub(super) async fn within<T>(
    limit: Option<Duration>,
    what: impl fmt::Display,
    calling: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match limit {
        None => calling.await,
        Some(limit) => match timeout(limit, calling).await {
            Ok(result) => result,
            Err(_) => Err(Error::timed_out(what, limit)),
        },
    }
}

/// Sends copies of a request until one has its reply. Each pause is twice as long as the one before.
async fn resend(
    rpc: &Rpc,
    method: &str,
    message: Message,
    first_pause: Duration,
    span: &PublishSpan,
) -> Result<Reply, Error> {
    let request = rpc.request(method, message.identified())?;
    let mut pause = first_pause.max(MIN_RESEND_PAUSE);
    let _permit = permit_of_all_copies(rpc).await?;
    let mut copies = FuturesUnordered::new();
    let mut may_have_arrived = false;
    loop {
        copies.push(send_copy(rpc, method, request.clone(), span));
        let again = sleep(pause);
        tokio::pin!(again);
        loop {
            tokio::select! {
                Some(result) = copies.next() => match result {
                    Err(error) if another_copy_may_succeed(&error) => {
                        may_have_arrived |= error.kind() == ErrorKind::Lost;
                        tracing::debug!("a request is sent again: {error}");
                    }
                    // This copy reached no queue, but a service may handle another one.
                    Err(error) if is_unroutable(&error) && (may_have_arrived || !copies.is_empty()) => {
                        tracing::debug!("a copy of a request reached no queue: {error}");
                    }
                    result => return result,
                },
                () = &mut again => break,
            }
        }
        pause = pause.saturating_mul(2);
    }
}

async fn send_copy(
    rpc: &Rpc,
    method: &str,
    request: Request<'_>,
    span: &PublishSpan,
) -> Result<Reply, Error> {
    let sending = rpc.inner.channel.send(request, ReplyMode::One, None, span);
    let mut receiver = sending.await?;
    rpc.reply(method, receiver.next().await)
}

/// The permit that all copies share: they are one call. Only the timeout of the call limits how long it waits.
async fn permit_of_all_copies(rpc: &Rpc) -> Result<OwnedSemaphorePermit, Error> {
    loop {
        match rpc.inner.channel.permit().await {
            Err(error) if another_copy_may_succeed(&error) => {}
            permit => return permit,
        }
    }
}

fn another_copy_may_succeed(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Lost | ErrorKind::TimedOut | ErrorKind::Nacked)
}

fn is_unroutable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unroutable | ErrorKind::Missing)
}

impl<'r, R: FromReply> IntoFuture for Call<'r, R> {
    type Output = Result<R, Error>;
    type IntoFuture = CallFuture<'r, R>;

    fn into_future(self) -> CallFuture<'r, R> {
        let Call { rpc, method, message, timeout, resend_after, .. } = self;
        let calling = Box::pin(run(rpc, method, message, timeout, resend_after));
        CallFuture { calling, reply: PhantomData }
    }
}

/// A call that is awaited. It begins when it is polled for the first time, and is forgotten when it is dropped.
#[must_use = "a call is made when it is awaited"]
pub struct CallFuture<'r, R> {
    calling: Pin<Box<dyn Future<Output = Result<Reply, Error>> + Send + 'r>>,
    reply: PhantomData<fn() -> R>,
}

impl<R: FromReply> Future for CallFuture<'_, R> {
    type Output = Result<R, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<R, Error>> {
        let result = ready!(self.get_mut().calling.as_mut().poll(context));
        Poll::Ready(result.and_then(R::from_reply))
    }
}

impl<R> fmt::Debug for Call<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Call({:?} of {:?})", self.method, self.rpc.service())
    }
}

impl<R> fmt::Debug for CallFuture<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFuture").finish_non_exhaustive()
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
