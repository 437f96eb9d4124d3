//! What is done to a broker. Every message is accounted for, or the run has failed.

use std::time::{Duration, Instant};

use leveret::amqp::{
    Channel, Connection, ConsumeOptions, DeleteQueue, ExchangeOptions, Outcome, Plain, Publish,
    QueueOptions, Table,
};

use super::EmbeddedBroker;
use crate::client::pipelined;
use crate::message::filler;
use crate::meter::{Failure, Measured, expect};
use crate::rabbitmq::{connect, publish_all, transient};

/// The size of a body.
const BODY: usize = 16;

/// How many publishes may be unconfirmed, and how many deliveries unacked.
const WINDOW: u16 = 1000;

const QUEUE: &str = "bench";
const EXCHANGE: &str = "bench.topics";

fn message() -> Publish<'static> {
    Publish { routing_key: QUEUE, body: filler(BODY), ..Publish::default() }
}

/// Publishes and consumes at the same time, over two connections, without confirms and acks or with both.
pub(super) async fn end_to_end(
    url: String,
    messages: u64,
    auto_ack: bool,
    broker: &EmbeddedBroker,
) -> Result<Measured, Failure> {
    let cpu = broker.cpu_time()?;
    let consuming = connect(&url).await?;
    let channel = consuming.open_channel().await?;
    // One that is exclusive may not be durable; and an earlier run must not be met.
    channel.delete_queue(QUEUE, DeleteQueue::default()).await?;
    channel.declare_queue(QUEUE, transient()).await?;
    let options = ConsumeOptions { auto_ack, prefetch: WINDOW, ..ConsumeOptions::default() };
    let mut consumer = channel.consume(QUEUE, options).await?;

    let began = Instant::now();
    let publisher = tokio::spawn(publish(url, messages, auto_ack));
    for _ in 0..messages {
        consumer.next().await.ok_or("the consumer ended")??.ack()?;
    }
    let wall_ns = began.elapsed().as_nanos() as u64;
    publisher.await??;
    channel.delete_queue(QUEUE, DeleteQueue::default()).await?;
    consuming.close().await?;
    Ok(Measured { wall_ns, ..broker_cpu(messages, cpu, broker)? })
}

async fn publish(url: String, messages: u64, auto_ack: bool) -> Result<(), Failure> {
    let connection = connect(&url).await?;
    let channel = connection.open_channel().await?;
    let message = message();
    if auto_ack {
        for _ in 0..messages {
            channel.publish(&message).await?;
        }
    } else {
        let channel = channel.into_confirm().await?;
        let publish = |_| channel.publish(&message);
        let is_acked = |_, outcome: Outcome| Ok(outcome.is_acked());
        let acked = pipelined(messages, WINDOW.into(), publish, is_acked).await?;
        expect("were confirmed", messages, acked)?;
    }
    Ok(connection.close().await?)
}

fn broker_cpu(
    messages: u64,
    before: Duration,
    broker: &EmbeddedBroker,
) -> Result<Measured, Failure> {
    let server_cpu_ns = Some((broker.cpu_time()? - before).as_nanos() as u64);
    Ok(Measured { messages, server_cpu_ns, ..Measured::default() })
}

/// What messages in a queue cost beside their bodies.
pub(super) async fn backlog(
    url: &str,
    messages: u64,
    broker: &EmbeddedBroker,
) -> Result<Measured, Failure> {
    let connection = connect(url).await?;
    let channel = connection.open_channel().await?;
    channel.declare_queue(QUEUE, transient()).await?;
    fill(&connection, &channel, 1000).await?;
    let before = broker.memory()?;
    fill(&connection, &channel, messages).await?;
    let bodies = messages * BODY as u64;
    let held_bytes = Some(broker.memory()?.saturating_sub(before + bodies));
    Ok(Measured { messages, held_bytes, ..Measured::default() })
}

/// Puts messages into a queue without a consumer.
async fn fill(
    connection: &Connection,
    inspecting: &Channel<Plain>,
    messages: u64,
) -> Result<(), Failure> {
    let before = inspecting.inspect_queue(QUEUE).await?.messages;
    let channel = connection.open_channel().await?.into_confirm().await?;
    let message = message();
    publish_all(&channel, (0..messages).map(|_| message.clone())).await?;
    channel.close().await?;
    let now = inspecting.inspect_queue(QUEUE).await?.messages;
    expect("were queued", messages, u64::from(now - before))
}

/// What connections cost that do nothing.
pub(super) async fn idle_connections(
    url: &str,
    connections: u64,
    broker: &EmbeddedBroker,
) -> Result<Measured, Failure> {
    let _warm = connect_all(url, 10).await?;
    let before = broker.memory()?;
    let _idle = connect_all(url, connections).await?;
    // They have been served once they are open; what the broker frees after that takes a moment.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let held_bytes = Some(broker.memory()?.saturating_sub(before));
    Ok(Measured { messages: connections, held_bytes, ..Measured::default() })
}

async fn connect_all(url: &str, count: u64) -> Result<Vec<Connection>, Failure> {
    let mut connections = Vec::new();
    for _ in 0..count {
        connections.push(connect(url).await?);
    }
    Ok(connections)
}

/// Publishes to a topic exchange with many bindings, of which each message meets one, that leads nowhere near a queue's limit.
pub(super) async fn topics(
    url: &str,
    messages: u64,
    bindings: usize,
    broker: &EmbeddedBroker,
) -> Result<Measured, Failure> {
    let connection = connect(url).await?;
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

    let cpu = broker.cpu_time()?;
    let channel = channel.into_confirm().await?;
    let message = message();
    let publishes = keys.iter().cycle().take(messages as usize).map(|routing_key| Publish {
        exchange: EXCHANGE,
        routing_key,
        ..message.clone()
    });
    publish_all(&channel, publishes).await?;
    connection.close().await?;
    broker_cpu(messages, cpu, broker)
}
