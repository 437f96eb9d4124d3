//! A connection whose other side is a script, over a pipe: no socket, so time can be paused.

// Each test file uses a part of this.
#![allow(dead_code, unreachable_pub)]

use leveret_amqp::{Connection, Error, Options};
use leveret_testkit::peer::Peer;
use leveret_wire::Table;
use leveret_wire::method::{basic, channel, confirm, connection};
use tokio::io::DuplexStream;

/// The broker's side.
pub type Broker = Peer<DuplexStream>;

/// What a pipe holds: enough that neither side waits for the other by accident.
const PIPE: usize = 4 * 1024 * 1024;

/// A connection over a pipe, before the handshake.
pub fn pipe(
    options: Options,
) -> (Broker, impl Future<Output = Result<Connection, Error>> + Send + 'static) {
    let (ours, theirs) = tokio::io::duplex(PIPE);
    (Peer::over(theirs), async move { Connection::open_over(ours, &options).await })
}

/// A connection after the handshake, with these limits.
pub async fn connected_with(options: Options, tune: connection::Tune) -> (Connection, Broker) {
    let (mut broker, connecting) = pipe(options);
    let (connection, _) =
        tokio::join!(connecting, broker.accept_connection_with(tune, Table::new()));
    (connection.unwrap(), broker)
}

/// A connection after the handshake, without heartbeats.
pub async fn connected() -> (Connection, Broker) {
    connected_with_channels(2047).await
}

/// The same with so many channels: where there are few, their numbers are soon used again.
pub async fn connected_with_channels(channel_max: u16) -> (Connection, Broker) {
    let tune = connection::Tune { channel_max, frame_max: 131_072, heartbeat: 0 };
    connected_with(Options::default(), tune).await
}

/// A channel with confirms.
pub async fn confirming(
    connection: &Connection,
    broker: &mut Broker,
) -> leveret_amqp::Channel<leveret_amqp::Confirm> {
    let channel = open_channel(connection, broker).await;
    let id = channel.id();
    let (channel, ()) = tokio::join!(channel.into_confirm(), async {
        broker.expect::<confirm::Select>(id).await;
        broker.send(id, &confirm::SelectOk {}).await;
    });
    channel.unwrap()
}

/// A plain channel.
pub async fn open_channel(connection: &Connection, broker: &mut Broker) -> leveret_amqp::Channel {
    let (channel, ()) = tokio::join!(connection.open_channel(), async {
        match broker.receive().await {
            leveret_testkit::peer::Received::Method(id, leveret_wire::Method::ChannelOpen(_)) => {
                broker.send(id, &channel::OpenOk {}).await;
            }
            other => panic!("awaited channel.open; instead came {other:?}"),
        }
    });
    channel.unwrap()
}

/// A consumer named `c` of the queue `q`.
pub async fn consuming<M>(
    channel: &leveret_amqp::Channel<M>,
    options: leveret_amqp::ConsumeOptions,
    broker: &mut Broker,
) -> leveret_amqp::Consumer {
    let options = leveret_amqp::ConsumeOptions { tag: "c".to_owned(), ..options };
    consuming_by_name(channel, options, broker).await
}

/// A consumer of the queue `q`.
pub async fn consuming_by_name<M>(
    channel: &leveret_amqp::Channel<M>,
    options: leveret_amqp::ConsumeOptions,
    broker: &mut Broker,
) -> leveret_amqp::Consumer {
    let id = channel.id();
    let auto_ack = options.auto_ack;
    let (consumer, ()) = tokio::join!(channel.consume("q", options), async {
        if !auto_ack {
            broker.expect::<basic::Qos>(id).await;
            broker.send(id, &basic::QosOk {}).await;
        }
        let consume = broker.expect::<basic::Consume<'_>>(id).await;
        broker.send(id, &basic::ConsumeOk { consumer_tag: consume.consumer_tag }).await;
    });
    consumer.unwrap()
}

/// Returns when the connection has dealt with everything that the broker sent before.
pub async fn barrier(connection: &Connection, broker: &mut Broker) {
    let (updated, ()) = tokio::join!(connection.update_secret(b"", "barrier"), async {
        broker.expect::<connection::UpdateSecret<'_>>(0).await;
        broker.send(0, &connection::UpdateSecretOk {}).await;
    });
    updated.unwrap();
}

/// What tests on a real RabbitMQ share.
pub mod rabbit {
    use std::task::Poll;

    use bytes::Bytes;
    use leveret_amqp::{
        Channel, Confirm, Connection, Consumer, Delivery, Error, Limits, Options, Publish,
        QueueOptions, Table, Value,
    };
    pub use leveret_testkit::SOON;
    use leveret_testkit::eventually;
    use leveret_testkit::rabbitmq::Vhost;
    use tokio::time::timeout;

    pub fn options(vhost: &Vhost) -> Options {
        Options::from_uri(&vhost.url()).unwrap()
    }

    pub async fn connect(vhost: &Vhost) -> Connection {
        Connection::open(&options(vhost)).await.unwrap()
    }

    pub async fn connect_with(vhost: &Vhost, change: impl FnOnce(&mut Limits)) -> Connection {
        let mut options = options(vhost);
        change(&mut options.limits);
        Connection::open(&options).await.unwrap()
    }

    /// A channel with confirms.
    pub async fn confirm_channel(connection: &Connection) -> Channel<Confirm> {
        connection.open_channel().await.unwrap().into_confirm().await.unwrap()
    }

    /// A connection, and a channel with confirms and an empty queue `q`.
    pub async fn with_queue(vhost: &Vhost) -> (Connection, Channel<Confirm>) {
        with_queue_and_channels(vhost, 0).await
    }

    /// The same with no more channels than this, so that their numbers are used again. 0 leaves it to the broker.
    pub async fn with_queue_and_channels(
        vhost: &Vhost,
        channel_max: u16,
    ) -> (Connection, Channel<Confirm>) {
        let mut options = options(vhost);
        options.channel_max = channel_max;
        let connection = Connection::open(&options).await.unwrap();
        let channel = confirm_channel(&connection).await;
        channel.declare_queue("q", QueueOptions::default()).await.unwrap();
        (connection, channel)
    }

    /// A mandatory message for a queue.
    pub fn to<'a>(queue: &'a str, body: impl Into<Bytes>) -> Publish<'a> {
        Publish { routing_key: queue, mandatory: true, body: body.into(), ..Publish::default() }
    }

    /// Puts the numbers from 0 on into a queue.
    pub async fn fill(channel: &Channel<Confirm>, queue: &str, count: u32) {
        for number in 0..count {
            drop(channel.publish(&to(queue, number.to_string())).await.unwrap());
        }
        channel.confirmed(SOON).await.unwrap();
    }

    /// The number in a message that [`fill`] sent.
    pub fn number(delivery: &Delivery) -> u32 {
        std::str::from_utf8(delivery.body()).unwrap().parse().unwrap()
    }

    pub async fn next(consumer: &mut Consumer) -> Delivery {
        let delivery = timeout(SOON, consumer.next()).await.expect("a delivery in time");
        delivery.expect("the consumer goes on").unwrap()
    }

    pub async fn take(consumer: &mut Consumer, count: usize) -> Vec<Delivery> {
        let mut deliveries = Vec::with_capacity(count);
        for _ in 0..count {
            deliveries.push(next(consumer).await);
        }
        deliveries
    }

    /// What ends a consumer, after the deliveries that it still had.
    pub async fn end_of(consumer: &mut Consumer) -> Option<Error> {
        loop {
            match timeout(SOON, consumer.next()).await.expect("an end in time") {
                Some(Ok(delivery)) => drop(delivery),
                Some(Err(error)) => return Some(error),
                None => return None,
            }
        }
    }

    /// Waits until a queue has so many messages ready and so many consumers.
    pub async fn until_queue_has<M>(
        channel: &Channel<M>,
        queue: &str,
        messages: u32,
        consumers: u32,
    ) {
        let what = format!("{messages} messages and {consumers} consumers in {queue}");
        eventually(SOON, what, async || {
            let found = channel.inspect_queue(queue).await.unwrap();
            let found = (found.messages, found.consumers);
            if found == (messages, consumers) { Ok(()) } else { Err(format!("{found:?}")) }
        })
        .await;
    }

    pub fn queue_with<'a>(
        arguments: impl IntoIterator<Item = (&'a str, Value<'a>)>,
    ) -> QueueOptions {
        let arguments = Table::from_pairs(arguments).unwrap().into_owned();
        QueueOptions { arguments, ..QueueOptions::default() }
    }

    /// Random numbers that a seed repeats (SplitMix64).
    #[derive(Clone, Debug)]
    pub struct Dice(u64);

    impl Dice {
        pub fn new(seed: u64) -> Dice {
            Dice(seed)
        }

        /// Those of `LEVERET_STRESS_SEED`, or new ones; either way the seed is printed.
        pub fn seeded() -> Dice {
            use std::hash::BuildHasher;
            let seed = match std::env::var("LEVERET_STRESS_SEED") {
                Ok(seed) => seed.parse().expect("LEVERET_STRESS_SEED is a number"),
                Err(_) => std::hash::RandomState::new().hash_one(0),
            };
            println!("LEVERET_STRESS_SEED={seed}");
            Dice(seed)
        }

        pub fn roll(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }

        /// One of `0..sides`.
        pub fn below(&mut self, sides: usize) -> usize {
            (self.roll() % sides as u64) as usize
        }

        /// True once in so many times.
        pub fn one_in(&mut self, times: usize) -> bool {
            self.below(times) == 0
        }
    }

    /// How often a future is polled that is not to be dropped.
    pub const TO_THE_END: usize = usize::MAX;

    /// Polls a future so many times and gives its output if it is ready by then; drops it otherwise.
    pub async fn polled<F: Future>(times: usize, future: F) -> Option<F::Output> {
        let mut future = std::pin::pin!(future);
        if times == TO_THE_END {
            return Some(future.await);
        }
        for _ in 0..times {
            let polled = std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context)));
            if let Poll::Ready(output) = polled.await {
                return Some(output);
            }
            // Others get a turn, so that something may have happened by the next time.
            tokio::task::yield_now().await;
        }
        None
    }
}
