//! Events that are answered: one question, and as many answers as there are who answer.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use crate::amqp::deadline_in;
use crate::error::{Error, ErrorKind};
use crate::message::{IntoMessage, Message};
use crate::publisher::{OnLoss, PublishSpan};
use crate::rpc::{
    CallFailure, FromReply, Method, Replies, ReplyMode, ReplyReceiver, Request, RpcChannel,
    RpcSettings, ServiceBuilder,
};
use crate::telemetry::UnmatchedReplies;
use crate::topology::Queue;

use super::{Events, key};

/// How long answers are waited for, unless said otherwise.
const WITHIN: Duration = Duration::from_secs(5);

/// How many answers may wait to be taken. With one more the gathering ends with an error, since nothing but the reader
/// could hold back those who answer.
const BUFFER: usize = 4096;

/// How many questions may be open at a time; the next one waits.
const MAX_IN_FLIGHT: usize = 1024;

impl Events {
    /// Asks whoever is there, and gathers what they answer: none, one or many. To be awaited, which gives all answers that
    /// came in time, or read as a [stream](Gather::stream). Who answers is made by [`respond`](Self::respond).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), leveret::BoxError> {
    /// use std::time::Duration;
    /// use leveret::{Client, Gathered};
    ///
    /// let client = Client::embedded().await?;
    /// let shops = client.events("shops");
    /// let first = shops.respond("first-shop", ["offer.wanted"], async |what: String| format!("{what}: 12 €")).await?;
    /// let second = shops.respond("second-shop", ["offer.wanted"], async |what: String| format!("{what}: 11 €")).await?;
    /// tokio::spawn(first.run());
    /// tokio::spawn(second.run());
    /// # tokio::time::sleep(Duration::from_secs(1)).await;
    ///
    /// let Gathered { mut replies, errors } =
    ///     shops.gather::<String>("offer.wanted", "a book").within(Duration::from_secs(2)).await?;
    /// replies.sort();
    /// assert_eq!(replies, ["a book: 11 €", "a book: 12 €"]);
    /// assert!(errors.is_empty());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The question has a correlation id of its own, by which the answers are known; so it belongs to no group. It is
    /// gone from the queues of those who are away when the time is over. If nobody is bound to its key, the
    /// gathering ends at once, with nothing. One who answers and dies before the broker knows may answer twice.
    pub fn gather<'e, R: FromReply>(
        &'e self,
        key: &'e str,
        question: impl IntoMessage,
    ) -> Gather<'e, R> {
        Gather {
            events: self,
            key,
            question: question.into_message(),
            within: WITHIN,
            at_most: usize::MAX,
            reply: PhantomData,
        }
    }

    /// A service that answers questions which fit the patterns, see [`gather`](Self::gather): its method is called for each,
    /// and what it returns is the answer; a method that returns [`End`](crate::End) gives none. It is no handler of events,
    /// those do not reply; but it may be the only one who wants to know, and gets events without a question as well.
    ///
    /// The queue is the service's own; several instances of the service share it, and one of them answers.
    pub async fn respond<A: 'static>(
        &self,
        queue: impl Into<String>,
        patterns: impl IntoIterator<Item = impl Into<String>>,
        method: impl Method<A>,
    ) -> Result<ServiceBuilder, Error> {
        let name = queue.into();
        let queue = self.bound(Queue::classic(&name), patterns)?;
        self.declare().await?;
        let service = self.shared.client.service(name).queue(queue).fallback(method);
        Ok(service.state(self.in_group(None)))
    }

    fn rpc(&self) -> &RpcChannel {
        self.shared.rpc.get_or_init(|| {
            let exchange = self.shared.ingress.clone();
            let settings = RpcSettings {
                what: format!("gathering answers over exchange {exchange:?}"),
                exchange,
                replies: Replies::Direct,
                // A service that got the question before the loss would get it twice.
                on_loss: OnLoss::Fail,
                max_in_flight: MAX_IN_FLIGHT,
            };
            let unmatched = UnmatchedReplies::new(&settings.exchange);
            RpcChannel::new(&self.shared.client, settings, unmatched)
        })
    }
}

/// A question that is not asked yet: await it, or read it as a stream. See [`Events::gather`].
#[must_use = "a question is asked when it is awaited"]
pub struct Gather<'e, R> {
    events: &'e Events,
    key: &'e str,
    question: Result<Message, Error>,
    within: Duration,
    at_most: usize,
    reply: PhantomData<fn() -> R>,
}

/// What was answered in time, in the order in which it came.
#[derive(Clone, Debug)]
pub struct Gathered<R> {
    /// The answers.
    pub replies: Vec<R>,
    /// What those said who could not answer ([`ErrorKind::Remote`]), and answers that cannot be read
    /// ([`ErrorKind::Payload`]).
    pub errors: Vec<Error>,
}

impl<'e, R: FromReply> Gather<'e, R> {
    /// How long answers are waited for. Five seconds by default.
    pub fn within(mut self, time: Duration) -> Self {
        self.within = time;
        self
    }

    /// Waits no longer once there are so many answers, errors included.
    pub fn at_most(mut self, answers: usize) -> Self {
        self.at_most = answers;
        self
    }

    /// Asks, and gives the answers as they come.
    pub async fn stream(self) -> Result<GatherStream<R>, Error> {
        let Gather { events, key, question, within, at_most, .. } = self;
        key::check_key(events.kind(), key)?;
        let question = question?.expires_unless_said(within);
        let what =
            format!("gathering answers to {key:?} over exchange {:?}", events.shared.ingress);
        let deadline = deadline_in(within);
        let asking = async {
            // Made sure of once; what the broker forgets after that, the client restores.
            events.publisher().await?;
            let request = Request::new(&events.shared.ingress, key, question)?;
            let span = PublishSpan::begin(&events.shared.ingress, key);
            let (channel, mode) = (events.rpc(), ReplyMode::Gather { buffer: BUFFER });
            let permit = Some(channel.permit().await?);
            let sent = channel.send(request, mode, permit, &span).await;
            span.record(&sent);
            sent
        };
        let late = |_| Error::timed_out(&what, within);
        let receiver = timeout_at(deadline, asking).await.map_err(late)??;
        let receiver = (at_most > 0).then_some(receiver);
        let over = Box::pin(sleep_until(deadline));
        Ok(GatherStream { receiver, left: at_most, over, is_over: false, what, reply: PhantomData })
    }

    async fn all(self) -> Result<Gathered<R>, Error> {
        let mut stream = self.stream().await?;
        let mut gathered = Gathered { replies: Vec::new(), errors: Vec::new() };
        while let Some(answer) = stream.next().await {
            match answer {
                Ok(reply) => gathered.replies.push(reply),
                Err(error) if is_of_one(&error) => gathered.errors.push(error),
                Err(error) => return Err(error),
            }
        }
        Ok(gathered)
    }
}

/// Whether an error concerns one answer, and others may follow.
fn is_of_one(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Remote | ErrorKind::Payload)
}

impl<'e, R: FromReply + Send + 'e> IntoFuture for Gather<'e, R> {
    type Output = Result<Gathered<R>, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'e>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.all())
    }
}

impl<R> fmt::Debug for Gather<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gather({:?})", self.key)
    }
}

/// Answers as they come, until the time is over or there are enough. An error of one of those who answer does not end it;
/// that the connection was lost does. Dropping it forgets the question.
#[must_use = "answers come as they are read"]
pub struct GatherStream<R> {
    /// `None` once it ended.
    receiver: Option<ReplyReceiver>,
    left: usize,
    over: Pin<Box<Sleep>>,
    is_over: bool,
    what: String,
    reply: PhantomData<fn() -> R>,
}

impl<R: FromReply> GatherStream<R> {
    /// The next answer, or `None` when nothing more is waited for.
    ///
    /// Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<Result<R, Error>> {
        std::future::poll_fn(|context| self.poll_answer(context)).await
    }

    /// When it ends at the latest.
    pub fn deadline(&self) -> Instant {
        self.over.deadline()
    }

    fn poll_answer(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<R, Error>>> {
        let Some(receiver) = &mut self.receiver else { return Poll::Ready(None) };
        if !self.is_over && self.over.as_mut().poll(context).is_ready() {
            self.is_over = true;
            receiver.stop();
        }
        let answer = match ready!(receiver.poll_next(context)) {
            // There is nobody, which is an answer, too.
            None | Some(Err(CallFailure::Returned(_))) => {
                self.receiver = None;
                return Poll::Ready(None);
            }
            Some(Ok(reply)) => R::from_reply(reply),
            Some(Err(failed)) => Err(failed.into_error(&self.what)),
        };
        self.left -= 1;
        if self.left == 0 || answer.as_ref().is_err_and(|error| !is_of_one(error)) {
            self.receiver = None;
        }
        Poll::Ready(Some(answer))
    }
}

impl<R: FromReply> Stream for GatherStream<R> {
    type Item = Result<R, Error>;

    fn poll_next(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<R, Error>>> {
        self.get_mut().poll_answer(context)
    }
}

impl<R> fmt::Debug for GatherStream<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GatherStream({})", self.what)
    }
}
