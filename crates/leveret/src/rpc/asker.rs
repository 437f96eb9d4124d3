//! Asking: requests out and replies in, over one channel that is opened when the first question is asked and again whenever
//! it is lost.

use std::borrow::Cow;
use std::fmt;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream as _;
use futures_util::future::Either;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::Replies;
use super::correlation::CorrelationId;
use super::desk::{Answer, Desk, Patience, Received, Request, Told, Wanted};
use super::reply::Reply;
use super::task::RpcTask;
use crate::amqp::{
    self, Channel, Confirm, ConsumeOptions, Consumer, Prepared, Properties, QueueOptions, ShortStr,
    Table, deadline_in, lock,
};
use crate::clock;
use crate::connection::Client;
use crate::connection::health::CallerHealth;
use crate::connection::registry::ReportHealth;
use crate::connection::{ReliableChannel, UsableChannel};
use crate::error::{Error, ErrorKind};
use crate::message::Message;
use crate::publisher::{OnLoss, PublishSpan};
use crate::telemetry::Strays;

/// How replies to a queue of one call are taken: each is acked when it was, so that one who does not read is sent no more.
const PREFETCH_PER_CALL: u16 = 16;

/// How long a queue for replies stays without a consumer, in milliseconds. It is gone with that; but one who is no longer
/// interested may never have come to consume it.
const UNUSED: i64 = 60_000;

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// What is done, for people: `calling service "prices"`.
    pub(crate) what: String,
    /// The exchange that is asked over, to be declared again if it is missing and was declared by this client.
    pub(crate) exchange: String,
    pub(crate) replies: Replies,
    pub(crate) on_loss: OnLoss,
    /// How many questions may be open at a time; the next one waits.
    pub(crate) max_in_flight: usize,
}

/// What is asked, and of whom.
#[derive(Debug)]
pub(crate) struct Question<'a> {
    pub(crate) exchange: &'a str,
    pub(crate) routing_key: Cow<'a, str>,
    /// It is an error if it reaches nobody.
    pub(crate) mandatory: bool,
    /// The property `type`, if it is given by the address.
    pub(crate) kind: Option<&'a str>,
    pub(crate) message: Message,
    pub(crate) wanted: Wanted,
    /// How long the answer may take if the question is asked at once. Who has to wait to ask it keeps the time himself.
    pub(crate) patience: Option<Duration>,
    pub(crate) room: Room,
}

/// Whose room among the open questions one takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// One for itself, for which it may have to wait.
    OfItsOwn,
    /// That of a call, which all copies of its request share: see [`Asker::take_room`].
    OfItsCall,
}

/// Asks. It clones cheaply; the channel goes with the last clone and the last question.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    handle: Arc<Handle>,
}

#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
    _client: Client,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What an asker, its questions and its task share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(super) settings: Settings,
    pub(super) channel: ReliableChannel<Open>,
    /// Locked while a question is sent, too: so what is sent over a channel is known to the desk before its end is.
    pub(super) desk: Mutex<Desk>,
    /// Wakes who looks for the overdue: somebody is so sooner than was known.
    pub(super) sooner: Notify,
    room: Semaphore,
    /// How long a question may wait to be sent.
    patience: Duration,
    strays: Strays,
}

/// A channel to publish requests on.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) channel: Channel<Confirm>,
    /// Where replies go; `None` if each question has a queue of its own.
    pub(super) reply_to: Option<ShortStr<'static>>,
}

impl UsableChannel for Open {
    fn is_usable(&self) -> bool {
        self.channel.is_usable()
    }
}

impl Asker {
    pub(crate) fn new(client: &Client, settings: Settings, strays: Strays) -> Self {
        let (core, patience) = (client.core(), client.core().options.timeout);
        // It connects now, and opens a channel with the first call.
        let _ = core.publishing();
        let shared = Arc::new(Shared {
            channel: ReliableChannel::new(core, &settings.what, patience),
            desk: Mutex::default(),
            sooner: Notify::new(),
            room: Semaphore::new(settings.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)),
            patience,
            strays,
            settings,
        });
        core.health.callers.add(&(Arc::clone(&shared) as _));
        let task = core.spawn(RpcTask::new(Arc::clone(&shared), Arc::clone(core)).run());
        Asker { handle: Arc::new(Handle { shared, task, _client: client.clone() }) }
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.handle.shared)
    }

    /// How many questions are open.
    pub(crate) fn in_flight(&self) -> usize {
        lock(&self.handle.shared.desk).len()
    }

    /// How many replies came that nobody waited for.
    pub(crate) fn strays(&self) -> u64 {
        lock(&self.handle.shared.desk).strays()
    }

    /// Asks, and gives a seat to wait for the answers in.
    ///
    /// It asks now if it need not wait for room or a channel: then what is awaited is small, because who need not wait does not
    /// carry what waiting needs. Dropped while waiting, it has asked nothing.
    pub(crate) fn ask<'a>(&'a self, question: Question<'a>, span: &PublishSpan) -> Asking<'a> {
        // What cannot be sent need not wait for anything.
        if let Err(error) = question.message.check() {
            return Either::Left(ready(Err(error)));
        }
        if question.room == Room::OfItsOwn && !self.handle.shared.has_room() {
            let span = span.clone();
            let question = Question { patience: None, ..question };
            return Either::Right(Box::pin(async move {
                self.handle.shared.until_room().await?;
                self.ask_with_room(question, &span).await
            }));
        }
        self.ask_with_room(question, span)
    }

    /// The same for who has room.
    fn ask_with_room<'a>(&'a self, question: Question<'a>, span: &PublishSpan) -> Asking<'a> {
        let (wanted, room, id) = (question.wanted, question.room, CorrelationId::fresh());
        let handle = Arc::clone(&self.handle);
        let mut seat = Seat { handle, id, room, own: None, is_left: false };
        let shared = &self.handle.shared;
        match shared.send_now(question, span, id) {
            Ok(None) => Either::Left(ready(Ok(seat))),
            Ok(Some(request)) => Either::Right(Box::pin(async move {
                shared.send_later(*request, wanted, &mut seat).await?;
                Ok(seat)
            })),
            Err(error) => Either::Left(ready(Err(error))),
        }
    }

    /// Takes room for all copies of a request that is sent again: they are one call, and none of them waits for another.
    pub(crate) async fn take_room(&self) -> Result<TakenRoom, Error> {
        if !self.handle.shared.has_room() {
            self.handle.shared.until_room().await?;
        }
        Ok(TakenRoom(Arc::clone(&self.handle.shared)))
    }
}

/// Room for a call, until it is dropped.
#[derive(Debug)]
pub(crate) struct TakenRoom(Arc<Shared>);

impl Drop for TakenRoom {
    fn drop(&mut self) {
        self.0.room.add_permits(1);
    }
}

/// The place of one who has asked. Leaving it, one is forgotten.
#[derive(Debug)]
pub(crate) struct Seat {
    handle: Arc<Handle>,
    id: CorrelationId,
    room: Room,
    /// The consumer of a queue for this question alone.
    own: Option<Box<Consumer>>,
    /// The last answer was taken: the desk has forgotten it, and its room is another's.
    is_left: bool,
}

/// Somebody who asks.
pub(crate) type Asking<'a> = Either<
    Ready<Result<Seat, Error>>,
    Pin<Box<dyn Future<Output = Result<Seat, Error>> + Send + 'a>>,
>;

impl Seat {
    /// The next answer; `None` when nothing more comes.
    pub(crate) async fn next(&mut self) -> Option<Answer> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    #[inline]
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Answer>> {
        loop {
            let told = lock(&self.handle.shared.desk).poll(self.id, context);
            if let Poll::Ready(Told { answer, is_last }) = told {
                if is_last {
                    self.leave();
                }
                return Poll::Ready(answer);
            }
            if !self.take_own(context) {
                return Poll::Pending;
            }
        }
    }

    /// Takes what came first to the queue of its own to the desk, which knows what to do with it. Says whether anything did.
    fn take_own(&mut self, context: &mut Context<'_>) -> bool {
        let shared = &self.handle.shared;
        let Some(own) = &mut self.own else { return false };
        match Pin::new(&mut **own).poll_next(context) {
            Poll::Pending => return false,
            Poll::Ready(Some(Ok(delivery))) => {
                // The queue is this question's alone, so its name is all that a reply needs.
                if let Some(waker) = shared.receive(Some(self.id), Reply::of(&delivery)) {
                    waker.wake();
                }
                // If that is too late, the queue is gone and the reply was taken all the same.
                let _ = delivery.ack();
            }
            Poll::Ready(Some(Err(error))) => {
                let error = Error::from_amqp("the queue of the reply", error);
                lock(&shared.desk).fail(self.id, error);
                self.own = None;
            }
            Poll::Ready(None) => self.own = None,
        }
        true
    }

    /// The desk knows no more of it: there is room for another.
    fn leave(&mut self) {
        let is_first = !std::mem::replace(&mut self.is_left, true);
        self.own = None;
        if is_first && self.room == Room::OfItsOwn {
            self.handle.shared.room.add_permits(1);
        }
    }

    /// Waits for no more than has come.
    pub(crate) fn stop(&mut self) {
        lock(&self.handle.shared.desk).stop(self.id);
        self.own = None;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if !self.is_left {
            // What it kept goes when nothing is locked.
            let _kept = lock(&self.handle.shared.desk).forget(self.id);
            self.leave();
        }
    }
}

impl ReportHealth<CallerHealth> for Shared {
    fn health(&self) -> CallerHealth {
        let (_, error) = self.channel.health();
        let in_flight = lock(&self.desk).len();
        CallerHealth { what: self.settings.what.clone(), in_flight, error }
    }
}

impl Shared {
    /// A reply came, to the question with this id. Gives the waker of its caller.
    #[inline]
    pub(super) fn receive(&self, id: Option<CorrelationId>, reply: Reply) -> Option<Waker> {
        let received = lock(&self.desk).receive(id, reply);
        match received {
            Received::Wake(waker) => Some(waker),
            Received::Taken => None,
            Received::Stray => {
                self.strays.came();
                tracing::debug!("{}: a reply came that nobody waits for", self.settings.what);
                None
            }
        }
    }

    /// Takes room if there is some, to be given back by hand.
    #[inline]
    fn has_room(&self) -> bool {
        self.room.try_acquire().map(SemaphorePermit::forget).is_ok()
    }

    /// Waits for room and takes it, to be given back by hand.
    async fn until_room(&self) -> Result<(), Error> {
        let late = |_| {
            let what = format!("{}: {} others", self.settings.what, self.settings.max_in_flight);
            Error::timed_out(what, self.patience)
        };
        let room = timeout_at(deadline_in(self.patience), self.room.acquire()).await;
        room.map_err(late)?.map_err(|_| Error::closed("the client"))?.forget();
        Ok(())
    }

    /// Sends if it need not wait, or else gives what is to be sent.
    fn send_now(
        &self,
        question: Question<'_>,
        span: &PublishSpan,
        id: CorrelationId,
    ) -> Result<Option<Box<Request>>, Error> {
        let Question {
            exchange, routing_key, mandatory, kind, mut message, wanted, patience, ..
        } = question;
        if let Some(kind) = kind {
            check_own_type(&message, kind)?;
        }
        let text = id.to_text();
        let mut properties = match message.extra.take() {
            Some(extra) => extra.properties,
            None => Properties::default(),
        };
        let text = text.as_short_str();
        properties.correlation_id = Some(text.borrowed());
        if properties.message_id.is_none() {
            properties.message_id = Some(text.borrowed());
            properties.timestamp = properties.timestamp.or_else(|| clock::seconds(clock::now()));
        }
        if let Some(kind) = kind {
            properties.kind = Some(kind.try_into().map_err(invalid_method)?);
        }
        // Whoever asks waits for the answer, and asks again if the broker forgets it.
        properties.delivery_mode.get_or_insert(1);
        span.put_into(&mut properties);
        span.describe(&properties);
        let mut letter = Letter {
            exchange,
            routing_key: &routing_key,
            mandatory,
            properties,
            body: message.body,
        };
        let is_sent = self.send_letter(&mut letter, id, wanted, patience)?;
        Ok((!is_sent).then(|| Box::new(letter.to_request())))
    }

    /// Sends if it need not wait, and says whether it has.
    #[inline]
    fn send_letter(
        &self,
        letter: &mut Letter<'_>,
        id: CorrelationId,
        wanted: Wanted,
        patience: Option<Duration>,
    ) -> Result<bool, Error> {
        let mut desk = lock(&self.desk);
        let publish = |open: &Arc<Open>| {
            letter.properties.reply_to = Some(open.reply_to.clone()?);
            match open.channel.publish_unheld(letter.prepared()) {
                Some(Err(_)) if open.channel.is_gone() => None,
                sent => sent,
            }
        };
        match self.channel.with_open(publish).flatten() {
            None => Ok(false),
            Some(Err(error)) => Err(Error::from_amqp(self.settings.what.clone(), error)),
            Some(Ok(confirmation)) => {
                let request = self.kept(|| letter.to_request());
                desk.open(id, wanted, Some(confirmation), request);
                let is_sooner = patience.is_some_and(|time| {
                    desk.wait_until(id, Patience { time, end: deadline_in(time) })
                });
                if is_sooner {
                    drop(desk);
                    self.sooner.notify_one();
                }
                Ok(true)
            }
        }
    }

    /// The request, if it is to be sent again when it may be lost.
    fn kept(&self, request: impl FnOnce() -> Request) -> Option<Box<Request>> {
        (self.settings.on_loss == OnLoss::Replay).then(|| Box::new(request()))
    }

    /// Sends as soon as there is a channel and room on it.
    async fn send_later(
        &self,
        mut request: Request,
        wanted: Wanted,
        seat: &mut Seat,
    ) -> Result<(), Error> {
        let deadline = deadline_in(self.patience);
        loop {
            let open = self.channel.until_open(deadline).await?;
            let reply_to = match &open.reply_to {
                Some(reply_to) => Ok(reply_to.clone()),
                None => self.own_queue(&open.channel, seat, deadline).await,
            };
            request.properties.reply_to = Some(match reply_to {
                Ok(reply_to) => reply_to,
                Err(_) if open.channel.check_open().is_err() => continue,
                Err(error) => return Err(error),
            });
            {
                let mut desk = lock(&self.desk);
                if !self.channel.is_current(&open) {
                    continue;
                }
                desk.open(seat.id, wanted, None, self.kept(|| request.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            return match open.channel.publish_within(&request.to_publish(), left).await {
                Ok(confirmation) => {
                    lock(&self.desk).was_sent(seat.id, confirmation);
                    Ok(())
                }
                // It is one of those that the channel took along.
                Err(_) if open.channel.is_gone() => Ok(()),
                Err(error) => Err(self.channel.failed(error)),
            };
        }
    }

    /// Makes a queue for the replies to one question, gone with the seat, and gives its name.
    async fn own_queue(
        &self,
        channel: &Channel<Confirm>,
        seat: &mut Seat,
        deadline: Instant,
    ) -> Result<ShortStr<'static>, Error> {
        let making = async {
            let name = declare_reply_queue(channel).await?;
            let (prefetch, exclusive) = (PREFETCH_PER_CALL, true);
            let options = ConsumeOptions { prefetch, exclusive, ..ConsumeOptions::default() };
            let consumer = channel.consume(&name, options).await?;
            Ok((ShortStr::try_from(name)?, consumer))
        };
        let late = |_| self.channel.timed_out();
        let made: Result<_, amqp::Error> = timeout_at(deadline, making).await.map_err(late)?;
        let (name, consumer) = made.map_err(|error| self.channel.failed(error))?;
        seat.own = Some(Box::new(consumer));
        Ok(name)
    }
}

/// A question on its way.
struct Letter<'a> {
    exchange: &'a str,
    routing_key: &'a str,
    mandatory: bool,
    properties: Properties<'a>,
    body: Bytes,
}

impl<'a> Letter<'a> {
    fn prepared(&self) -> Prepared<'_, Properties<'a>> {
        Prepared {
            exchange: self.exchange,
            routing_key: self.routing_key,
            mandatory: self.mandatory,
            properties: &self.properties,
            body: &self.body,
        }
    }

    fn to_request(&self) -> Request {
        Request {
            exchange: self.exchange.to_owned(),
            routing_key: self.routing_key.to_owned(),
            mandatory: self.mandatory,
            properties: self.properties.clone().into_owned(),
            body: self.body.clone(),
        }
    }
}

/// A queue for replies, for this connection alone, gone with its consumer. Gives its name.
pub(super) async fn declare_reply_queue(channel: &Channel<Confirm>) -> Result<String, amqp::Error> {
    let arguments = Table::from_pairs([("x-expires", UNUSED.into())])?;
    let options = QueueOptions { durable: false, exclusive: true, auto_delete: true, arguments };
    Ok(channel.declare_queue("", options).await?.name)
}

/// The method goes into the property `type`, which a message may have for itself.
pub(super) fn check_own_type(message: &Message, method: &str) -> Result<(), Error> {
    let own = message.extra.as_ref().and_then(|extra| extra.properties.kind.as_ref());
    let Some(own) = own.filter(|own| own.as_bytes() != method.as_bytes()) else { return Ok(()) };
    let text = format!(
        "the message has the type {own:?}, and the method {method:?} would take its place: leave one of them out, or reach \
         the service over an exchange, where the routing key is the method"
    );
    Err(Error::new(ErrorKind::Invalid, text))
}

fn invalid_method(error: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Invalid, format!("the name of the method: {error}"))
}
