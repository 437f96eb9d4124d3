//! A call: one request, one reply.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::desk::{Failed, Wanted};
use super::reply::{FromReply, Reply};
use super::{Rpc, What};
use crate::error::Error;
use crate::message::Message;
use crate::publisher::PublishSpan;

/// A call that is not made yet: await it. See [`Rpc::call`].
#[must_use = "a call is made when it is awaited"]
pub struct Call<'r, R> {
    rpc: &'r Rpc,
    method: &'r str,
    message: Result<Message, Error>,
    timeout: Option<Duration>,
    reply: PhantomData<fn() -> R>,
}

impl<'r, R: FromReply> Call<'r, R> {
    pub(super) fn new(rpc: &'r Rpc, method: &'r str, message: Result<Message, Error>) -> Self {
        Call { rpc, method, message, timeout: rpc.inner.timeout, reply: PhantomData }
    }

    /// How long it may take as a whole, waiting for a connection included.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    async fn run(self) -> Result<R, Error> {
        let Call { rpc, method, message, timeout: patience, .. } = self;
        let message = message?;
        let span = PublishSpan::of_call(rpc.service(), method);
        let began = Instant::now();
        let asking = ask(rpc, method, message, &span);
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
