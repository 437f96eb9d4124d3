//! Dead-lettering at least once, under paused time: as nodes were seen to do it.

use std::time::Duration;

use leveret::amqp::{
    Channel, Confirm, ExchangeOptions, GetOptions, Outcome, QueueOptions, Refused, Table, Value,
};
use leveret_broker::{Broker, Profile};
use tokio::time::sleep;

use crate::support::{connect, get, put};

/// A little more than what RabbitMQ waits before it tries again.
const A_WHILE: Duration = Duration::from_secs(181);

async fn declare(channel: &Channel<Confirm>, name: &str, arguments: &[(&str, Value<'_>)]) {
    let arguments = Table::from_pairs(arguments.iter().cloned()).unwrap();
    let options = QueueOptions { arguments, ..QueueOptions::default() };
    channel.declare_queue(name, options).await.unwrap();
}

/// A channel, and a queue `q` that dead-letters at least once to an exchange `x`, which is not there.
async fn with_queue(broker: &Broker, more: &[(&str, Value<'_>)]) -> Channel<Confirm> {
    let connection = connect(broker).await;
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    let arguments = [
        ("x-queue-type", Value::from("quorum")),
        ("x-dead-letter-exchange", Value::from("x")),
        ("x-dead-letter-strategy", Value::from("at-least-once")),
        ("x-overflow", Value::from("reject-publish")),
    ];
    declare(&channel, "q", &[&arguments, more].concat()).await;
    channel
}

async fn bind(channel: &Channel<Confirm>, queue: &str) {
    channel.declare_exchange("x", "fanout", ExchangeOptions::default()).await.unwrap();
    channel.bind_queue(queue, "x", "", &Table::new()).await.unwrap();
}

async fn reject_one(channel: &Channel<Confirm>) {
    let delivery = channel.get("q", GetOptions::default()).await.unwrap().unwrap();
    delivery.reject(Refused::Discard).unwrap();
}

async fn count(channel: &Channel<Confirm>, queue: &str) -> u32 {
    channel.inspect_queue(queue).await.unwrap().messages
}

#[tokio::test(start_paused = true)]
async fn what_reaches_no_queue_is_kept_and_sent_on_when_it_can_be() {
    let broker = Broker::builder().start().unwrap();
    let channel = with_queue(&broker, &[]).await;
    put(&channel, "q", "dead").await;
    reject_one(&channel).await;
    assert_eq!(count(&channel, "q").await, 0);
    declare(&channel, "dead", &[]).await;
    bind(&channel, "dead").await;
    assert_eq!(count(&channel, "dead").await, 0);
    sleep(A_WHILE).await;
    let delivery = channel.get("dead", GetOptions::default()).await.unwrap().unwrap();
    let deaths = delivery.properties().headers.unwrap();
    assert_eq!(deaths.get("x-first-death-reason").unwrap().as_str(), Some("rejected"));
    delivery.ack().unwrap();
    sleep(A_WHILE).await;
    assert_eq!(count(&channel, "dead").await, 0);
    let tally = broker.statistics().tally;
    assert_eq!((tally.rejected, tally.dead_lettered, tally.gone), (1, 1, 0));
    assert_eq!(broker.statistics().memory, 0);
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_refuses_gets_it_later_and_the_others_once() {
    let broker = Broker::builder().start().unwrap();
    let channel = with_queue(&broker, &[]).await;
    let full =
        [("x-max-length", Value::from(1_i64)), ("x-overflow", Value::from("reject-publish"))];
    declare(&channel, "full", &full).await;
    declare(&channel, "other", &[]).await;
    bind(&channel, "full").await;
    bind(&channel, "other").await;
    put(&channel, "full", "first").await;
    put(&channel, "q", "dead").await;
    reject_one(&channel).await;
    assert_eq!((count(&channel, "full").await, count(&channel, "other").await), (1, 1));
    assert_eq!(get(&channel, "full").await.as_deref(), Some("first"));
    sleep(A_WHILE).await;
    assert_eq!(get(&channel, "full").await.as_deref(), Some("dead"));
    assert_eq!(count(&channel, "other").await, 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_kept_counts_towards_the_limit() {
    let broker = Broker::builder().start().unwrap();
    let channel = with_queue(&broker, &[("x-max-length", Value::from(2_i64))]).await;
    for _ in 0..2 {
        put(&channel, "q", "dead").await;
        reject_one(&channel).await;
    }
    assert!(put(&channel, "q", "one too many, as ever").await.is_acked());
    let refused = put(&channel, "q", "refused").await;
    assert!(matches!(refused, Outcome::Nacked), "{refused:?}");
    channel.delete_queue("q", Default::default()).await.unwrap();
    assert_eq!(broker.statistics().memory, 0);
}

#[tokio::test(start_paused = true)]
async fn a_purge_leaves_what_is_kept_and_counts_it_in_4_3() {
    for (profile, counted) in [(Profile::RabbitMq3_10, 1), (Profile::RabbitMq4_3, 2)] {
        let broker = Broker::builder().profile(profile).start().unwrap();
        let channel = with_queue(&broker, &[]).await;
        put(&channel, "q", "dead").await;
        reject_one(&channel).await;
        put(&channel, "q", "ready").await;
        assert_eq!(channel.purge_queue("q").await.unwrap(), counted, "{profile}");
        declare(&channel, "dead", &[]).await;
        bind(&channel, "dead").await;
        sleep(A_WHILE).await;
        assert_eq!(get(&channel, "dead").await.as_deref(), Some("dead"));
    }
}
