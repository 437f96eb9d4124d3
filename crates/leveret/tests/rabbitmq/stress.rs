//! Everything at once and in any order, on a real RabbitMQ, and then the books are audited.
//!
//! A run is repeated with `LEVERET_STRESS_SEED`, as far as the broker and the scheduler play along, and made longer with
//! `LEVERET_STRESS_SECONDS`.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::{
    Channel, Confirm, Confirmation, Connection, ConsumeOptions, Consumer, Delivery, Error,
    ErrorKind, GetOptions, Options, Outcome, QueueOptions, Refused, ReplyCode,
};
use leveret_testkit::proxy::{Cut, Direction};
use leveret_testkit::rabbitmq::{self, Vhost};
use leveret_testkit::{FaultProxy, eventually};
use tokio::time::{Instant, timeout};

use crate::support::rabbit::{Dice, SOON, TO_THE_END, connect, options, polled, queue_with, to};

const QUEUES: [&str; 3] = ["classic", "other", "quorum"];

/// How long a random run takes.
fn duration() -> Duration {
    let seconds = std::env::var("LEVERET_STRESS_SECONDS");
    let seconds = seconds.map_or(4, |text| text.parse().expect("a number of seconds"));
    Duration::from_secs(seconds)
}

async fn declare_queues(vhost: &Vhost) {
    let connection = connect(vhost).await;
    let channel = connection.open_channel().await.unwrap();
    channel.declare_queue("classic", QueueOptions::default()).await.unwrap();
    channel.declare_queue("other", QueueOptions::default()).await.unwrap();
    // Without a limit: here a message may well be refused a hundred times.
    let quorum =
        queue_with([("x-queue-type", "quorum".into()), ("x-delivery-limit", 1_000_000.into())]);
    channel.declare_queue("quorum", quorum).await.unwrap();
    connection.close().await.unwrap();
}

/// What is known of a message.
#[derive(Debug, Default)]
struct Entry {
    publish: Fate,
    delivered: u32,
    /// An ack, or a refusal for good, was sent for it.
    settled: u32,
    /// An ack of it was in a transaction of which nobody knows whether it was committed.
    is_in_doubt: bool,
}

impl Entry {
    /// Whether somebody has to have consumed it, and nobody has.
    fn is_missing(&self) -> bool {
        self.publish == Fate::Safe && self.settled == 0 && !self.is_in_doubt
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Fate {
    /// The broker may have it, or not.
    #[default]
    Unknown,
    /// It was never sent.
    Unsent,
    /// It was committed or acked.
    Safe,
}

/// Whether what was settled may come back. From a quorum queue it always may: of 40,000 acks that were followed by a
/// `channel.close`, RabbitMQ 4.3 lost 74, where classic queues lost none.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Network {
    Sound,
    /// An ack may be lost with its connection.
    Faulty,
}

/// All messages of a run.
#[derive(Debug)]
struct Books {
    network: Network,
    entries: Mutex<HashMap<u64, Entry>>,
}

impl Books {
    fn new(network: Network) -> Arc<Books> {
        Arc::new(Books { network, entries: Mutex::default() })
    }

    fn new_message(&self, fate: Fate) -> u64 {
        let mut entries = self.entries.lock().unwrap();
        let id = entries.len() as u64;
        entries.insert(id, Entry { publish: fate, ..Entry::default() });
        id
    }

    fn set_fate(&self, id: u64, fate: Fate) {
        self.entries.lock().unwrap().get_mut(&id).unwrap().publish = fate;
    }

    /// Notes a delivery and gives the message's number.
    fn delivered(&self, delivery: &Delivery) -> u64 {
        let id = u64::from_be_bytes(delivery.body()[..8].try_into().unwrap());
        let mut entries = self.entries.lock().unwrap();
        let entry = entries.get_mut(&id).unwrap_or_else(|| panic!("{id} was never published"));
        assert_ne!(entry.publish, Fate::Unsent, "{id} arrived, and its publish was abandoned");
        assert!(
            entry.delivered == 0 || delivery.redelivered(),
            "{id} came as new, again: {entry:?}"
        );
        if self.network == Network::Sound && delivery.routing_key() != "quorum" {
            assert_eq!(entry.settled, 0, "{id} came again after it was settled: {entry:?}");
        }
        entry.delivered += 1;
        id
    }

    fn settled(&self, id: u64) {
        self.entries.lock().unwrap().get_mut(&id).unwrap().settled += 1;
    }

    /// In a sound network, nothing ends but what a worker has ended: the broker has no reason to.
    fn channel_ended(&self, error: &Error) {
        let is_expected = matches!(
            error.kind(),
            ErrorKind::ChannelClosedHere
                | ErrorKind::ConnectionClosedHere
                | ErrorKind::ChannelClosed(ReplyCode::NOT_FOUND)
        );
        assert!(is_expected || self.network == Network::Faulty, "{error}");
    }

    fn doubt(&self, id: u64) {
        self.entries.lock().unwrap().get_mut(&id).unwrap().is_in_doubt = true;
    }

    /// Takes what is left in the queues until every message that is safe is consumed. A quorum queue may take its time to
    /// give back what gone consumers held.
    async fn audit(&self, vhost: &Vhost) {
        let connection = connect(vhost).await;
        let channel = connection.open_channel().await.unwrap();
        let mut consumers = Vec::new();
        for queue in QUEUES {
            consumers.push(channel.consume(queue, ConsumeOptions::default()).await.unwrap());
        }
        let until = Instant::now() + SOON * 2;
        while !(self.is_balanced() && are_empty(&channel).await) && Instant::now() < until {
            for consumer in &mut consumers {
                while let Ok(delivery) = timeout(Duration::from_millis(300), consumer.next()).await
                {
                    let delivery = delivery.unwrap().unwrap();
                    let id = self.delivered(&delivery);
                    delivery.ack().unwrap();
                    self.settled(id);
                }
            }
        }
        drop(consumers);
        for queue in QUEUES {
            eventually(SOON, format!("nothing in {queue}"), async || {
                self.drain(&channel, queue).await;
                let found = channel.inspect_queue(queue).await.unwrap();
                let found = (found.messages, found.consumers);
                if found == (0, 0) { Ok(()) } else { Err(format!("{found:?}")) }
            })
            .await;
        }
        connection.close().await.unwrap();
        let entries = self.entries.lock().unwrap();
        let (mut safe, mut redelivered) = (0, 0);
        for (id, entry) in entries.iter() {
            safe += u32::from(entry.publish == Fate::Safe);
            redelivered += u32::from(entry.delivered > 1);
            assert!(!entry.is_missing(), "{id} is lost: {entry:?}");
        }
        println!("{} messages, {safe} safe, {redelivered} redelivered", entries.len());
        assert!(safe > 100, "too little was done: {safe} messages");
    }

    /// Takes what a gone consumer has given back when all seemed to be done.
    async fn drain(&self, channel: &Channel, queue: &str) {
        while let Some(delivery) = channel.get(queue, GetOptions::default()).await.unwrap() {
            let id = self.delivered(&delivery);
            delivery.ack().unwrap();
            self.settled(id);
        }
    }

    fn is_balanced(&self) -> bool {
        let entries = self.entries.lock().unwrap();
        !entries.values().any(Entry::is_missing)
    }
}

async fn are_empty(channel: &Channel) -> bool {
    for queue in QUEUES {
        if channel.inspect_queue(queue).await.unwrap().messages > 0 {
            return false;
        }
    }
    true
}

/// Connections that several workers share, each replaced when it is gone.
#[derive(Debug)]
struct Connections {
    options: Options,
    open: Vec<tokio::sync::Mutex<Option<Connection>>>,
}

impl Connections {
    fn new(options: Options, count: usize) -> Arc<Connections> {
        let open = (0..count).map(|_| tokio::sync::Mutex::new(None)).collect();
        Arc::new(Connections { options, open })
    }

    async fn channel(&self, place: usize) -> Option<Channel> {
        let mut open = self.open[place].lock().await;
        if let Some(connection) = &*open
            && let Ok(channel) = connection.open_channel().await
        {
            return Some(channel);
        }
        // By hand, for as long as it takes; the deadline of the run is over all.
        let connection = Connection::open(&self.options).await.ok()?;
        *open = Some(connection.clone());
        drop(open);
        connection.open_channel().await.ok()
    }

    /// Closes one, or lets go of it, while others work on it.
    async fn end(&self, place: usize, dice: &mut Dice) {
        let connection = self.open[place].lock().await.take();
        if let Some(connection) = connection
            && dice.one_in(2)
        {
            connection.close().await.unwrap();
        }
    }

    async fn close(&self) {
        for place in &self.open {
            if let Some(connection) = place.lock().await.take() {
                connection.close().await.unwrap();
            }
        }
    }
}

/// One of many that work at random.
struct Worker {
    dice: Dice,
    books: Arc<Books>,
    connections: Arc<Connections>,
    place: usize,
    channel: Option<Channel<Confirm>>,
    consumers: Vec<Consumer>,
    held: Vec<(u64, Delivery)>,
    confirmations: Vec<(u64, Confirmation)>,
}

impl Worker {
    fn new(dice: &mut Dice, books: &Arc<Books>, connections: &Arc<Connections>) -> Worker {
        Worker {
            dice: Dice::new(dice.roll()),
            books: Arc::clone(books),
            connections: Arc::clone(connections),
            place: dice.below(connections.open.len()),
            channel: None,
            consumers: Vec::new(),
            held: Vec::new(),
            confirmations: Vec::new(),
        }
    }

    async fn work(mut self, until: Instant) {
        while Instant::now() < until {
            let roll = self.dice.below(100);
            let step = timeout(SOON, self.step(roll)).await;
            step.unwrap_or_else(|_| panic!("step {roll} hangs"));
        }
        self.resolve(usize::MAX).await;
        // Everything else is just dropped.
    }

    async fn step(&mut self, roll: usize) {
        let open = self.channel.as_ref().map(Channel::check_open);
        if !matches!(open, Some(Ok(()))) {
            if let Some(Err(error)) = open {
                self.books.channel_ended(&error);
            }
            self.reopen().await;
            return;
        }
        match roll {
            0..30 => self.publish().await,
            30..60 => self.take().await,
            60..75 => self.settle(),
            75..82 => self.resolve(self.dice.clone().below(50)).await,
            82..86 => self.consume().await,
            86..88 => self.end_consumer().await,
            88..91 => self.get().await,
            91..93 => self.abandon().await,
            93..95 => self.recover().await,
            95..97 => self.transact().await,
            97 => self.fail().await,
            98 => self.close().await,
            _ if self.dice.one_in(5) => self.connections.end(self.place, &mut self.dice).await,
            _ => {}
        }
    }

    fn queue(&mut self) -> &'static str {
        QUEUES[self.dice.below(QUEUES.len())]
    }

    fn channel(&self) -> &Channel<Confirm> {
        self.channel.as_ref().expect("a step begins with a channel")
    }

    async fn reopen(&mut self) {
        // Consumers and deliveries of before are of no use, and what waits for confirms must be told.
        self.resolve(usize::MAX).await;
        self.consumers.clear();
        self.held.clear();
        self.channel = None;
        if let Some(channel) = self.connections.channel(self.place).await {
            self.channel = channel.into_confirm().await.ok();
        }
    }

    fn body(&mut self, id: u64) -> Vec<u8> {
        let mut body = id.to_be_bytes().to_vec();
        if self.dice.one_in(50) {
            body.resize(self.dice.below(300_000) + 8, 0);
        }
        body
    }

    async fn publish(&mut self) {
        for _ in 0..self.dice.below(30) {
            let id = self.books.new_message(Fate::Unknown);
            let queue = self.queue();
            let message = to(queue, self.body(id));
            let patience = if self.dice.one_in(4) { 1 } else { TO_THE_END };
            match polled(patience, self.channel().publish(&message)).await {
                Some(Ok(confirmation)) => self.confirmations.push((id, confirmation)),
                Some(Err(_)) => return self.books.set_fate(id, Fate::Unsent),
                None => self.books.set_fate(id, Fate::Unsent),
            }
        }
    }

    /// Awaits some confirmations, and forgets a few.
    async fn resolve(&mut self, count: usize) {
        let count = count.min(self.confirmations.len());
        for (id, confirmation) in self.confirmations.drain(..count) {
            if self.dice.one_in(20) {
                continue;
            }
            let outcome = timeout(SOON, confirmation).await.expect("an outcome for every publish");
            match outcome {
                Outcome::Acked => self.books.set_fate(id, Fate::Safe),
                Outcome::Lost(_) => {}
                other => panic!("{id}: {other:?}"),
            }
        }
    }

    async fn consume(&mut self) {
        if self.consumers.len() >= 4 {
            return;
        }
        let options = ConsumeOptions {
            prefetch: [0, 1, 10, 100][self.dice.below(4)],
            priority: self.dice.below(3) as i32,
            ..ConsumeOptions::default()
        };
        let queue = self.queue();
        if let Ok(consumer) = self.channel().consume(queue, options).await {
            self.consumers.push(consumer);
        }
    }

    async fn take(&mut self) {
        if self.consumers.is_empty() {
            return;
        }
        let place = self.dice.below(self.consumers.len());
        for _ in 0..self.dice.below(40) {
            let patience = 1 + self.dice.below(20);
            match polled(patience, self.consumers[place].next()).await {
                Some(Some(Ok(delivery))) => {
                    let id = self.books.delivered(&delivery);
                    self.held.push((id, delivery));
                }
                Some(Some(Err(_)) | None) => {
                    self.consumers.swap_remove(place);
                    return;
                }
                None => return,
            }
        }
    }

    fn settle(&mut self) {
        for _ in 0..self.dice.below(60) {
            if self.held.is_empty() {
                return;
            }
            // Mostly in order.
            let place = if self.dice.one_in(3) { self.dice.below(self.held.len()) } else { 0 };
            let (id, delivery) = self.held.remove(place);
            match self.dice.below(20) {
                0 => drop(delivery),
                1 => drop(delivery.nack(Refused::Requeue)),
                2 => drop(delivery.reject(Refused::Requeue)),
                3 => {
                    if delivery.nack(Refused::Discard).is_ok() {
                        self.books.settled(id);
                    }
                }
                4 => self.settle_all_before(id, delivery),
                _ => {
                    if delivery.ack().is_ok() {
                        self.books.settled(id);
                    }
                }
            }
        }
    }

    /// Those before it are settled with it, so all of them have to be known: none may wait in a consumer.
    fn settle_all_before(&mut self, id: u64, delivery: Delivery) {
        if !self.consumers.is_empty() {
            return;
        }
        let tag = delivery.delivery_tag();
        if delivery.ack_all_before().is_ok() {
            self.books.settled(id);
            for (id, before) in self.held.extract_if(.., |(_, other)| other.delivery_tag() < tag) {
                self.books.settled(id);
                // It does no harm.
                drop(before);
            }
        }
    }

    async fn end_consumer(&mut self) {
        if self.consumers.is_empty() {
            return;
        }
        let place = self.dice.below(self.consumers.len());
        let mut consumer = self.consumers.swap_remove(place);
        match self.dice.below(4) {
            0 => drop(consumer),
            1 => drop(polled(self.dice.below(4), consumer.cancel()).await),
            2 => self.consumers.clear(),
            _ => {
                if consumer.cancel().await.is_ok() {
                    while let Some(Ok(delivery)) = consumer.next().await {
                        let id = self.books.delivered(&delivery);
                        self.held.push((id, delivery));
                    }
                }
            }
        }
    }

    async fn get(&mut self) {
        let queue = self.queue();
        let patience = if self.dice.one_in(2) { self.dice.below(4) } else { TO_THE_END };
        let got = polled(patience, self.channel().get(queue, GetOptions::default())).await;
        if let Some(Ok(Some(delivery))) = got {
            let id = self.books.delivered(&delivery);
            self.held.push((id, delivery));
        }
    }

    /// Calls that nobody waits for to the end.
    async fn abandon(&mut self) {
        let (queue, times) = (self.queue(), self.dice.below(4));
        let channel = self.channel();
        match times {
            0 => drop(polled(1, channel.inspect_queue(queue)).await),
            1 => drop(polled(2, channel.consume(queue, ConsumeOptions::default())).await),
            2 => drop(polled(1, channel.confirmed(SOON)).await),
            _ => {
                let place = self.place;
                drop(polled(3, self.connections.channel(place)).await);
            }
        }
    }

    async fn recover(&mut self) {
        match self.dice.below(3) {
            0 => drop(polled(1, self.channel().recover()).await),
            1 => drop(polled(TO_THE_END, self.channel().recover()).await),
            _ => drop(self.channel().recover_async().await),
        }
        // What came before is of no use, and what waits in the consumers may be either.
        self.held.clear();
        self.consumers.clear();
    }

    /// Publishes and acks on a channel with transactions.
    async fn transact(&mut self) {
        let queue = self.queue();
        let Some(channel) = self.connections.channel(self.place).await else { return };
        let Ok(channel) = channel.into_tx().await else { return };
        let (mut published, mut acked) = (Vec::new(), Vec::new());
        for _ in 0..self.dice.below(5) {
            let id = self.books.new_message(Fate::Unknown);
            if channel.publish(&to(queue, self.body(id))).await.is_ok() {
                published.push(id);
            }
        }
        if let Ok(Some(delivery)) = channel.get(queue, GetOptions::default()).await {
            let id = self.books.delivered(&delivery);
            if delivery.ack().is_ok() {
                acked.push(id);
            }
        }
        // An ack counts from here on: the commit may succeed without our knowing.
        if self.dice.one_in(2) {
            if channel.commit().await.is_ok() {
                published.iter().for_each(|id| self.books.set_fate(*id, Fate::Safe));
                acked.iter().for_each(|id| self.books.settled(*id));
            } else if !acked.is_empty() || !published.is_empty() {
                // With a lost connection, sending fails a moment before the channels do.
                let ended = timeout(SOON, channel.ended()).await;
                ended.expect("a commit fails only with its channel");
                // Whether it happened is not known: such a message is nobody's loss.
                acked.iter().for_each(|id| self.books.doubt(*id));
            }
        } else if channel.rollback().await.is_ok() {
            published.iter().for_each(|id| self.books.set_fate(*id, Fate::Unsent));
        }
    }

    /// Has the broker close the channel.
    async fn fail(&mut self) {
        let error = self.channel().inspect_queue("missing").await.unwrap_err();
        assert_ne!(error.kind(), ErrorKind::Timeout, "{error}");
    }

    async fn close(&mut self) {
        let channel = self.channel.take().expect("a step begins with a channel");
        match self.dice.below(3) {
            0 => drop(channel),
            1 => drop(polled(self.dice.below(3), channel.close()).await),
            _ => drop(channel.close().await),
        }
    }
}

/// Lets workers loose, and says when all of them are done.
async fn let_loose(
    dice: &mut Dice,
    books: &Arc<Books>,
    connections: &Arc<Connections>,
) -> tokio::task::JoinSet<()> {
    let until = Instant::now() + duration();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        workers.spawn(Worker::new(dice, books, connections).work(until));
    }
    workers
}

async fn until_all_is_closed(vhost: &Vhost) {
    eventually(SOON, "no connections", async || match vhost.connections().await {
        Ok(connections) if connections.is_empty() => Ok(()),
        Ok(connections) => Err(format!("{} are left", connections.len())),
        Err(error) => Err(error.to_string()),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_done_at_random_nothing_is_lost_or_doubled_or_hangs() {
    let vhost = rabbitmq::vhost().await;
    declare_queues(&vhost).await;
    let mut dice = Dice::seeded();
    let books = Books::new(Network::Sound);
    let connections = Connections::new(options(&vhost), 1 + dice.below(3));
    let workers = let_loose(&mut dice, &books, &connections).await;
    timeout(duration() + SOON * 2, workers.join_all()).await.expect("nobody hangs");
    connections.close().await;
    until_all_is_closed(&vhost).await;
    books.audit(&vhost).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_the_network_does_nothing_that_was_acked_is_lost() {
    let vhost = rabbitmq::vhost().await;
    declare_queues(&vhost).await;
    let proxy = FaultProxy::to(vhost.broker().addr()).await;
    let mut dice = Dice::seeded();
    let books = Books::new(Network::Faulty);
    let mut options = Options::from_uri(&proxy.url(&vhost.url())).unwrap();
    options.heartbeat = Some(Duration::from_secs(2));
    let connections = Connections::new(options, 3);
    let workers = let_loose(&mut dice, &books, &connections).await;
    let ruin = async {
        let mut switch = tokio::time::interval(Duration::from_millis(60));
        let until = Instant::now() + duration();
        while Instant::now() < until {
            switch.tick().await;
            let way = [Direction::ToServer, Direction::ToClient][dice.below(2)];
            match dice.below(12) {
                0 => proxy.cut(Cut::Finish),
                1 => proxy.cut(Cut::Reset),
                2..4 => proxy.stall(way),
                4..6 => proxy.delay(way, Duration::from_millis(dice.below(20) as u64)),
                6..8 => proxy.split(way, NonZeroUsize::new(1 + dice.below(1000)).unwrap()),
                _ => proxy.heal().await,
            }
        }
        proxy.heal().await;
    };
    ruin.await;
    timeout(SOON * 2, workers.join_all()).await.expect("nobody hangs");
    connections.close().await;
    drop(proxy);
    until_all_is_closed(&vhost).await;
    books.audit(&vhost).await;
}
