//! Objects that lead to objects that lead to objects: how far is for clients to decide, and costs the broker neither its stack
//! nor the time of other clients.

use bytes::Buf;
use leveret_broker::{Broker, Profile};
use leveret_testkit::eventually;
use leveret_testkit::peer::Peer;
use leveret_wire::method::{Encode, basic, channel, exchange, queue};
use leveret_wire::{FrameMax, Outbound, Properties, ShortStr, Table};
use tokio::io::DuplexStream;

use crate::support::{SOON, broker, peer};

/// More than there is room for on a stack.
const LINKS: usize = 20_000;

fn name(number: usize) -> ShortStr<'static> {
    ShortStr::try_from(format!("c{number}")).unwrap()
}

/// What a client says on its first channel, all at once.
#[derive(Default)]
struct Script(Outbound);

impl Script {
    fn ask(&mut self, method: &impl Encode) {
        self.0.method(1, method, FrameMax::DEFAULT).unwrap();
    }

    fn publish(&mut self, exchange: ShortStr<'static>, routing_key: ShortStr<'static>) {
        let body = bytes::Bytes::from_static(b"through all of it");
        self.publish_with(exchange, routing_key, body);
    }

    fn publish_with(
        &mut self,
        exchange: ShortStr<'static>,
        routing_key: ShortStr<'static>,
        body: bytes::Bytes,
    ) {
        let publish = basic::Publish { exchange, routing_key, ..Default::default() };
        self.0.content(1, &publish, &Properties::default(), &body, FrameMax::DEFAULT).unwrap();
    }

    /// Says it, and returns when all is done.
    async fn play(mut self, broker: &Broker) -> Peer<DuplexStream> {
        let mut peer = peer(broker).await;
        peer.send(1, &channel::Open {}).await;
        peer.expect::<channel::OpenOk>(1).await;
        self.ask(&basic::Qos::default());
        peer.send_bytes(&self.0.copy_to_bytes(self.0.remaining())).await;
        peer.expect::<basic::QosOk>(1).await;
        peer
    }
}

fn fanout(number: usize) -> exchange::Declare<'static> {
    exchange::Declare {
        exchange: name(number),
        kind: ShortStr::from_static("fanout"),
        nowait: true,
        ..Default::default()
    }
}

fn last_queue(script: &mut Script, first_exchange: usize) {
    let queue = ShortStr::from_static("last");
    script.ask(&queue::Declare { queue: queue.clone(), nowait: true, ..Default::default() });
    let exchange = name(first_exchange);
    script.ask(&queue::Bind { queue, exchange, nowait: true, ..Default::default() });
}

#[tokio::test]
async fn a_chain_of_auto_delete_exchanges_is_deleted_with_the_queue_at_its_end() {
    let broker = broker();
    let before = broker.snapshot().virtual_host("/").unwrap().exchanges.len();
    let mut script = Script::default();
    for number in 0..LINKS {
        script.ask(&exchange::Declare { auto_delete: true, ..fanout(number) });
        if let Some(destination) = number.checked_sub(1).map(name) {
            let (source, nowait) = (name(number), true);
            script.ask(&exchange::Bind { destination, source, nowait, ..Default::default() });
        }
    }
    last_queue(&mut script, 0);
    script.publish(name(LINKS - 1), ShortStr::default());
    let mut peer = script.play(&broker).await;
    assert_eq!(broker.statistics().ready, 1);

    peer.send(1, &queue::Delete { queue: "last".try_into().unwrap(), ..Default::default() }).await;
    assert_eq!(peer.expect::<queue::DeleteOk>(1).await.message_count, 1);
    let snapshot = broker.snapshot();
    let host = snapshot.virtual_host("/").unwrap();
    assert_eq!((host.exchanges.len(), host.bindings.len()), (before, 0));
}

#[tokio::test]
async fn a_message_gets_through_any_number_of_alternate_exchanges() {
    let broker = broker();
    let mut script = Script::default();
    for number in 0..LINKS {
        let next = name(number + 1).to_string();
        let arguments = Table::from_pairs([("alternate-exchange", next.into())]).unwrap();
        script.ask(&exchange::Declare { arguments, ..fanout(number) });
    }
    script.ask(&fanout(LINKS));
    last_queue(&mut script, LINKS);
    script.publish(name(0), ShortStr::default());
    script.play(&broker).await;
    assert_eq!(broker.statistics().ready, 1);
}

/// Queues in which messages die at once, each on its way to the next one, and one in which they stay.
fn chain_of_queues(script: &mut Script, count: usize) {
    for number in 0..count {
        let next = name(number + 1).to_string();
        let arguments = [
            ("x-message-ttl", 0.into()),
            ("x-dead-letter-exchange", "".into()),
            ("x-dead-letter-routing-key", next.into()),
        ];
        let (arguments, queue) = (Table::from_pairs(arguments).unwrap(), name(number));
        script.ask(&queue::Declare { queue, nowait: true, arguments, ..Default::default() });
    }
    script.ask(&queue::Declare { queue: name(count), nowait: true, ..Default::default() });
}

/// Under paused time it goes on only when all have said what they have to say.
#[tokio::test(start_paused = true)]
async fn a_message_counts_while_it_dies_its_way_through_many_queues() {
    const QUEUES: usize = 2000;
    const SIZE: usize = 100_000;
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let mut script = Script::default();
        chain_of_queues(&mut script, QUEUES);
        script.publish_with(ShortStr::default(), name(0), vec![7; SIZE].into());
        let mut peer = script.play(&broker).await;
        let statistics = broker.statistics();
        assert_eq!((statistics.ready, statistics.memory > SIZE), (0, true), "{profile:?}");
        eventually(SOON, "the message at the end", async || broker.statistics().ready == 1).await;
        peer.send(1, &queue::Purge { queue: name(QUEUES), nowait: false }).await;
        peer.expect::<queue::PurgeOk>(1).await;
        assert_eq!(broker.statistics().memory, 0, "{profile:?}");
    }
}

/// Each death adds an entry to the `x-death` of the message, which is put together once, and not at each of them.
#[tokio::test]
async fn a_message_dies_its_way_through_two_thousand_queues_in_no_time() {
    const QUEUES: usize = 2000;
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let mut script = Script::default();
        chain_of_queues(&mut script, QUEUES);
        script.publish(ShortStr::default(), name(0));
        let mut peer = script.play(&broker).await;
        eventually(SOON, "the message at the end", async || broker.statistics().ready == 1).await;

        let last = name(QUEUES).to_string();
        let message = broker.peek("/", &last, 1).unwrap().remove(0);
        let deaths = message.properties.header("x-death").unwrap();
        let deaths: Vec<_> = deaths.as_array().unwrap().iter().collect();
        assert_eq!(deaths.len(), QUEUES);
        let newest = deaths[0].as_table().unwrap().get("queue").unwrap();
        assert_eq!(newest.as_str(), Some(name(QUEUES - 1).to_string().as_str()));

        // Its header is larger than a frame.
        peer.accept_frames_of_any_size();
        peer.send(1, &basic::Get { queue: name(QUEUES), no_ack: true }).await;
        let got = peer.expect_content::<basic::GetOk<'_>>(1).await;
        assert_eq!(got.properties.header("x-death"), message.properties.header("x-death"));
        assert_eq!(got.body, "through all of it");
        assert_eq!(broker.statistics().memory, 0, "{profile:?}");
    }
}
