//! How the replies to a request are sent.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex};

use super::address::ReplyAddress;
use super::reply::{END, ERROR, MORE, NUMBER, PART};
use super::transaction::ReplyTransaction;
use crate::amqp::{Properties, RawProperties, ShortStr, lock};
use crate::connection::Client;
use crate::consumer::OnPark;
use crate::error::{Error, ErrorKind};
use crate::message::{IntoMessage, Message};
use crate::publisher::{Publisher, Ticket};
use crate::retry::{Diagnosis, Verdict};
use crate::telemetry::Replied;
use crate::trace::TraceContext;

/// How many replies to one call may be unconfirmed; the next one waits.
const UNCONFIRMED: usize = 64;

/// How many publishers to exchanges that callers name as reply addresses are kept at a time.
const EXCHANGES: usize = 32;

/// How replies are published.
#[derive(Clone, Debug)]
pub(super) enum ReplyOutput {
    /// Each is confirmed.
    Confirmed(Arc<ReplyPublishers>),
    /// The commit publishes all of them.
    Transaction(Arc<ReplyTransaction>),
}

impl ReplyOutput {
    pub(super) async fn confirmed(client: &Client, service: &str) -> Result<Self, Error> {
        Ok(ReplyOutput::Confirmed(ReplyPublishers::start(client, service).await?))
    }

    /// The caller of a request that is parked gets an error.
    pub(super) fn on_park(self) -> OnPark {
        OnPark(Arc::new(move |request, diagnosis| {
            let route = ReplyRoute::of(&request, &self);
            Box::pin(async move {
                if let Err(error) = route.finish(Err(&diagnosis)).await {
                    tracing::error!("the caller of a parked request gets no reply: {error}");
                }
            })
        }))
    }

    fn counts(&self) -> &Replied {
        match self {
            ReplyOutput::Confirmed(publishers) => &publishers.counts,
            ReplyOutput::Transaction(transaction) => &transaction.counts,
        }
    }
}

/// The publishers of a service's replies.
#[derive(Debug)]
pub(super) struct ReplyPublishers {
    client: Client,
    /// For direct replies. RabbitMQ does not know whether the caller is there: 3.10 returns every mandatory reply, delivered or not, and
    /// 4.3 none. They have no message id: the smaller they are, the more of them fit into a packet.
    direct: Publisher,
    to_queues: Publisher,
    /// One for each exchange: a missing exchange closes the channel, with the replies to others on it.
    to_exchanges: Mutex<HashMap<String, Publisher>>,
    counts: Replied,
}

impl ReplyPublishers {
    async fn start(client: &Client, service: &str) -> Result<Arc<Self>, Error> {
        let direct = client.publisher("").transient().allow_unroutable().anonymous();
        Ok(Arc::new(ReplyPublishers {
            direct: direct.build().await?,
            to_queues: client.publisher("").transient().build().await?,
            to_exchanges: Mutex::default(),
            counts: Replied::new(service),
            client: client.clone(),
        }))
    }

    /// The publisher for an address, if there is one already.
    fn publisher(&self, to: &ReplyAddress) -> Option<Publisher> {
        if to.is_direct() {
            return Some(self.direct.clone());
        }
        if to.exchange.is_empty() {
            return Some(self.to_queues.clone());
        }
        lock(&self.to_exchanges).get(&to.exchange).cloned()
    }

    async fn new_publisher(&self, exchange: &str) -> Result<Publisher, Error> {
        let publisher = self.client.publisher(exchange).transient().build().await?;
        let mut publishers = lock(&self.to_exchanges);
        // A reply that is on its way holds its publisher.
        let _evicted = (publishers.len() >= EXCHANGES).then(|| std::mem::take(&mut *publishers));
        publishers.insert(exchange.to_owned(), publisher.clone());
        drop(publishers);
        Ok(publisher)
    }
}

/// The route of the replies to one request. It leads nowhere if the request asks for no reply.
#[derive(Clone)]
pub(crate) struct ReplyRoute {
    target: Option<Arc<Target>>,
}

struct Target {
    output: ReplyOutput,
    /// The reply is recorded before it is sent, and a copy of the request gets the same one.
    is_recorded: bool,
    to: ReplyAddress,
    correlation_id: Option<ShortStr<'static>>,
    state: Mutex<RouteState>,
    /// Replies before the last one without a confirm yet, the oldest first. Each stays here until it has one, also if its sender stops
    /// to wait.
    unconfirmed: tokio::sync::Mutex<VecDeque<Ticket>>,
}

#[derive(Default)]
struct RouteState {
    /// How many replies were sent, except for the last one.
    number: i64,
    /// What the method has returned.
    returned: Option<Message>,
    /// The last reply is on its way. A further one would match no call, or belong to the transaction of another request.
    is_finished: bool,
}

impl ReplyRoute {
    pub(super) fn of(request: &RawProperties, output: &ReplyOutput) -> Self {
        ReplyRoute::new(request, output, false)
    }

    /// The route of a reply that is recorded.
    pub(super) fn recorded(request: &RawProperties, output: &ReplyOutput) -> Self {
        ReplyRoute::new(request, output, true)
    }

    fn new(request: &RawProperties, output: &ReplyOutput, is_recorded: bool) -> Self {
        let Properties { reply_to, correlation_id, .. } = request.get();
        let to = reply_to.and_then(|reply_to| ReplyAddress::parse(&reply_to));
        let target = to.map(|to| {
            Arc::new(Target {
                output: output.clone(),
                is_recorded,
                to,
                correlation_id: correlation_id.map(ShortStr::into_owned),
                state: Mutex::default(),
                unconfirmed: tokio::sync::Mutex::default(),
            })
        });
        ReplyRoute { target }
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.target.is_some()
    }

    pub(super) fn is_recorded(&self) -> bool {
        self.target.as_ref().is_some_and(|target| target.is_recorded)
    }

    /// Keeps what the method has returned, until the last reply is sent.
    pub(super) fn set_returned(&self, value: Option<Message>) {
        if let Some(target) = &self.target {
            let end = || Message::default().header(PART, END);
            lock(&target.state).returned = Some(value.unwrap_or_else(end));
        }
    }

    /// Sends a reply that others follow.
    pub(super) async fn send_more(&self, message: impl IntoMessage) -> Result<(), Error> {
        let Some(target) = &self.target else { return Ok(()) };
        let number = {
            let mut state = lock(&target.state);
            if state.is_finished {
                let text =
                    "the method has returned, and its last reply is sent: send the others before";
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            state.number += 1;
            state.number
        };
        let message = message.into_message()?.header(PART, MORE).header(NUMBER, number);
        if let Some(ticket) = target.send(message).await? {
            target.unconfirmed.lock().await.push_back(ticket);
        }
        target.confirmed(UNCONFIRMED - 1).await
    }

    /// Sends the last reply, which is what the method has returned or why it failed, and waits until all replies are confirmed. A caller
    /// that is gone is no failure.
    pub(super) async fn finish(&self, outcome: Result<(), &Diagnosis>) -> Result<(), Error> {
        let Some(target) = &self.target else { return Ok(()) };
        target.finish(target.last(outcome)).await
    }

    /// The last reply as it is to be recorded: with everything that it would get on its way. `None` if the caller asked for none.
    pub(super) fn recordable(&self, outcome: Result<(), &Diagnosis>) -> Option<Message> {
        let mut last = self.target.as_ref()?.last(outcome).identified();
        let properties = &mut last.extra.get_or_insert_default().properties;
        if let Some(context) = TraceContext::current() {
            context.child().put_into(properties.headers.get_or_insert_default());
        }
        Some(last)
    }

    /// Sends a reply that was recorded.
    pub(super) async fn send_recorded(&self, reply: Message) -> Result<(), Error> {
        match &self.target {
            Some(target) => target.finish(reply).await,
            None => Ok(()),
        }
    }
}

impl fmt::Debug for ReplyRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = self.target.as_ref().map(|target| &target.to);
        f.debug_struct("ReplyRoute").field("to", &to).finish()
    }
}

fn error_reply(diagnosis: &Diagnosis) -> Message {
    let message = Message::new(diagnosis.text.clone()).content_type("text/plain");
    message.header(ERROR, diagnosis.kind.clone())
}

fn is_error(reply: &Message) -> bool {
    let headers = reply.extra.as_ref().and_then(|extra| extra.properties.headers.as_ref());
    headers.is_some_and(|headers| headers.get(ERROR).is_some())
}

impl Target {
    fn last(&self, outcome: Result<(), &Diagnosis>) -> Message {
        match outcome {
            // A layer may have answered in place of the method.
            Ok(()) => lock(&self.state).returned.take().unwrap_or_default(),
            Err(diagnosis) => error_reply(diagnosis),
        }
    }

    async fn finish(&self, last: Message) -> Result<(), Error> {
        lock(&self.state).is_finished = true;
        let is_value = !is_error(&last);
        match is_value {
            true => self.output.counts().value(),
            false => self.output.counts().error(),
        }
        match self.send_last(last).await {
            Err(error) if is_unsendable(&error) => {
                Box::pin(self.replace_unsendable(error, is_value)).await
            }
            sent => sent,
        }
    }

    async fn send_last(&self, last: Message) -> Result<(), Error> {
        let sent = async {
            let ticket = self.send(last).await?;
            // Most requests have one reply alone.
            if lock(&self.state).number > 0 {
                self.confirmed(0).await?;
            }
            match ticket {
                Some(ticket) => ticket.await,
                None => Ok(()),
            }
        };
        match sent.await {
            Err(error) if is_undeliverable(&error) => {
                self.output.counts().undeliverable();
                let ReplyAddress { exchange, routing_key } = &self.to;
                tracing::warn!(exchange, routing_key, "a reply is undeliverable: {error}");
                Ok(())
            }
            sent => sent,
        }
    }

    /// Sends a reply. In a transaction, the commit confirms it.
    async fn send(&self, mut message: Message) -> Result<Option<Ticket>, Error> {
        let properties = &mut message.extra.get_or_insert_default().properties;
        if self.correlation_id.is_some() {
            properties.correlation_id.clone_from(&self.correlation_id);
        }
        match &self.output {
            ReplyOutput::Confirmed(publishers) => {
                let publisher = match publishers.publisher(&self.to) {
                    Some(publisher) => publisher,
                    None => Box::pin(publishers.new_publisher(&self.to.exchange)).await?,
                };
                let key = &self.to.routing_key;
                let ticket = match self.is_recorded {
                    false => publisher.send(key, message).await?,
                    true => publisher.send_as_it_is(key, message).await?,
                };
                Ok(Some(ticket))
            }
            ReplyOutput::Transaction(transaction) => {
                Box::pin(transaction.send(&self.to, message)).await.map(|()| None)
            }
        }
    }

    /// Waits until at most so many replies are unconfirmed. Nothing is lost if the future is dropped.
    async fn confirmed(&self, at_most: usize) -> Result<(), Error> {
        let mut unconfirmed = self.unconfirmed.lock().await;
        while unconfirmed.len() > at_most {
            let Some(oldest) = unconfirmed.front_mut() else { break };
            let outcome = oldest.await;
            unconfirmed.pop_front();
            outcome?;
        }
        Ok(())
    }

    /// Sends a short error in place of a reply that cannot be sent, also if that was an error: the caller would wait for ever.
    async fn replace_unsendable(&self, why: Error, is_value: bool) -> Result<(), Error> {
        if is_value {
            self.output.counts().error();
        }
        let (kind, text) = ("unsendable".to_owned(), why.to_string());
        let diagnosis = Diagnosis { verdict: Verdict::Permanent, kind, text };
        match self.send_last(error_reply(&diagnosis)).await {
            Err(error) if is_unsendable(&error) => {
                tracing::error!("an error cannot be sent to the caller: {error}");
                Ok(())
            }
            sent => sent,
        }
    }
}

/// Whether the caller is gone: the work is done, and would not find the caller the next time either.
fn is_undeliverable(error: &Error) -> bool {
    use ErrorKind::{Missing, Nacked, Refused, Unroutable};
    matches!(error.kind(), Missing | Nacked | Refused | Unroutable)
}

/// Whether the reply cannot be sent to any caller: it is too large, for example.
fn is_unsendable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Broker | ErrorKind::Invalid)
}
