//! The jobs, done by hand with lapin, without losses and fast: a message that moves is
//! published mandatory and with a confirm, and its original is acked when that has come; as many are on their way at once
//! as the prefetch allows.

use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, ExchangeDeclareOptions, QueueBindOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, ExchangeKind};

use super::delivery_counts::{DeliveryCounts, Verdict};
use super::{Job, PARKED, PREFETCH, QUEUE, RETURN_EXCHANGE, Run, WAIT, WAIT_EXCHANGE, WAIT_QUEUE};
use crate::by_hand::{self, MANDATORY, consume, declare_queue};
use crate::client::concurrent;
use crate::meter::{Failure, Measured, Meter, expect};

pub(super) async fn run(run: Run) -> Result<Measured, Failure> {
    let connection = by_hand::connect(run.setting.port).await?;
    let meter = Meter::start();
    let taking = connection.create_channel().await?;
    let moving = by_hand::confirm_channel(&connection).await?;
    match run.job {
        Job::FailOnce | Job::Park => {
            declare(&taking).await?;
            handle_all(&taking, &moving, run).await?;
        }
        Job::Replay => replay_all(&taking, &moving, run).await?,
    }
    by_hand::close(&connection).await;
    Ok(meter.stop(run.messages))
}

/// What is beside the work queue.
async fn declare(channel: &Channel) -> lapin::Result<()> {
    let exchanges = [
        (PARKED, ExchangeKind::Fanout, table([])),
        (RETURN_EXCHANGE, ExchangeKind::Fanout, table([("alternate-exchange", text(PARKED))])),
        (WAIT_EXCHANGE, ExchangeKind::Headers, table([])),
    ];
    for (name, kind, arguments) in exchanges {
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        channel.exchange_declare(name.into(), kind, options, arguments).await?;
    }
    let waiting = [
        ("x-queue-type", text("quorum")),
        ("x-message-ttl", delay()),
        ("x-dead-letter-exchange", text(RETURN_EXCHANGE)),
        ("x-dead-letter-strategy", text("at-least-once")),
        ("x-overflow", text("reject-publish")),
    ];
    // No number of looks at a parked message drops it.
    let limit = AMQPValue::LongLongInt(1_000_000_000);
    let parked = [("x-queue-type", text("quorum")), ("x-delivery-limit", limit)];
    declare_queue(channel, PARKED, table(parked)).await?;
    declare_queue(channel, WAIT_QUEUE, table(waiting)).await?;
    let bindings = [
        (PARKED, PARKED, table([])),
        (QUEUE, RETURN_EXCHANGE, table([])),
        (WAIT_QUEUE, WAIT_EXCHANGE, table([("leveret-delay", delay())])),
    ];
    for (queue, exchange, arguments) in bindings {
        let options = QueueBindOptions::default();
        channel.queue_bind(queue.into(), exchange.into(), "".into(), options, arguments).await?;
    }
    Ok(())
}

fn table<const N: usize>(entries: [(&str, AMQPValue); N]) -> FieldTable {
    with(FieldTable::default(), entries)
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

fn delay() -> AMQPValue {
    AMQPValue::LongLongInt(WAIT.as_millis() as i64)
}

/// Jobs `fail-once` and `park`.
async fn handle_all(taking: &Channel, moving: &Channel, run: Run) -> Result<(), Failure> {
    let counts = DeliveryCounts::new(run.job, run.messages);
    let settle = async |delivery: lapin::Result<Delivery>| {
        let mut delivery = delivery?;
        match counts.handle(&delivery.data) {
            Verdict::Success => {}
            Verdict::FailsNow => {
                let stamped = stamped(&delivery, "offline", "the bank does not answer");
                let headers = with(stamped, [("leveret-delay", delay())]);
                forward(moving, &mut delivery, WAIT_EXCHANGE.into(), headers).await?;
            }
            Verdict::FailsForGood => {
                let stamped = stamped(&delivery, "data", "no such customer");
                let parked = [
                    ("x-leveret-reason", text("permanent")),
                    ("x-leveret-return", text(RETURN_EXCHANGE)),
                ];
                let headers = with(stamped, parked);
                forward(moving, &mut delivery, PARKED.into(), headers).await?;
            }
        }
        Ok::<_, Failure>(delivery.ack(BasicAckOptions::default()).await?)
    };
    let deliveries = consume(taking, QUEUE, Some(PREFETCH)).await?;
    let deliveries = deliveries.take_until(Box::pin(counts.all_done()));
    concurrent(deliveries, PREFETCH.into(), settle).await?;
    counts.expect_each(if run.job == Job::FailOnce { 2 } else { 1 })
}

/// Job `replay`.
async fn replay_all(taking: &Channel, moving: &Channel, run: Run) -> Result<(), Failure> {
    let replay = async |delivery: lapin::Result<Delivery>| {
        let mut delivery = delivery?;
        let headers = delivery.properties.headers().clone().unwrap_or_default();
        let back = headers.inner().get("x-leveret-return").and_then(AMQPValue::as_long_string);
        let back = back.ok_or("a message does not say how it gets back")?.to_string();
        let mut headers = headers.inner().clone();
        headers.retain(|name, _| !name.as_str().starts_with("x-leveret-"));
        forward(moving, &mut delivery, back.into(), headers.into()).await?;
        Ok::<_, Failure>(delivery.ack(BasicAckOptions::default()).await?)
    };
    let deliveries = consume(taking, PARKED, Some(PREFETCH)).await?.take(run.messages as usize);
    let replayed = concurrent(deliveries, PREFETCH.into(), replay).await?;
    expect("were replayed", run.messages, replayed)
}

/// The headers of a message, with what is known of its failure. There is no history.
fn stamped(delivery: &Delivery, kind: &str, error: &str) -> FieldTable {
    let headers = delivery.properties.headers().clone().unwrap_or_default();
    let known = headers.inner();
    let attempts = known.get("x-leveret-attempts").and_then(AMQPValue::as_long_string);
    let attempts =
        attempts.and_then(|text| str::from_utf8(text.as_bytes()).ok()?.parse::<u32>().ok());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let now = text(&now.to_string());
    let or = |name: &str, value: AMQPValue| known.get(name).cloned().unwrap_or(value);
    let facts = [
        ("x-leveret-attempts", text(&(attempts.unwrap_or(0) + 1).to_string())),
        ("x-leveret-queue", text(QUEUE)),
        ("x-leveret-exchange", or("x-leveret-exchange", text(delivery.exchange.as_str()))),
        ("x-leveret-routing-key", or("x-leveret-routing-key", text(delivery.routing_key.as_str()))),
        ("x-leveret-first-failure", or("x-leveret-first-failure", now.clone())),
        ("x-leveret-last-failure", now),
        ("x-leveret-error-kind", text(kind)),
        ("x-leveret-error", text(error)),
    ];
    with(headers, facts)
}

fn with<const N: usize>(mut headers: FieldTable, more: [(&str, AMQPValue); N]) -> FieldTable {
    for (name, value) in more {
        headers.insert(name.into(), value);
    }
    headers
}

/// Publishes a message elsewhere, and waits until it is in a queue.
async fn forward(
    channel: &Channel,
    delivery: &mut Delivery,
    exchange: ShortString,
    headers: FieldTable,
) -> Result<(), Failure> {
    let properties: BasicProperties = delivery.properties.clone().with_headers(headers);
    let key = delivery.routing_key.clone();
    let publish = channel.basic_publish(exchange, key, MANDATORY, &delivery.data, properties);
    match publish.await?.await? {
        Confirmation::Ack(None) => Ok(()),
        other => Err(format!("a message could not be moved: {other:?}").into()),
    }
}
