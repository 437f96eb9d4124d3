//! The transactional mode of a service: receive, handle, reply, ack, commit.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::address::ReplyAddress;
use super::reply_route::{ReplyOutput, ReplyRoute};
use crate::amqp::{self, Channel, Publish, RawProperties, Tx, lock};
use crate::connection::{Client, LossCause};
use crate::consumer::{ConsumerBuilder, InstrumentedHandler, Summary, report, unless};
use crate::delivery::Delivery;
use crate::error::{BoxError, Error, ErrorKind};
use crate::message::Message;
use crate::retry::{Diagnosis, Failure, Verdict};
use crate::telemetry::Replied;
use crate::text::escape;

/// The transaction of one request: its replies are published when it is committed.
#[derive(Debug)]
pub(super) struct ReplyTransaction {
    channel: Channel<Tx>,
    client: Client,
    pub(super) counts: Replied,
}

impl ReplyTransaction {
    pub(super) async fn send(&self, to: &ReplyAddress, message: Message) -> Result<(), Error> {
        message.check()?;
        self.check_exchange(&to.exchange).await?;
        let Message { body, extra } = message;
        let mut properties = extra.map(|extra| extra.properties).unwrap_or_default();
        properties.delivery_mode.get_or_insert(1);
        let publish = Publish {
            exchange: &to.exchange,
            routing_key: &to.routing_key,
            mandatory: !to.is_direct(),
            properties,
            body,
        };
        let published = self.channel.publish(&publish).await;
        published.map_err(|error| Error::from_amqp("replying", error))
    }

    /// To publish to an exchange that does not exist would end the transaction, and the next one with the same request.
    async fn check_exchange(&self, exchange: &str) -> Result<(), Error> {
        if exchange.is_empty() {
            return Ok(());
        }
        let what = format!("replying to exchange {exchange:?}");
        let inspect = |channel: Channel| async move { channel.inspect_exchange(exchange).await };
        self.client.on_channel(&what, inspect).await
    }
}

/// Serves requests one after the other, each in a transaction.
pub(super) struct TransactionalService {
    client: Client,
    consumer: ConsumerBuilder,
    methods: InstrumentedHandler,
    counts: Replied,
    refused: Mutex<VecDeque<RefusedReply>>,
}

/// How many refused replies are remembered. Their requests are redelivered one by one.
const MAX_REFUSED: usize = 64;

/// A request whose transaction the broker has ended because of its reply: the reply is too large, or the service may not publish to its
/// address. The request is redelivered, and the same reply would end the next transaction as well.
#[derive(Debug)]
struct RefusedReply {
    request: RequestId,
    /// In the broker's words.
    text: String,
    /// The broker has also refused the error that replaced the reply.
    is_error: bool,
}

/// Identifies a redelivered request: `reply-to`, `correlation-id` and `message-id`.
type RequestId = [Option<Vec<u8>>; 3];

fn id_of(request: &RawProperties) -> RequestId {
    let properties = request.get();
    [properties.reply_to, properties.correlation_id, properties.message_id]
        .map(|text| text.map(|text| text.as_bytes().to_vec()))
}

impl TransactionalService {
    pub(super) fn new(
        client: Client,
        consumer: ConsumerBuilder,
        methods: InstrumentedHandler,
        counts: Replied,
    ) -> Self {
        TransactionalService { client, consumer, methods, counts, refused: Mutex::default() }
    }

    pub(super) async fn run_until(self, stop: impl Future) -> Result<Summary, Error> {
        let consumer = self.consumer.clone().transactional().prefetch(1);
        let mut stop = std::pin::pin!(stop);
        let mut summary = Summary::default();
        let Some(begun) = unless(&mut stop, consumer.stream()).await else { return Ok(summary) };
        let mut deliveries = begun?;
        loop {
            let next = tokio::select! {
                _ = &mut stop => return Ok(summary),
                next = deliveries.next() => next,
            };
            let delivery = match next {
                Some(Ok(delivery)) => delivery,
                Some(Err(error)) if error.kind() != ErrorKind::Closed => return Err(error),
                _ => return Ok(summary),
            };
            // It goes back to the queue if its channel is gone already.
            let Some(channel) = deliveries.transaction() else { continue };
            let mut handling = std::pin::pin!(self.handle(delivery, channel));
            tokio::select! {
                biased;
                done = &mut handling => summary.add(done),
                _ = &mut stop => {
                    match self.consumer.start_draining().limit(handling).await {
                        Some(done) => summary.add(done),
                        None => summary.abandoned += 1,
                    }
                    return Ok(summary);
                }
            }
        }
    }

    async fn handle(&self, delivery: Delivery, channel: Channel<Tx>) -> Summary {
        let mut incoming = delivery.incoming().clone();
        let (id, refused) = (id_of(incoming.raw_properties()), self.refused(&delivery));
        let is_redelivered = delivery.redelivered();
        let (client, counts) = (self.client.clone(), self.counts.clone());
        let transaction = Arc::new(ReplyTransaction { channel, client, counts });
        let output = ReplyOutput::Transaction(Arc::clone(&transaction));
        let route = ReplyRoute::of(incoming.raw_properties(), &output);
        incoming.set_reply_route(route.clone());
        let done = match &refused {
            None => {
                let handled = self.methods.call(&incoming).await;
                self.settle(delivery, &route, handled).await
            }
            Some(RefusedReply { is_error: false, text, .. }) => {
                let failure = Failure::permanent(text.clone()).kind("unsendable");
                self.settle(delivery, &route, Err(failure.into())).await
            }
            Some(RefusedReply { text, .. }) => {
                self.counts.undeliverable();
                tracing::error!("an error cannot be sent to the caller: {text}");
                report(delivery.ack());
                Ok(Summary { handled: 1, ..Summary::default() })
            }
        };
        let committed = match done {
            Ok(summary) => transaction.channel.commit().await.map(|()| summary),
            Err(error) => {
                // The request is redelivered, on another channel.
                tracing::error!("a request cannot be answered, and is handled again: {error}");
                transaction.channel.close_now();
                return Summary { failed: 1, ..Summary::default() };
            }
        };
        for returned in transaction.channel.take_returned() {
            self.counts.undeliverable();
            let key = &returned.routing_key;
            tracing::warn!(
                routing_key = key,
                "a reply is undeliverable: {}",
                escape(&returned.reply_text)
            );
        }
        committed.unwrap_or_else(|error| {
            tracing::error!(
                "a request is handled again: its transaction was not committed: {error}"
            );
            let is_to_blame = match LossCause::of(&error) {
                LossCause::Connection => false,
                // The first time, a message of another channel may be why.
                LossCause::ConnectionClosed => is_redelivered,
                LossCause::Message | LossCause::MissingExchange => true,
            };
            if route.is_wanted() && is_to_blame {
                self.refuse(id, refused.is_some(), &error);
            }
            Summary { failed: 1, ..Summary::default() }
        })
    }

    /// The refused reply to this request, if it was redelivered because of that.
    fn refused(&self, delivery: &Delivery) -> Option<RefusedReply> {
        let mut refused = lock(&self.refused);
        if refused.is_empty() || !delivery.redelivered() {
            return None;
        }
        let id = id_of(delivery.raw_properties());
        let place = refused.iter().position(|one| one.request == id)?;
        refused.remove(place)
    }

    fn refuse(&self, request: RequestId, is_error: bool, error: &amqp::Error) {
        let mut refused = lock(&self.refused);
        if refused.len() == MAX_REFUSED {
            refused.pop_front();
        }
        refused.push_back(RefusedReply { request, text: error.to_string(), is_error });
    }

    /// Replies and settles: both happen with the commit.
    async fn settle(
        &self,
        delivery: Delivery,
        route: &ReplyRoute,
        handled: Result<(), BoxError>,
    ) -> Result<Summary, Error> {
        let handled = handled.map_err(|error| Diagnosis::of(&error));
        route.finish(handled.as_ref().copied()).await?;
        match handled {
            Err(diagnosis) if !route.is_wanted() => {
                tracing::error!(
                    kind = diagnosis.kind,
                    "a request failed: {}",
                    escape(&diagnosis.text)
                );
                report(match diagnosis.verdict {
                    Verdict::Done => delivery.ack(),
                    Verdict::Requeue => delivery.requeue(),
                    _ => delivery.discard(),
                });
                Ok(Summary { failed: 1, ..Summary::default() })
            }
            _ => {
                report(delivery.ack());
                Ok(Summary { handled: 1, ..Summary::default() })
            }
        }
    }
}
