//! Replying: the way from a method back to who asked.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};

use super::address::ReplyAddress;
use super::reply::{END, ERROR, MORE, NUMBER, PART};
use super::transaction::Transaction;
use crate::amqp::{Properties, RawProperties, ShortStr, lock};
use crate::connection::Client;
use crate::consumer::{FromIncoming, Given, Incoming};
use crate::error::{Error, ErrorKind};
use crate::message::{IntoMessage, Message};
use crate::publisher::{Publisher, Ticket};
use crate::retry::{Diagnosis, Verdict};
use crate::telemetry::Replied;
use crate::trace::TraceContext;

/// How many replies to one call may be unconfirmed; the next one waits.
const UNCONFIRMED: usize = 64;

/// How many exchanges there are publishers for at a time, for callers that name one to reply to.
const EXCHANGES: usize = 32;

/// How replies go out.
#[derive(Clone, Debug)]
pub(super) enum Outlet {
    /// Each is confirmed.
    Confirmed(Arc<Replying>),
    /// All of them with a commit.
    Transaction(Arc<Transaction>),
}

impl Outlet {
    fn counts(&self) -> &Replied {
        match self {
            Outlet::Confirmed(replying) => &replying.counts,
            Outlet::Transaction(transaction) => &transaction.counts,
        }
    }
}

/// Publishes the replies of a service.
#[derive(Debug)]
pub(super) struct Replying {
    client: Client,
    /// Directly to callers. RabbitMQ does not know whether they are there: 3.10 returns every mandatory reply, delivered or
    /// not, and 4.3 none. Callers know a reply by its correlation id, and the fewer bytes it has, the more of them come with
    /// one packet.
    to_callers: Publisher,
    to_queues: Publisher,
    /// One for each exchange, so that one that does not exist takes no other's replies along.
    to_exchanges: Mutex<HashMap<String, Publisher>>,
    counts: Replied,
}

impl Replying {
    pub(super) async fn start(client: &Client, service: &str) -> Result<Arc<Self>, Error> {
        let to_callers = client.publisher("").transient().allow_unroutable().anonymous();
        Ok(Arc::new(Replying {
            to_callers: to_callers.build().await?,
            to_queues: client.publisher("").transient().build().await?,
            to_exchanges: Mutex::default(),
            counts: Replied::new(service),
            client: client.clone(),
        }))
    }

    /// The publisher for an address, if there is one already.
    fn publisher(&self, to: &ReplyAddress) -> Option<Publisher> {
        if to.is_direct() {
            return Some(self.to_callers.clone());
        }
        if to.exchange.is_empty() {
            return Some(self.to_queues.clone());
        }
        lock(&self.to_exchanges).get(&to.exchange).cloned()
    }

    async fn new_publisher(&self, exchange: &str) -> Result<Publisher, Error> {
        let publisher = self.client.publisher(exchange).transient().build().await?;
        let mut publishers = lock(&self.to_exchanges);
        if publishers.len() >= EXCHANGES {
            // What is under way holds its own.
            publishers.clear();
        }
        publishers.insert(exchange.to_owned(), publisher.clone());
        Ok(publisher)
    }
}

/// Sends replies to a request before the last one, which is what the method returns: progress, or the parts of a stream. As
/// an argument of a method.
///
/// ```
/// use leveret::{End, Json, Replier};
///
/// async fn count(Json(to): Json<u32>, mut replier: Replier) -> Result<End, leveret::Error> {
///     for number in 1..=to {
///         replier.send(Json(number)).await?;
///     }
///     Ok(End)
/// }
/// ```
pub struct Replier {
    way: WayBack,
}

impl Replier {
    /// Whether anybody asked for replies.
    pub fn is_wanted(&self) -> bool {
        self.way.line.is_some()
    }

    /// Sends a reply that others follow. It is on its way when this returns; the request is not acked before all its
    /// replies are confirmed.
    ///
    /// It fails if an earlier one could not be delivered: whoever asked is no longer there; or if the method has returned, and
    /// the last one is sent. If nobody asked for a reply, it does nothing.
    pub async fn send(&mut self, message: impl IntoMessage) -> Result<(), Error> {
        let Some(line) = &self.way.line else { return Ok(()) };
        let number = {
            let mut state = lock(&line.state);
            if state.is_finished {
                let text =
                    "the method has returned, and its last reply is sent: send the others before";
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            state.number += 1;
            state.number
        };
        let message = message.into_message()?.header(PART, MORE).header(NUMBER, number);
        line.send(message).await?;
        line.confirmed(UNCONFIRMED - 1).await
    }
}

/// The way back to who asked.
#[derive(Clone)]
pub(crate) struct WayBack {
    /// `None` if nobody asked for a reply.
    line: Option<Arc<Line>>,
    kind: Kind,
}

/// What becomes of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// It is sent.
    Plain,
    /// It is recorded before it is sent, and sent again as it was.
    Recorded,
}

struct Line {
    kind: Kind,
    outlet: Outlet,
    to: ReplyAddress,
    correlation_id: Option<ShortStr<'static>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How many replies were sent, but for the last.
    number: i64,
    /// Those that are not confirmed yet.
    unconfirmed: VecDeque<Ticket>,
    /// What the method has returned.
    left: Option<Message>,
    /// The last one is on its way. Another would come for nobody, or with the transaction of another request.
    is_finished: bool,
}

impl WayBack {
    /// The way back from a request; one that leads nowhere if it asks for no reply.
    pub(super) fn of(request: &RawProperties, outlet: &Outlet) -> Self {
        WayBack::new(request, outlet, Kind::Plain)
    }

    /// The same for one that gets the same reply however often it comes.
    pub(super) fn recorded(request: &RawProperties, outlet: &Outlet) -> Self {
        WayBack::new(request, outlet, Kind::Recorded)
    }

    fn new(request: &RawProperties, outlet: &Outlet, kind: Kind) -> Self {
        let Properties { reply_to, correlation_id, .. } = request.get();
        let to = reply_to.and_then(|reply_to| ReplyAddress::parse(&reply_to));
        let line = to.map(|to| {
            let (outlet, state) = (outlet.clone(), Mutex::default());
            let correlation_id = correlation_id.map(ShortStr::into_owned);
            Arc::new(Line { kind, outlet, to, correlation_id, state })
        });
        WayBack { line, kind }
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.line.is_some()
    }

    /// What the method has returned.
    pub(super) fn leave(&self, value: Option<Message>) {
        if let Some(line) = &self.line {
            let end = || Message::default().header(PART, END);
            lock(&line.state).left = Some(value.unwrap_or_else(end));
        }
    }

    /// Sends the last reply, which says what the method has returned or why it failed, and waits until all of them are
    /// confirmed. Whoever is no longer there to get them is no reason to fail.
    pub(super) async fn finish(&self, outcome: Result<(), &Diagnosis>) -> Result<(), Error> {
        let Some(line) = &self.line else { return Ok(()) };
        line.finish(line.last(outcome)).await
    }

    /// The last reply in a form to be recorded: with all that it would be given on its way. `None` if nobody asked for it.
    pub(super) fn recordable(&self, outcome: Result<(), &Diagnosis>) -> Option<Message> {
        let mut last = self.line.as_ref()?.last(outcome).identified();
        let properties = &mut last.extra.get_or_insert_default().properties;
        if let Some(context) = TraceContext::current() {
            context.child().put_into(properties.headers.get_or_insert_default());
        }
        Some(last)
    }

    /// Sends a reply that was recorded, as often as it is asked for.
    pub(super) async fn send_recorded(&self, reply: Message) -> Result<(), Error> {
        match &self.line {
            Some(line) => line.finish(reply).await,
            None => Ok(()),
        }
    }
}

fn error_reply(seen: &Diagnosis) -> Message {
    let message = Message::new(seen.text.clone()).content_type("text/plain");
    message.header(ERROR, seen.kind.clone())
}

fn is_error(reply: &Message) -> bool {
    let headers = reply.extra.as_ref().and_then(|extra| extra.properties.headers.as_ref());
    headers.is_some_and(|headers| headers.get(ERROR).is_some())
}

impl fmt::Debug for WayBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = self.line.as_ref().map(|line| &line.to);
        f.debug_struct("WayBack").field("to", &to).finish()
    }
}

impl Line {
    /// The last reply.
    fn last(&self, outcome: Result<(), &Diagnosis>) -> Message {
        match outcome {
            // A layer may have answered in place of the method.
            Ok(()) => lock(&self.state).left.take().unwrap_or_default(),
            Err(seen) => error_reply(seen),
        }
    }

    async fn finish(&self, last: Message) -> Result<(), Error> {
        lock(&self.state).is_finished = true;
        let is_value = !is_error(&last);
        match is_value {
            true => self.outlet.counts().value(),
            false => self.outlet.counts().error(),
        }
        match self.end(last).await {
            Err(error) if is_unsendable(&error) => Box::pin(self.unsendable(error, is_value)).await,
            sent => sent,
        }
    }

    async fn send(&self, mut message: Message) -> Result<(), Error> {
        let properties = &mut message.extra.get_or_insert_default().properties;
        if self.correlation_id.is_some() {
            properties.correlation_id.clone_from(&self.correlation_id);
        }
        match &self.outlet {
            Outlet::Confirmed(replying) => {
                let publisher = match replying.publisher(&self.to) {
                    Some(publisher) => publisher,
                    None => Box::pin(replying.new_publisher(&self.to.exchange)).await?,
                };
                let key = &self.to.routing_key;
                let ticket = match self.kind {
                    Kind::Plain => publisher.send(key, message).await?,
                    Kind::Recorded => publisher.send_as_it_is(key, message).await?,
                };
                lock(&self.state).unconfirmed.push_back(ticket);
                Ok(())
            }
            Outlet::Transaction(transaction) => Box::pin(transaction.send(&self.to, message)).await,
        }
    }

    /// Waits until no more than so many are unconfirmed.
    async fn confirmed(&self, at_most: usize) -> Result<(), Error> {
        while let Some(oldest) = self.oldest(at_most) {
            oldest.await?;
        }
        Ok(())
    }

    /// The oldest unconfirmed one, if there are more than so many.
    fn oldest(&self, at_most: usize) -> Option<Oldest<'_>> {
        let unconfirmed = &mut lock(&self.state).unconfirmed;
        let is_one_too_many = unconfirmed.len() > at_most;
        let ticket = is_one_too_many.then(|| unconfirmed.pop_front()).flatten()?;
        Some(Oldest { line: self, ticket: Some(ticket) })
    }

    /// A reply cannot be sent to anybody. A short error tells of it, also if it was an error itself: whoever asked would
    /// wait for ever.
    async fn unsendable(&self, why: Error, is_value: bool) -> Result<(), Error> {
        if is_value {
            self.outlet.counts().error();
        }
        let (kind, text) = ("unsendable".to_owned(), why.to_string());
        match self.end(error_reply(&Diagnosis { verdict: Verdict::Permanent, kind, text })).await {
            Err(error) if is_unsendable(&error) => {
                tracing::error!("an error cannot be told to who asked: {error}");
                Ok(())
            }
            sent => sent,
        }
    }

    async fn end(&self, last: Message) -> Result<(), Error> {
        let sent = async {
            self.send(last).await?;
            self.confirmed(0).await
        };
        match sent.await {
            Err(error) if is_undeliverable(&error) => {
                self.outlet.counts().undeliverable();
                let ReplyAddress { exchange, routing_key } = &self.to;
                tracing::warn!(exchange, routing_key, "a reply finds nobody: {error}");
                Ok(())
            }
            sent => sent,
        }
    }
}

/// Waits for the outcome of a reply. If nobody does any longer, the reply goes back to those without one.
struct Oldest<'l> {
    line: &'l Line,
    ticket: Option<Ticket>,
}

impl Future for Oldest<'_> {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let Some(ticket) = &mut self.ticket else { return Poll::Ready(Ok(())) };
        let outcome = ready!(Pin::new(ticket).poll(context));
        self.ticket = None;
        Poll::Ready(outcome)
    }
}

impl Drop for Oldest<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            lock(&self.line.state).unconfirmed.push_front(ticket);
        }
    }
}

/// Whether nobody is there to get it: the work is done, and would not find them the next time either.
fn is_undeliverable(error: &Error) -> bool {
    use ErrorKind::{Missing, Nacked, Refused, Unroutable};
    matches!(error.kind(), Missing | Nacked | Refused | Unroutable)
}

/// Whether it can be sent to nobody: it is too large, for example.
fn is_unsendable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Broker | ErrorKind::Invalid)
}

impl FromIncoming for Replier {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        let way = incoming.way_back().cloned();
        if way.as_ref().is_some_and(|way| way.kind == Kind::Recorded) {
            return Err(has_one_reply());
        }
        way.map(|way| Replier { way }).ok_or_else(has_no_replier)
    }

    fn check(given: &Given<'_>) -> Result<(), Error> {
        match given.is_service() {
            true if given.has_inbox() => Err(has_one_reply()),
            true => Ok(()),
            false => Err(has_no_replier()),
        }
    }
}

fn has_one_reply() -> Error {
    let text = "a method takes a Replier, and its service handles requests exactly once, with one reply for each: return the \
                reply, or leave out exactly_once";
    Error::new(ErrorKind::Invalid, text)
}

fn has_no_replier() -> Error {
    let text = "a handler takes a Replier, which only methods of a service have: make it a method by Client::service, or publish \
                the reply";
    Error::new(ErrorKind::Invalid, text)
}

impl fmt::Debug for Replier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replier").field("is_wanted", &self.is_wanted()).finish()
    }
}
