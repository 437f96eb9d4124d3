//! What is done to a broker. Every message is accounted for, or the run has failed.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use leveret::amqp::{
    Confirmation, Connection, ConsumeOptions, DeleteQueue, ExchangeOptions, Options, Publish,
    QueueOptions, Table,
};

use crate::client::{Failure, expect};

/// The size of a body.
pub(super) const BODY: usize = 16;

/// How many publishes may be unconfirmed, and how many deliveries unacked.
const WINDOW: u16 = 1000;

/// A run takes seconds; one that takes this long hangs.
const PATIENCE: Duration = Duration::from_secs(120);

const QUEUE: &str = "bench";
const EXCHANGE: &str = "bench.topics";

/// How messages go through a queue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Flow {
    /// Published without confirms, consumed without acks.
    AutoAck,
    /// Both.
    Confirmed,
}

/// Where, and how many.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) url: String,
    pub(super) messages: u64,
}

async fn open(url: &str) -> Result<Connection, Failure> {
    Ok(Connection::open(&Options::from_uri(url)?).await?)
}

fn transient() -> QueueOptions {
    QueueOptions { durable: false, ..QueueOptions::default() }
}

/// Publishes and consumes at the same time, over two connections. Gives messages per second.
pub(super) async fn end_to_end(target: &Target, flow: Flow) -> Result<f64, Failure> {
    let consuming = open(&target.url).await?;
    let channel = consuming.open_channel().await?;
    // One that is exclusive may not be durable; and an earlier run must not be met.
    channel.delete_queue(QUEUE, DeleteQueue::default()).await?;
    channel.declare_queue(QUEUE, transient()).await?;
    let auto_ack = matches!(flow, Flow::AutoAck);
    let options = ConsumeOptions { auto_ack, prefetch: WINDOW, ..ConsumeOptions::default() };
    let mut consumer = channel.consume(QUEUE, options).await?;

    let began = Instant::now();
    let publisher = tokio::spawn(publish(target.clone(), flow));
    let messages = target.messages;
    let taking = async move {
        let mut taken = 0;
        while taken < messages {
            let Some(delivery) = consumer.next().await else { break };
            delivery?.ack()?;
            taken += 1;
        }
        Ok::<_, Failure>((taken, consumer))
    };
    let (taken, _consumer) = tokio::time::timeout(PATIENCE, taking).await??;
    let seconds = began.elapsed().as_secs_f64();
    expect("consumed", messages, taken)?;
    publisher.await??;
    channel.delete_queue(QUEUE, DeleteQueue::default()).await?;
    consuming.close().await?;
    Ok(messages as f64 / seconds)
}

async fn publish(target: Target, flow: Flow) -> Result<(), Failure> {
    let connection = open(&target.url).await?;
    let body = Bytes::from(vec![b'x'; BODY]);
    let publish = Publish { routing_key: QUEUE, body, ..Publish::default() };
    let channel = connection.open_channel().await?;
    match flow {
        Flow::AutoAck => {
            for _ in 0..target.messages {
                channel.publish(&publish).await?;
            }
        }
        Flow::Confirmed => {
            let channel = channel.into_confirm().await?;
            let mut window: VecDeque<Confirmation> = VecDeque::new();
            for _ in 0..target.messages {
                if window.len() == usize::from(WINDOW)
                    && let Some(oldest) = window.pop_front()
                {
                    let outcome = oldest.await;
                    expect("acked", 1, u64::from(outcome.is_acked()))?;
                }
                window.push_back(channel.publish(&publish).await?);
            }
            let tally = channel.confirmed(PATIENCE).await?;
            expect("confirmed", target.messages, tally.acked)?;
        }
    }
    connection.close().await?;
    Ok(())
}

/// Puts messages into a queue without a consumer.
pub(super) async fn fill(target: &Target) -> Result<(), Failure> {
    let connection = open(&target.url).await?;
    let channel = connection.open_channel().await?.into_confirm().await?;
    let before = channel.declare_queue(QUEUE, transient()).await?.messages;
    let body = Bytes::from(vec![b'x'; BODY]);
    let publish = Publish { routing_key: QUEUE, body, ..Publish::default() };
    for _ in 0..target.messages {
        drop(channel.publish(&publish).await?);
    }
    channel.confirmed(PATIENCE).await?;
    let now = channel.inspect_queue(QUEUE).await?.messages;
    expect("queued", target.messages, u64::from(now - before))?;
    connection.close().await?;
    Ok(())
}

/// Connections that do nothing.
pub(super) async fn connect(url: &str, count: u64) -> Result<Vec<Connection>, Failure> {
    let mut connections = Vec::new();
    for _ in 0..count {
        connections.push(open(url).await?);
    }
    Ok(connections)
}

/// A topic exchange with many bindings of which each message meets one, that leads nowhere near a queue's limit.
pub(super) struct Topics {
    connection: Connection,
    keys: Vec<String>,
}

impl Topics {
    pub(super) async fn bind(target: &Target, bindings: usize) -> Result<Self, Failure> {
        let connection = open(&target.url).await?;
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
        let keys = (0..10).map(|number| {
            let number = number * bindings / 10;
            format!("region{}.anything.kind{number}", number % 100)
        });
        Ok(Topics { keys: keys.collect(), connection })
    }

    pub(super) async fn publish(&self, target: &Target) -> Result<(), Failure> {
        let channel = self.connection.open_channel().await?.into_confirm().await?;
        let body = Bytes::from(vec![b'x'; BODY]);
        for key in self.keys.iter().cycle().take(target.messages as usize) {
            let publish = Publish {
                exchange: EXCHANGE,
                routing_key: key,
                body: body.clone(),
                ..Publish::default()
            };
            drop(channel.publish(&publish).await?);
        }
        let tally = channel.confirmed(PATIENCE).await?;
        expect("confirmed", target.messages, tally.acked)?;
        channel.close().await?;
        Ok(())
    }
}
