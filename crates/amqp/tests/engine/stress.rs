//! Many tasks on several threads against a broker that plays along, answers in any order it may, and keeps books.
//!
//! A real broker is slow enough to hide races. This one is not, and knows at once when something is settled twice, sent
//! on a channel that is closed, or told apart wrongly.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use leveret_amqp::{
    Channel, ConsumeOptions, Consumer, Error, ErrorKind, Outcome, Publish, QueueOptions, Refused,
};
use leveret_testkit::eventually;
use leveret_testkit::peer::Received;
use leveret_wire::method::{basic, channel, confirm, connection, queue};
use leveret_wire::{Content, Method, ReplyCode, ShortStr};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::support::rabbit::{Dice, polled};
use crate::support::{Broker, connected, connected_with_channels, consuming, open_channel};

/// How long anything may take before it counts as hanging.
const SOON: Duration = Duration::from_secs(60);

/// A broker without queues. What is published it answers as the body wants it, and consumers get as many messages as
/// they may have.
struct NullBroker {
    peer: Broker,
    dice: Dice,
    channels: HashMap<u16, Lane>,
    /// How many deliveries were settled for good.
    settled: u64,
}

/// One channel.
#[derive(Default)]
struct Lane {
    published: u64,
    /// Publishes without an answer, and which it will be.
    unanswered: BTreeMap<u64, bool>,
    consumers: Vec<(ShortStr<'static>, u16)>,
    prefetch: u16,
    last_tag: u64,
    /// Which consumer has which delivery.
    unsettled: BTreeMap<u64, ShortStr<'static>>,
}

impl NullBroker {
    fn new(peer: Broker, dice: Dice) -> NullBroker {
        NullBroker { peer, dice, channels: HashMap::new(), settled: 0 }
    }

    /// Runs until the connection is closed, and says how many deliveries were settled for good.
    async fn run(mut self) -> u64 {
        loop {
            match self.peer.receive().await {
                Received::Method(0, Method::ConnectionClose(_)) => {
                    self.peer.send(0, &connection::CloseOk {}).await;
                    return self.settled;
                }
                Received::Method(0, Method::ConnectionUpdateSecret(_)) => {
                    self.peer.send(0, &connection::UpdateSecretOk {}).await;
                }
                Received::Method(id, method) => self.method(id, method).await,
                Received::Content(id, content) => self.published(id, *content).await,
                Received::Heartbeat => {}
                Received::End => panic!("the client hung up"),
            }
            self.answer_some().await;
            self.deliver_some().await;
        }
    }

    fn lane(&mut self, id: u16) -> &mut Lane {
        self.channels.get_mut(&id).unwrap_or_else(|| panic!("a frame for channel {id}"))
    }

    async fn method(&mut self, id: u16, method: Method<'static>) {
        match method {
            Method::ChannelOpen(_) => {
                assert!(self.channels.insert(id, Lane::default()).is_none(), "{id} is open");
                self.peer.send(id, &channel::OpenOk {}).await;
            }
            Method::ChannelClose(_) => {
                self.channels.remove(&id).unwrap_or_else(|| panic!("{id} is not open"));
                self.peer.send(id, &channel::CloseOk {}).await;
            }
            Method::ConfirmSelect(_) => self.peer.send(id, &confirm::SelectOk {}).await,
            Method::BasicQos(qos) => {
                self.lane(id).prefetch = qos.prefetch_count;
                self.peer.send(id, &basic::QosOk {}).await;
            }
            Method::BasicConsume(consume) => {
                let lane = self.lane(id);
                lane.consumers.push((consume.consumer_tag.clone(), lane.prefetch));
                let consumer_tag = consume.consumer_tag;
                self.peer.send(id, &basic::ConsumeOk { consumer_tag }).await;
            }
            Method::BasicCancel(cancel) => {
                let consumers = &mut self.lane(id).consumers;
                consumers.retain(|(tag, _)| *tag != cancel.consumer_tag);
                let consumer_tag = cancel.consumer_tag;
                self.peer.send(id, &basic::CancelOk { consumer_tag }).await;
            }
            Method::QueueDeclare(declare) => {
                self.lane(id);
                let ok = queue::DeclareOk { queue: declare.queue, ..Default::default() };
                self.peer.send(id, &ok).await;
            }
            Method::BasicAck(ack) => {
                self.settled += self.settle(id, ack.delivery_tag, ack.multiple);
            }
            Method::BasicNack(nack) => {
                self.settle(id, nack.delivery_tag, nack.multiple);
            }
            Method::BasicReject(reject) => {
                self.settle(id, reject.delivery_tag, false);
            }
            other => panic!("on channel {id}: {other:?}"),
        }
    }

    /// RabbitMQ closes the channel on a tag that it does not know, and takes 0 for all.
    fn settle(&mut self, id: u16, tag: u64, multiple: bool) -> u64 {
        let lane = self.lane(id);
        if tag == 0 && multiple {
            return std::mem::take(&mut lane.unsettled).len() as u64;
        }
        assert!(lane.unsettled.remove(&tag).is_some(), "unknown delivery tag {tag} on {id}");
        if !multiple {
            return 1;
        }
        let after = lane.unsettled.split_off(&tag);
        1 + std::mem::replace(&mut lane.unsettled, after).len() as u64
    }

    /// The body says what becomes of it: `a`cked, `n`acked, or `r`eturned, which goes before the ack.
    async fn published(&mut self, id: u16, content: Content<Method<'static>>) {
        let Method::BasicPublish(publish) = content.method else { panic!("{:?}", content.method) };
        let wish = content.body[0];
        let lane = self.lane(id);
        lane.published += 1;
        lane.unanswered.insert(lane.published, wish != b'n');
        if wish == b'r' {
            let returned = basic::Return {
                reply_code: ReplyCode::NO_ROUTE,
                reply_text: ShortStr::from_static("NO_ROUTE"),
                exchange: publish.exchange,
                routing_key: publish.routing_key,
            };
            self.peer.send_content(id, &returned, &content.properties, content.body).await;
        }
    }

    /// Answers some publish, or all up to one as far as they get the same answer.
    async fn answer_some(&mut self) {
        let ids: Vec<u16> = self.channels.keys().copied().collect();
        for id in ids {
            let patience = 1 + self.dice.below(40);
            let Some(lane) = self.channels.get_mut(&id) else { continue };
            if lane.unanswered.len() < patience {
                continue;
            }
            let place = self.dice.below(lane.unanswered.len());
            let alike = |lane: &Lane, acked: bool| {
                lane.unanswered.values().take(place + 1).all(|answer| *answer == acked)
            };
            let (&number, &acked) = lane.unanswered.iter().nth(place).expect("one of them");
            let multiple = alike(lane, acked);
            if multiple {
                lane.unanswered = lane.unanswered.split_off(&(number + 1));
            } else {
                lane.unanswered.remove(&number);
            }
            let delivery_tag = number;
            match acked {
                true => self.peer.send(id, &basic::Ack { delivery_tag, multiple }).await,
                false => {
                    let nack = basic::Nack { delivery_tag, multiple, requeue: false };
                    self.peer.send(id, &nack).await;
                }
            }
        }
    }

    /// Fills up the prefetch of every consumer, now and then.
    async fn deliver_some(&mut self) {
        let ids: Vec<u16> = self.channels.keys().copied().collect();
        for id in ids {
            let Some(lane) = self.channels.get_mut(&id) else { continue };
            let mut delivers = Vec::new();
            for (consumer_tag, prefetch) in &lane.consumers {
                let held = lane.unsettled.values().filter(|tag| *tag == consumer_tag).count();
                for _ in held..usize::from(*prefetch) {
                    lane.last_tag += 1;
                    lane.unsettled.insert(lane.last_tag, consumer_tag.clone());
                    delivers.push((consumer_tag.clone(), lane.last_tag));
                }
            }
            for (consumer_tag, delivery_tag) in delivers {
                let deliver = basic::Deliver {
                    consumer_tag,
                    delivery_tag,
                    redelivered: false,
                    exchange: ShortStr::default(),
                    routing_key: ShortStr::default(),
                };
                let body = delivery_tag.to_be_bytes().to_vec();
                let properties = leveret_wire::Properties::default();
                self.peer.send_content(id, &deliver, &properties, body).await;
            }
        }
    }
}

/// A message that wishes for an outcome.
fn wishing(wish: u8, number: u32) -> Publish<'static> {
    let mut body = vec![wish];
    // Many are alike.
    body.extend_from_slice(&(number / 5).to_be_bytes());
    Publish {
        routing_key: "key",
        mandatory: wish == b'r' || number.is_multiple_of(2),
        body: body.into(),
        ..Publish::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn outcomes_go_to_their_publishes_whichever_thread_publishes() {
    let mut dice = Dice::seeded();
    let (connection, peer) = connected().await;
    let broker = tokio::spawn(NullBroker::new(peer, Dice::new(dice.roll())).run());
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let opened = connection.open_channel().await.unwrap();
        let channel = Arc::new(opened.into_confirm().await.unwrap());
        for _ in 0..4 {
            let (channel, mut dice) = (Arc::clone(&channel), Dice::new(dice.roll()));
            tasks.spawn(async move {
                let mut waiting = Vec::new();
                for number in 0..1500 {
                    let wish = *b"aaanr".get(dice.below(5)).unwrap();
                    let publish = wishing(wish, number);
                    let confirmation = channel.publish(&publish).await.unwrap();
                    waiting.push((wish, publish.body, confirmation));
                    if dice.one_in(100) {
                        tokio::task::yield_now().await;
                    }
                }
                for (wish, body, confirmation) in waiting {
                    let outcome = polled_with(&channel, confirmation).await;
                    match (wish, outcome) {
                        (b'a', Outcome::Acked) | (b'n', Outcome::Nacked) => {}
                        (b'r', Outcome::Returned(returned)) => assert_eq!(returned.body, body),
                        (wish, outcome) => panic!("{} got {outcome:?}", char::from(wish)),
                    }
                }
            });
        }
    }
    timeout(SOON * 2, tasks.join_all()).await.expect("nobody hangs");
    connection.close().await.unwrap();
    broker.await.unwrap();
}

/// The outcome of a publish, with calls in between, as the broker answers only when something comes.
async fn polled_with<M>(channel: &Channel<M>, confirmation: leveret_amqp::Confirmation) -> Outcome {
    let mut confirmation = std::pin::pin!(confirmation);
    loop {
        if let Some(outcome) = polled(2, confirmation.as_mut()).await {
            return outcome;
        }
        channel.declare_queue("q", QueueOptions::default()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn deliveries_are_settled_once_each_whichever_thread_settles() {
    const EACH: u64 = 4000;
    let mut dice = Dice::seeded();
    let (connection, peer) = connected().await;
    let broker = tokio::spawn(NullBroker::new(peer, Dice::new(dice.roll())).run());
    let mut tasks = JoinSet::new();
    for _ in 0..2 {
        let channel = connection.open_channel().await.unwrap();
        for prefetch in [1, 20, 300] {
            let options = ConsumeOptions { prefetch, ..ConsumeOptions::default() };
            let consumer = channel.consume("q", options).await.unwrap();
            tasks.spawn(settle_at_random(consumer, Dice::new(dice.roll()), EACH));
        }
    }
    let results = timeout(SOON * 2, tasks.join_all()).await.expect("nobody hangs");
    let acked: u64 = results.into_iter().sum();
    connection.close().await.unwrap();
    assert_eq!(broker.await.unwrap(), acked);
}

/// Settles so many deliveries in any order, on tasks of their own, and says how many were acked.
async fn settle_at_random(mut consumer: Consumer, mut dice: Dice, count: u64) -> u64 {
    let mut acked = 0;
    let mut settling = JoinSet::new();
    let mut last = 0;
    for _ in 0..count {
        let delivery = timeout(SOON, consumer.next()).await.expect("a delivery");
        let delivery = delivery.unwrap().unwrap();
        assert!(delivery.delivery_tag() > last, "{delivery:?} after {last}");
        last = delivery.delivery_tag();
        assert_eq!(delivery.body()[..], last.to_be_bytes());
        acked += u64::from(last % 4 != 0);
        let settle = move || match last % 8 {
            0 => delivery.nack(Refused::Requeue),
            4 => {
                drop(delivery);
                Ok(())
            }
            _ => delivery.ack(),
        };
        if dice.one_in(10) {
            settling.spawn(async move { settle() });
        } else {
            settle().unwrap();
        }
    }
    for settled in settling.join_all().await {
        settled.unwrap();
    }
    acked
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn channels_that_come_and_go_on_all_threads_never_cost_the_connection() {
    let mut dice = Dice::seeded();
    let (connection, peer) = connected_with_channels(20).await;
    let broker = tokio::spawn(NullBroker::new(peer, Dice::new(dice.roll())).run());
    let mut tasks = JoinSet::new();
    for _ in 0..6 {
        let (connection, mut dice) = (connection.clone(), Dice::new(dice.roll()));
        tasks.spawn(async move {
            for _ in 0..700 {
                match polled(dice.below(6), connection.open_channel()).await {
                    // Channels are left faster than the broker agrees.
                    Some(Err(error)) if error.kind() == ErrorKind::ChannelLimit => {
                        connection.update_secret(b"", "to wait for an answer").await?;
                    }
                    Some(channel) => use_and_leave(channel?, &mut dice).await?,
                    None => {}
                }
            }
            Ok::<(), Error>(())
        });
    }
    for result in timeout(SOON * 2, tasks.join_all()).await.expect("nobody hangs") {
        result.unwrap();
    }
    eventually(SOON, "all numbers to be free", async || {
        let mut channels = Vec::new();
        for _ in 0..20 {
            channels.push(connection.open_channel().await.map_err(|error| error.to_string())?);
        }
        let ids: BTreeSet<u16> = channels.iter().map(Channel::id).collect();
        if ids == (1..=20).collect() { Ok(()) } else { Err(format!("{ids:?}")) }
    })
    .await;
    connection.close().await.unwrap();
    broker.await.unwrap();
}

/// Begins things on a channel and leaves it in any state.
async fn use_and_leave(channel: Channel, dice: &mut Dice) -> Result<(), Error> {
    let channel = match polled(dice.below(8), channel.into_confirm()).await {
        Some(channel) => channel?,
        None => return Ok(()),
    };
    for _ in 0..dice.below(5) {
        drop(channel.publish(&wishing(b'a', 1)).await?);
    }
    let options = ConsumeOptions { prefetch: 5, ..ConsumeOptions::default() };
    let _ = polled(dice.below(3), channel.declare_queue("q", QueueOptions::default())).await;
    if let Some(consumer) = polled(dice.below(8), channel.consume("q", options)).await {
        let mut consumer = consumer?;
        let delivery = polled(dice.below(8), consumer.next()).await;
        if let Some(Some(delivery)) = delivery {
            delivery?.ack()?;
        }
        let _ = polled(dice.below(5), consumer.cancel()).await;
    }
    if dice.one_in(3) {
        let _ = polled(dice.below(5), channel.close()).await;
    }
    Ok(())
}

/// A second recover that is under way takes back what comes after the answer to the first.
#[tokio::test]
async fn what_comes_between_the_answers_to_two_recovers_cannot_be_settled() {
    let (connection, mut broker) = connected().await;
    let channel = Arc::new(open_channel(&connection, &mut broker).await);
    let id = channel.id();
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    let deliver = |delivery_tag| basic::Deliver {
        consumer_tag: ShortStr::from_static("c"),
        delivery_tag,
        redelivered: delivery_tag > 1,
        exchange: ShortStr::default(),
        routing_key: ShortStr::default(),
    };
    let none = leveret_wire::Properties::default();
    let recover = |channel: &Arc<Channel>| {
        let channel = Arc::clone(channel);
        tokio::spawn(async move { channel.recover().await })
    };
    broker.send_content(id, &deliver(1), &none, "x").await;
    let (first, second) = (recover(&channel), recover(&channel));
    broker.expect::<basic::Recover>(id).await;
    broker.expect::<basic::Recover>(id).await;
    broker.send(id, &basic::RecoverOk {}).await;
    broker.send_content(id, &deliver(2), &none, "x").await;
    first.await.unwrap().unwrap();
    let mut next = async || loop {
        let delivery = consumer.next().await.unwrap().unwrap();
        // Whether the stale ones are still handed out is no matter here.
        if delivery.delivery_tag() > 1 {
            return delivery;
        }
    };
    let between = next().await;
    assert_eq!(between.delivery_tag(), 2);
    // The broker has taken it back already, and would close the channel.
    assert!(between.ack().is_err());
    broker.send(id, &basic::RecoverOk {}).await;
    broker.send_content(id, &deliver(3), &none, "x").await;
    second.await.unwrap().unwrap();
    next().await.ack().unwrap();
    let ack = broker.expect::<basic::Ack>(id).await;
    assert_eq!((ack.delivery_tag, ack.multiple), (3, false));
}
