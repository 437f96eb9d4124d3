//! What is done to a broker. Every message is accounted for, or the run has failed.

use std::time::{Duration, Instant};

use bytes::Bytes;
use leveret::amqp::{
    Connection, ConsumeOptions, DeleteQueue, ExchangeOptions, Options, Outcome, Publish,
    QueueOptions, Table,
};

use super::EmbeddedBroker;
use crate::client::pipelined;
use crate::meter::{Failure, Measured, expect};

/// The size of a body.
const BODY: usize = 16;

/// How many publishes may be unconfirmed, and how many deliveries unacked.
const WINDOW: u16 = 1000;

/// How long the broker may take to confirm what was published.
const DEADLINE: Duration = Duration::from_secs(120);

const QUEUE: &str = "bench";
const EXCHANGE: &str = "bench.topics";

/// Where messages go, and how many.
#[derive(Clone)]
pub(super) struct Load {
    pub(super) url: String,
    pub(super) messages: u64,
}

async fn open(url: &str) -> Result<Connection, Failure> {
    Ok(Connection::open(&Options::from_uri(url)?).await?)
}

fn transient() -> QueueOptions {
    QueueOptions { durable: false, ..QueueOptions::default() }
}

/// Publishes and consumes at the same time, over two connections, without confirms and acks or with both.
pub(super) async fn end_to_end(
    load: &Load,
    auto_ack: bool,
    broker: &EmbeddedBroker,
) -> Result<Measured, Failure> {
    let cpu = broker.cpu_time()?;
    let consuming = open(&load.url).await?;
    let channel = consuming.open_channel().await?;
    // One that is exclusive may not be durable; and an earlier run must not be met.
    channel.delete_queue(QUEUE, DeleteQueue::default()).await?;
    channel.declare_queue(QUEUE, transient()).await?;
    let options = ConsumeOptions { auto_ack, prefetch: WINDOW, ..ConsumeOptions::default() };
    let mut consumer = channel.consume(QUEUE, options).await?;

    let began = Instant::now();
    let publisher = tokio::spawn(publish(load.clone(), auto_ack));
    let messages = load.messages;
    for _ in 0..messages {
        consumer.next().await.ok_or("the consumer ended")??.ack()?;
    }
    let wall_ns = began.elapsed().as_nanos() as u64;
    publisher.await??;
    channel.delete_queue(QUEUE, DeleteQueue::default()).await?;
    consuming.close().await?;
    let broker_cpu_ns = Some((broker.cpu_time()? - cpu).as_nanos() as u64);
    Ok(Measured { messages, wall_ns, broker_cpu_ns, ..Measured::default() })
}

async fn publish(load: Load, auto_ack: bool) -> Result<(), Failure> {
    let connection = open(&load.url).await?;
    let body = Bytes::from(vec![b'x'; BODY]);
    let publish = Publish { routing_key: QUEUE, body, ..Publish::default() };
    let channel = connection.open_channel().await?;
    if auto_ack {
        for _ in 0..load.messages {
            channel.publish(&publish).await?;
        }
    } else {
        let channel = channel.into_confirm().await?;
        let publish = |_| channel.publish(&publish);
        let acked = |_, outcome: Outcome| expect("acked", 1, u64::from(outcome.is_acked()));
        pipelined(load.messages, WINDOW.into(), publish, acked).await?;
    }
    connection.close().await?;
    Ok(())
}

/// What messages in a queue cost beside their bodies.
pub(super) async fn backlog(load: &Load, broker: &EmbeddedBroker) -> Result<Measured, Failure> {
    fill(&Load { messages: 1000, ..load.clone() }).await?;
    let before = broker.memory()?;
    fill(load).await?;
    let bodies = load.messages * BODY as u64;
    let broker_bytes = Some(broker.memory()?.saturating_sub(before + bodies));
    Ok(Measured { messages: load.messages, broker_bytes, ..Measured::default() })
}

/// Puts messages into a queue without a consumer.
async fn fill(load: &Load) -> Result<(), Failure> {
    let connection = open(&load.url).await?;
    let channel = connection.open_channel().await?.into_confirm().await?;
    let before = channel.declare_queue(QUEUE, transient()).await?.messages;
    let body = Bytes::from(vec![b'x'; BODY]);
    let publish = Publish { routing_key: QUEUE, body, ..Publish::default() };
    for _ in 0..load.messages {
        drop(channel.publish(&publish).await?);
    }
    channel.confirmed(DEADLINE).await?;
    let now = channel.inspect_queue(QUEUE).await?.messages;
    expect("queued", load.messages, u64::from(now - before))?;
    connection.close().await?;
    Ok(())
}

/// What connections cost that do nothing.
pub(super) async fn idle_connections(
    load: &Load,
    broker: &EmbeddedBroker,
) -> Result<Measured, Failure> {
    let _warm = connect(&load.url, 10).await?;
    let before = broker.memory()?;
    let _idle = connect(&load.url, load.messages).await?;
    // They have been served once they are open; what the broker frees after that takes a moment.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let broker_bytes = Some(broker.memory()?.saturating_sub(before));
    Ok(Measured { messages: load.messages, broker_bytes, ..Measured::default() })
}

async fn connect(url: &str, count: u64) -> Result<Vec<Connection>, Failure> {
    let mut connections = Vec::new();
    for _ in 0..count {
        connections.push(open(url).await?);
    }
    Ok(connections)
}

/// Publishes to a topic exchange with many bindings, of which each message meets one, that leads nowhere near a queue's limit.
pub(super) async fn topics(
    load: &Load,
    bindings: usize,
    broker: &EmbeddedBroker,
) -> Result<Measured, Failure> {
    let connection = open(&load.url).await?;
    let channel = connection.open_channel().await?;
    channel.declare_exchange(EXCHANGE, "topic", ExchangeOptions::default()).await?;
    let mut arguments = Table::new();
    arguments.insert("x-max-length", 1)?;
    channel.declare_queue(QUEUE, QueueOptions { arguments, ..transient() }).await?;
    for number in 0..bindings {
        let pattern = format!("region{}.*.kind{number}", number % 100);
        channel.bind_queue(QUEUE, EXCHANGE, &pattern, &Table::new()).await?;
    }
    // The same number of different keys, however many bindings there are: only the bindings make the difference.
    let numbers = (0..10).map(|number| number * bindings / 10);
    let keys = numbers.map(|number| format!("region{}.anything.kind{number}", number % 100));
    let keys: Vec<String> = keys.collect();

    let (cpu, messages) = (broker.cpu_time()?, load.messages);
    let channel = channel.into_confirm().await?;
    let body = Bytes::from(vec![b'x'; BODY]);
    for routing_key in keys.iter().cycle().take(messages as usize) {
        let body = body.clone();
        let publish = Publish { exchange: EXCHANGE, routing_key, body, ..Publish::default() };
        drop(channel.publish(&publish).await?);
    }
    let tally = channel.confirmed(DEADLINE).await?;
    expect("confirmed", messages, tally.acked)?;
    connection.close().await?;
    let broker_cpu_ns = Some((broker.cpu_time()? - cpu).as_nanos() as u64);
    Ok(Measured { messages, broker_cpu_ns, ..Measured::default() })
}
