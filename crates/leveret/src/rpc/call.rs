//! A call: one request, one reply.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep, timeout};

use super::desk::{Failed, Wanted};
use super::reply::{FromReply, Reply};
use super::{Rpc, What};
use crate::error::{Error, ErrorKind};
use crate::message::Message;
use crate::publisher::PublishSpan;

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
    /// [timeout](Self::timeout). A reply to any of them counts.
    ///
    /// The service may get several of them, so it should be one for which that is the same as one, or that handles them
    /// [exactly once](crate::ServiceBuilder::exactly_once).
    pub fn resend_after(mut self, time: Duration) -> Self {
        self.resend_after = Some(time);
        self
    }

    async fn run(self) -> Result<R, Error> {
        let Call { rpc, method, message, timeout: patience, resend_after, .. } = self;
        let message = message?;
        let span = PublishSpan::of_call(rpc.service(), method);
        let began = Instant::now();
        let asking = async {
            match resend_after {
                None => ask(rpc, method, message, &span).await,
                Some(first) => Box::pin(ask_again(rpc, method, message, &span, first)).await,
            }
        };
        let answered = match patience {
            None => asking.await,
            Some(patience) => match timeout(patience, asking).await {
                Ok(answered) => answered,
                Err(_) => Err(Error::timed_out(rpc.what(method), patience)),
            },
        };
        let failed = answered.as_ref().err().map(Error::kind);
        rpc.inner.counts.ended(began.elapsed(), failed);
        span.end(&answered);
        R::from_reply(answered?)
    }
}

async fn ask(
    rpc: &Rpc,
    method: &str,
    message: Message,
    span: &PublishSpan,
) -> Result<Reply, Error> {
    let question = rpc.question(method, message, Wanted::One);
    let mut seat = rpc.inner.asker.ask(question, span).await?;
    let answer = seat.next().await;
    answer.unwrap_or(Err(Failed::NoValue)).map_err(|failed| failed.into_error(rpc.what(method)))
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
    let mut under_way = FuturesUnordered::new();
    loop {
        under_way.push(ask(rpc, method, message.clone(), span));
        let again = sleep(pause);
        tokio::pin!(again);
        loop {
            tokio::select! {
                Some(answer) = under_way.next() => match answer {
                    Err(error) if may_be_lost(&error) => {
                        tracing::debug!("a request is sent again: {error}");
                    }
                    answer => return answer,
                },
                () = &mut again => break,
            }
        }
        pause = pause.saturating_mul(2);
    }
}

/// Whether another copy may do better.
fn may_be_lost(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Lost | ErrorKind::TimedOut | ErrorKind::Nacked)
}

impl<'r, R: FromReply + 'r> IntoFuture for Call<'r, R> {
    type Output = Result<R, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<R, Error>> + Send + 'r>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

impl<R> fmt::Debug for Call<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let What { service, method } = self.rpc.what(self.method);
        write!(f, "Call({method:?} of {service:?})")
    }
}
