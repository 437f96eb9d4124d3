//! The stream of deliveries that an application reads.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use tokio::time::timeout;

use super::incoming::ConsumerContext;
use super::source::Source;
use crate::amqp::{self, Channel, Consumer, ReplyCode, Tx};
use crate::connection::Client;
use crate::delivery::Delivery;
use crate::error::Error;

/// A stream of deliveries from one queue.
///
/// It goes on when the connection was lost, the channel closed or the consumer cancelled by the broker, as soon as the
/// broker is back; what was not settled is delivered again then. It ends with `None` after [`Deliveries::cancel`], and
/// with an error and then `None` if the client is closed, or the queue stays away. Dropping it cancels it, and what it
/// had not handed out goes back to the queue.
pub struct Deliveries {
    source: Arc<Source>,
    state: State,
    /// A cancelled consumer on the channel of the live one. Deliveries of one channel come in the order of the queue, so those
    /// of both are handed out in the order of their tags.
    replaced: Option<Consumer>,
    may_renew: bool,
    client: Client,
    context: Arc<ConsumerContext>,
}

enum State {
    Live(Consumer),
    /// Only polling moves it: a stream without a reader takes no messages from other consumers.
    Resuming(Pin<Box<dyn Future<Output = Result<Consumer, Error>> + Send>>),
    Ended,
}

/// The outcome of [`Deliveries::next_within`].
#[derive(Debug)]
pub enum Next {
    /// A delivery came.
    Delivery(Delivery),
    /// None came in time.
    TimedOut,
    /// None will come: the stream was cancelled, or this is why it ended.
    Ended(Option<Error>),
}

impl Deliveries {
    pub(super) fn new(
        source: Arc<Source>,
        consumer: Consumer,
        client: Client,
        context: Arc<ConsumerContext>,
    ) -> Self {
        Deliveries {
            source,
            state: State::Live(consumer),
            replaced: None,
            may_renew: true,
            client,
            context,
        }
    }

    /// The next delivery, or the reason why there is none any more, or `None` once it ended.
    ///
    /// Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<Result<Delivery, Error>> {
        poll_fn(|context| self.poll_delivery(context)).await
    }

    /// The next delivery, if it has arrived.
    #[inline]
    pub(super) fn try_next(&mut self) -> Option<Delivery> {
        let State::Live(live) = &mut self.state else { return None };
        let delivery = match &mut self.replaced {
            None => live.take()?,
            Some(replaced) => next_of(replaced, live)?,
        };
        self.source.counts.delivered();
        Some(Delivery::new(delivery, &self.context))
    }

    /// Replaces the consumer by a new one on its channel, which has a prefetch of its own. Unsettled deliveries stay. False if
    /// the old one stays: none is live, it has a delivery, or the broker does not begin another.
    pub(super) async fn renew(&mut self) -> bool {
        // A loss is not passed over: the stream resumes then.
        let has_news = poll_fn(|context| Poll::Ready(self.poll_live(context).is_ready())).await;
        let State::Live(old) = &mut self.state else { return false };
        if has_news || self.replaced.is_some() || !self.may_renew {
            return false;
        }
        let new = match self.source.beside(old).await {
            Ok(new) if old.pulse().is_alive() => new,
            Ok(_) => return false,
            // To be refused costs the channel, or the connection: the broker is not asked again.
            Err(error) => {
                let code = error.and_then(|error| error.reply_code());
                let refused = [ReplyCode::ACCESS_REFUSED, ReplyCode::NOT_ALLOWED];
                self.may_renew = code.is_none_or(|code| !refused.contains(&code));
                return false;
            }
        };
        self.source.began(&new);
        self.replaced = Some(std::mem::replace(old, new));
        // Once the broker has agreed, no more deliveries come for the old one. Should it not agree, the channel is lost.
        if let Some(old) = &mut self.replaced {
            let _ = old.cancel().await;
        }
        true
    }

    /// The next delivery, if one comes in time.
    pub async fn next_within(&mut self, time: Duration) -> Next {
        match timeout(time, self.next()).await {
            Ok(Some(Ok(delivery))) => Next::Delivery(delivery),
            Ok(Some(Err(error))) => Next::Ended(Some(error)),
            Ok(None) => Next::Ended(None),
            Err(_) => Next::TimedOut,
        }
    }

    /// Asks the broker for no more deliveries. Those that are here already are still handed out; then the stream ends.
    pub async fn cancel(&mut self) -> Result<(), Error> {
        let State::Live(consumer) = &mut self.state else {
            self.state = State::Ended;
            return Ok(());
        };
        match consumer.cancel().await {
            Ok(()) => Ok(()),
            // There is nothing to cancel, and what is here can no longer be settled.
            Err(error) if error.is_connection_error() => {
                self.state = State::Ended;
                Ok(())
            }
            Err(error) => {
                let what = format!("cancelling the consumer of queue {:?}", self.queue());
                Err(Error::from_amqp(what, error))
            }
        }
    }

    /// The queue, as the consumer was told it.
    pub fn queue(&self) -> &str {
        &self.source.queue
    }

    /// The client it belongs to.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The channel of what was delivered last, if the consumer is transactional and its channel still there.
    pub(crate) fn transaction(&self) -> Option<Channel<Tx>> {
        match &self.state {
            State::Live(consumer) if self.source.is_transactional() => Some(consumer.channel()),
            _ => None,
        }
    }

    pub(crate) fn poll_delivery(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delivery, Error>>> {
        loop {
            match ready!(self.poll_ready(context)) {
                Ok(true) => {
                    if let Some(delivery) = self.try_next() {
                        return Poll::Ready(Some(Ok(delivery)));
                    }
                }
                Ok(false) => return Poll::Ready(None),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        loop {
            match &mut self.state {
                State::Live(_) => {
                    if ready!(self.poll_live(context)) {
                        return Poll::Ready(Ok(true));
                    }
                }
                State::Resuming(resuming) => match ready!(resuming.as_mut().poll(context)) {
                    Ok(consumer) => self.state = State::Live(consumer),
                    Err(error) => {
                        self.source.ended(&error);
                        self.state = State::Ended;
                        return Poll::Ready(Err(error));
                    }
                },
                State::Ended => return Poll::Ready(Ok(false)),
            }
        }
    }

    /// Whether the live consumer has a delivery. If not, its end has changed the state.
    fn poll_live(&mut self, context: &mut Context<'_>) -> Poll<bool> {
        let State::Live(consumer) = &mut self.state else { return Poll::Ready(false) };
        if let Some(replaced) = &mut self.replaced {
            if replaced.first_tag().is_some() {
                return Poll::Ready(true);
            }
            self.replaced = None;
        }
        match ready!(consumer.poll_ready(context)) {
            Ok(true) => return Poll::Ready(true),
            Ok(false) => self.state = State::Ended,
            Err(lost) => self.resume(lost),
        }
        Poll::Ready(false)
    }

    fn resume(&mut self, lost: amqp::Error) {
        self.replaced = None;
        self.state = State::Resuming(Box::pin(Arc::clone(&self.source).again(lost)));
    }
}

/// The earlier delivery of two consumers of one channel.
fn next_of(one: &mut Consumer, other: &mut Consumer) -> Option<amqp::Delivery> {
    match (one.first_tag(), other.first_tag()) {
        (Some(first), Some(second)) if first < second => one.take(),
        (Some(_), None) => one.take(),
        _ => other.take(),
    }
}

impl Stream for Deliveries {
    type Item = Result<Delivery, Error>;

    fn poll_next(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delivery, Error>>> {
        self.get_mut().poll_delivery(context)
    }
}

impl fmt::Debug for Deliveries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Live(_) => "live",
            State::Resuming(_) => "resuming",
            State::Ended => "ended",
        };
        f.debug_struct("Deliveries")
            .field("queue", &self.queue())
            .field("state", &state)
            .finish_non_exhaustive()
    }
}
