//! A call: one request, one reply.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{sleep, timeout};

use super::asker::{Question, Room, TakenRoom};
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
    /// [timeout](Self::timeout). A reply to any of them counts. They are one of the calls that [may be under
    /// way](crate::RpcBuilder::max_in_flight). That a copy reaches nobody ends the call only if no other can have.
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
        let began = rpc.inner.counts.begin();
        let answered = match (patience, resend_after) {
            (None, None) => ask(rpc, method, message, Room::OfItsOwn, &span).await,
            // Who does not watch the time does not carry a watch.
            _ => Box::pin(ask_in_time(rpc, method, message, &span, patience, resend_after)).await,
        };
        let failed = answered.as_ref().err().map(Error::kind);
        rpc.inner.counts.end(began, failed);
        span.end(&answered);
        R::from_reply(answered?)
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
    let answer = seat.next().await;
    answer.unwrap_or(Err(Failed::NoValue)).map_err(|failed| failed.into_error(rpc.what(method)))
}

/// Asks, again if need be, and waits for so long.
async fn ask_in_time(
    rpc: &Rpc,
    method: &str,
    message: Message,
    span: &PublishSpan,
    patience: Option<Duration>,
    resend_after: Option<Duration>,
) -> Result<Reply, Error> {
    let asking = async {
        match resend_after {
            None => ask(rpc, method, message, Room::OfItsOwn, span).await,
            Some(first) => ask_again(rpc, method, message, span, first).await,
        }
    };
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
