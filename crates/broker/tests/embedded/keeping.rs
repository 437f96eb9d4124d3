//! Deliveries that a client keeps for too long, under paused time: as nodes with such timeouts were seen to do it.

use std::time::Duration;

use leveret_broker::{Broker, Profile};
use leveret_testkit::peer::Peer;
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{PROTOCOL_HEADER, Properties, ReplyCode, Secret, ShortStr, Table, Value};
use tokio::io::DuplexStream;
use tokio::time::sleep;

use crate::support::peer;

type Client = Peer<DuplexStream>;

fn impatient(profile: Profile) -> Broker {
    let builder = Broker::builder().profile(profile).consumer_timeout(Duration::from_secs(5));
    builder.start().unwrap()
}

fn name(text: &'static str) -> ShortStr<'static> {
    ShortStr::from_static(text)
}

async fn open_channel(client: &mut Client) {
    client.send(1, &channel::Open {}).await;
    client.expect::<channel::OpenOk>(1).await;
}

/// A queue `q` of that type with two messages in it.
async fn with_messages(client: &mut Client, kind: &str, more: &[(&str, Value<'_>)]) {
    open_channel(client).await;
    let kind = ("x-queue-type", Value::from(kind));
    let arguments = Table::from_pairs(std::iter::once(kind).chain(more.iter().cloned())).unwrap();
    let declare =
        queue::Declare { queue: name("q"), durable: true, arguments, ..Default::default() };
    client.send(1, &declare).await;
    client.expect::<queue::DeclareOk<'_>>(1).await;
    publish(client).await;
    publish(client).await;
}

async fn publish(client: &mut Client) {
    let publish = basic::Publish { routing_key: name("q"), ..Default::default() };
    client.send_content(1, &publish, &Properties::default(), "x").await;
}

async fn consume(client: &mut Client, arguments: Table<'_>) {
    let consume = basic::Consume {
        queue: name("q"),
        consumer_tag: name("c"),
        arguments,
        ..Default::default()
    };
    client.send(1, &consume).await;
    client.expect::<basic::ConsumeOk<'_>>(1).await;
}

/// The tag of the next delivery, and whether it is one again.
async fn delivery(client: &mut Client) -> (u64, bool) {
    let deliver = client.expect_content::<basic::Deliver<'_>>(1).await.method;
    (deliver.delivery_tag, deliver.redelivered)
}

/// How many messages wait, and how many consumers there are.
async fn counts(client: &mut Client) -> (u32, u32) {
    let passive = queue::Declare { queue: name("q"), passive: true, ..Default::default() };
    client.send(1, &passive).await;
    let found = client.expect::<queue::DeclareOk<'_>>(1).await;
    (found.message_count, found.consumer_count)
}

async fn expect_timeout(client: &mut Client, timeout: &str) {
    let close = client.expect::<channel::Close<'_>>(1).await;
    assert_eq!(close.reply_code, ReplyCode::PRECONDITION_FAILED);
    let text = format!(
        "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value used: {timeout} ms. \
         This timeout value can be configured, see consumers doc guide to learn more"
    );
    assert_eq!(close.reply_text, text.as_str());
    assert_eq!((close.class_id, close.method_id), (0, 0));
}

async fn expect_cancel(client: &mut Client) {
    let cancel = client.expect::<basic::Cancel<'_>>(1).await;
    assert_eq!((cancel.consumer_tag, cancel.nowait), (name("c"), true));
}

#[tokio::test(start_paused = true)]
async fn in_3_10_it_costs_the_channel() {
    let broker = impatient(Profile::RabbitMq3_10);
    let mut client = peer(&broker).await;
    with_messages(&mut client, "classic", &[]).await;
    consume(&mut client, Table::new()).await;
    assert_eq!(delivery(&mut client).await, (1, false));
    assert_eq!(delivery(&mut client).await, (2, false));
    client.send(1, &basic::Ack { delivery_tag: 1, multiple: false }).await;
    sleep(Duration::from_millis(4900)).await;
    assert_eq!(counts(&mut client).await, (0, 1));
    sleep(Duration::from_millis(200)).await;
    expect_timeout(&mut client, "5000").await;
    // What the client sent before it heard is passed over.
    client.send(1, &basic::Ack { delivery_tag: 2, multiple: false }).await;
    publish(&mut client).await;
    client.send(1, &channel::CloseOk {}).await;
    open_channel(&mut client).await;
    assert_eq!(counts(&mut client).await, (1, 0));
    consume(&mut client, Table::new()).await;
    assert_eq!(delivery(&mut client).await, (1, true));
}

#[tokio::test(start_paused = true)]
async fn in_4_3_the_consumer_is_cancelled_and_stays_until_the_client_has_heard() {
    let broker = impatient(Profile::RabbitMq4_3);
    let mut client = peer(&broker).await;
    with_messages(&mut client, "quorum", &[]).await;
    consume(&mut client, Table::new()).await;
    delivery(&mut client).await;
    delivery(&mut client).await;
    sleep(Duration::from_millis(4900)).await;
    assert_eq!(counts(&mut client).await, (0, 1));
    sleep(Duration::from_millis(200)).await;
    expect_cancel(&mut client).await;
    assert_eq!(counts(&mut client).await, (2, 1));
    client.send(1, &basic::CancelOk { consumer_tag: name("c") }).await;
    assert_eq!(counts(&mut client).await, (2, 0));
    // An ack that comes too late is none, and no offence.
    client.send(1, &basic::Ack { delivery_tag: 2, multiple: true }).await;
    consume(&mut client, Table::new()).await;
    assert_eq!(delivery(&mut client).await, (3, true));
    assert_eq!(delivery(&mut client).await, (4, true));
}

#[tokio::test(start_paused = true)]
async fn a_consumer_that_acks_all_it_kept_gets_it_again() {
    let broker = impatient(Profile::RabbitMq4_3);
    let mut client = peer(&broker).await;
    with_messages(&mut client, "quorum", &[]).await;
    consume(&mut client, Table::new()).await;
    delivery(&mut client).await;
    delivery(&mut client).await;
    sleep(Duration::from_secs(6)).await;
    expect_cancel(&mut client).await;
    client.send(1, &basic::Ack { delivery_tag: 1, multiple: false }).await;
    assert_eq!(counts(&mut client).await, (2, 1));
    client.send(1, &basic::Ack { delivery_tag: 2, multiple: false }).await;
    assert_eq!(delivery(&mut client).await, (3, true));
    assert_eq!(delivery(&mut client).await, (4, true));
    // Neither is settled, and settling one that was settled is an offence again.
    assert_eq!(counts(&mut client).await, (0, 1));
    client.send(1, &basic::Ack { delivery_tag: 1, multiple: false }).await;
    let close = client.expect::<channel::Close<'_>>(1).await;
    assert_eq!(close.reply_text, "PRECONDITION_FAILED - unknown delivery tag 1");
}

#[tokio::test(start_paused = true)]
async fn each_delivery_has_its_own_time() {
    let broker = impatient(Profile::RabbitMq4_3);
    let mut client = peer(&broker).await;
    with_messages(&mut client, "quorum", &[]).await;
    consume(&mut client, Table::new()).await;
    delivery(&mut client).await;
    delivery(&mut client).await;
    client.send(1, &basic::Ack { delivery_tag: 1, multiple: false }).await;
    sleep(Duration::from_secs(3)).await;
    publish(&mut client).await;
    delivery(&mut client).await;
    sleep(Duration::from_millis(2500)).await;
    expect_cancel(&mut client).await;
    assert_eq!(counts(&mut client).await, (1, 1));
    sleep(Duration::from_secs(3)).await;
    expect_cancel(&mut client).await;
    assert_eq!(counts(&mut client).await, (2, 1));
}

#[tokio::test(start_paused = true)]
async fn the_consumer_has_its_way_before_the_queue_and_the_queue_before_the_broker() {
    let timeout = |millis: i64| ("x-consumer-timeout", Value::from(millis));
    for (asked, seconds) in [(None, 2), (Some(1000), 1), (Some(20_000), 20)] {
        let broker = impatient(Profile::RabbitMq4_3);
        let mut client = peer(&broker).await;
        with_messages(&mut client, "quorum", &[timeout(2000)]).await;
        let arguments = asked.map(|millis| Table::from_pairs([timeout(millis)]).unwrap());
        consume(&mut client, arguments.unwrap_or_default()).await;
        delivery(&mut client).await;
        delivery(&mut client).await;
        sleep(Duration::from_secs(seconds) - Duration::from_millis(100)).await;
        assert_eq!(counts(&mut client).await, (0, 1), "{asked:?}");
        sleep(Duration::from_millis(200)).await;
        expect_cancel(&mut client).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_classic_queue_of_4_3_waits_for_ever() {
    let broker = impatient(Profile::RabbitMq4_3);
    let mut client = peer(&broker).await;
    with_messages(&mut client, "classic", &[]).await;
    consume(&mut client, Table::new()).await;
    delivery(&mut client).await;
    delivery(&mut client).await;
    sleep(Duration::from_secs(60)).await;
    assert_eq!(counts(&mut client).await, (0, 1));
}

#[tokio::test(start_paused = true)]
async fn what_was_got_and_kept_costs_the_channel_in_4_3_as_well() {
    let broker = impatient(Profile::RabbitMq4_3);
    let mut client = peer(&broker).await;
    with_messages(&mut client, "quorum", &[]).await;
    client.send(1, &basic::Get { queue: name("q"), no_ack: false }).await;
    client.expect_content::<basic::GetOk<'_>>(1).await;
    sleep(Duration::from_secs(6)).await;
    expect_timeout(&mut client, "-1").await;
    client.send(1, &channel::CloseOk {}).await;
    open_channel(&mut client).await;
    assert_eq!(counts(&mut client).await, (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_cannot_be_told_of_a_cancel_loses_its_channel() {
    let broker = impatient(Profile::RabbitMq4_3);
    let mut client = Peer::over(broker.connect());
    shake_hands_without_capabilities(&mut client).await;
    with_messages(&mut client, "quorum", &[]).await;
    consume(&mut client, Table::new()).await;
    delivery(&mut client).await;
    delivery(&mut client).await;
    sleep(Duration::from_secs(6)).await;
    expect_timeout(&mut client, "-1").await;
}

async fn shake_hands_without_capabilities(client: &mut Client) {
    client.send_bytes(&PROTOCOL_HEADER).await;
    client.expect::<connection::Start<'_>>(0).await;
    let start_ok = connection::StartOk {
        client_properties: Table::new(),
        mechanism: name("PLAIN"),
        response: Secret::new(b"\0guest\0guest".to_vec()),
        locale: name("en_US"),
    };
    client.send(0, &start_ok).await;
    let connection::Tune { channel_max, frame_max, heartbeat } = client.expect(0).await;
    client.send(0, &connection::TuneOk { channel_max, frame_max, heartbeat }).await;
    client.send(0, &connection::Open { virtual_host: name("/") }).await;
    client.expect::<connection::OpenOk>(0).await;
}
