use std::time::Duration;

use leveret::amqp::{Options, Outcome, Publish};
use leveret::{BorrowedChannel, Client, ClientEvent, Error, ErrorKind, Queue, Topology};
use leveret_broker::Broker;
use leveret_testkit::eventually;

use crate::{PATIENCE, broker, client_with, soon};

/// How many channels the broker has, but for that of consumers.
fn channels(broker: &Broker) -> usize {
    broker.statistics().channels
}

fn letter(body: &str) -> Publish<'static> {
    Publish {
        routing_key: "q",
        mandatory: true,
        body: body.to_owned().into(),
        ..Publish::default()
    }
}

async fn client(broker: &Broker) -> Client {
    client_with(broker, Queue::classic("q")).await
}

#[tokio::test(start_paused = true)]
async fn all_channels_are_open_from_the_start_and_there_are_never_more() {
    let broker = broker();
    let client = client(&broker).await;
    let pool = client.channel_pool().size(5).connections(2).build().await.unwrap();
    assert_eq!((channels(&broker), pool.idle(), pool.size()), (5, 5, 5));
    let mut borrowed = Vec::new();
    for _ in 0..5 {
        borrowed.push(pool.borrow().await.unwrap());
    }
    assert_eq!((channels(&broker), pool.idle()), (5, 0));
    let error = pool.borrow().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    drop(borrowed.pop());
    soon("a channel", pool.borrow()).await.unwrap();
    assert_eq!(channels(&broker), 5);
}

#[tokio::test(start_paused = true)]
async fn a_channel_with_unanswered_publishes_does_not_go_back() {
    let broker = broker();
    let client = client(&broker).await;
    let timeout = Duration::from_secs(5);
    let pool = client.channel_pool().size(1).timeout(timeout).build().await.unwrap();
    let channel = pool.borrow().await.unwrap();
    let id = channel.id();
    broker.faults().freeze();
    drop(channel.publish(&letter("1")).await.unwrap());
    let error = soon("an error", channel.give_back()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    broker.faults().thaw();
    let channel = soon("a channel", pool.borrow()).await.unwrap();
    assert_eq!(channel.tally().acked, 0, "channel {id} was replaced");
    assert_eq!(channels(&broker), 1);
}

#[tokio::test(start_paused = true)]
async fn a_check_does_not_wait_for_a_connection_that_failed() {
    let broker = Broker::builder().heartbeat(Duration::from_secs(1)).start().unwrap();
    let client = client(&broker).await;
    let pool = client.channel_pool().size(1).build().await.unwrap();
    let channel = pool.borrow().await.unwrap();
    broker.faults().freeze();
    // More than a pipe to the broker holds: it takes some time until the connection is given up.
    let large = letter(&"x".repeat(1 << 20));
    drop(channel.publish(&large).await.unwrap());
    drop(channel);
    soon("the loss", async {
        while client.health().connections.iter().all(|one| one.is_up) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let check = tokio::time::timeout(Duration::from_secs(1), client.check_health()).await;
    assert!(!check.expect("an answer at once").is_healthy());
}

#[tokio::test(start_paused = true)]
async fn a_reopen_that_fails_does_not_shrink_the_pool() {
    let broker = broker();
    let client = client(&broker).await;
    let timeout = Duration::from_secs(2);
    let pool = client.channel_pool().size(2).timeout(timeout).build().await.unwrap();
    broker.faults().freeze();
    broker.faults().cut_all_connections();
    tokio::time::sleep(Duration::from_millis(10)).await;
    for _ in 0..5 {
        assert!(soon("an error", pool.borrow()).await.is_err());
    }
    broker.faults().thaw();
    let one = soon("a channel", async {
        loop {
            if let Ok(channel) = pool.borrow().await {
                return channel;
            }
        }
    })
    .await;
    let other = soon("a channel", pool.borrow()).await.unwrap();
    for channel in [one, other] {
        assert!(channel.publish(&letter("1")).await.unwrap().await.is_acked());
        assert_eq!(channel.give_back().await.unwrap().acked, 1);
    }
    assert_eq!(pool.idle(), 2);
}

#[tokio::test(start_paused = true)]
async fn without_a_size_each_borrower_gets_a_channel_of_its_own() {
    let broker = broker();
    let client = client(&broker).await;
    let pool = client.channel_pool().size(0).build().await.unwrap();
    let all = [pool.borrow().await.unwrap(), pool.borrow().await.unwrap()];
    assert_eq!(channels(&broker), 2);
    drop(all);
    soon("the end of the channels", async {
        while channels(&broker) > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// A client that does not look after its pools from time to time.
async fn unchecked_client(broker: &Broker) -> Client {
    let never = Duration::from_secs(24 * 3600);
    crate::builder_of(broker).check_every(never).connect().await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_broken_channel_that_is_given_back_is_opened_again_at_once() {
    let broker = broker();
    let client = unchecked_client(&broker).await;
    let pool = client.channel_pool().size(1).build().await.unwrap();
    let channel = pool.borrow().await.unwrap();
    let missing = Publish { exchange: "missing", ..letter("1") };
    let outcome = channel.publish(&missing).await.unwrap().await;
    assert!(matches!(outcome, Outcome::Lost(_)), "{outcome:?}");
    drop(channel);
    eventually(PATIENCE, "a channel", async || {
        (client.health().pools[0].open, pool.idle()) == (1, 1)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_channel_that_was_borrowed_over_a_reconnect_is_opened_again_when_it_is_given_back() {
    let broker = broker();
    let client = unchecked_client(&broker).await;
    let pool = client.channel_pool().size(2).build().await.unwrap();
    let channel = pool.borrow().await.unwrap();
    broker.faults().cut_all_connections();
    eventually(PATIENCE, "the other channel", async || {
        channels(&broker) == 1 && channel.check_open().is_err()
    })
    .await;
    drop(channel);
    eventually(PATIENCE, "both channels", async || channels(&broker) == 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_ends_with_the_last_pool_that_has_channels_on_it() {
    let broker = broker();
    let client = client(&broker).await;
    let connections = || broker.statistics().connections;
    let pool = client.channel_pool().size(3).connections(3).build().await.unwrap();
    let other = client.channel_pool().size(2).connections(2).build().await.unwrap();
    assert_eq!(connections(), 4);
    let borrowed = pool.borrow().await.unwrap();
    drop(pool);
    assert_eq!(connections(), 4, "a channel is lent");
    drop(borrowed);
    eventually(PATIENCE, "the end of one connection", async || connections() == 3).await;
    assert_eq!(client.health().connections.len(), 3);
    drop(other);
    eventually(PATIENCE, "the end of another", async || connections() == 2).await;
    // The first one stays, for publishers.
    let pool = client.channel_pool().size(2).connections(2).build().await.unwrap();
    assert_eq!((connections(), pool.idle()), (3, 2));
    client.close().await;
    assert_eq!(connections(), 0);
}

/// Has the broker close a channel.
async fn spoil(channel: &BorrowedChannel) {
    let missing = Publish { exchange: "missing", ..letter("1") };
    let outcome = channel.publish(&missing).await.unwrap().await;
    assert!(matches!(outcome, Outcome::Lost(_)), "{outcome:?}");
}

#[tokio::test]
async fn a_channel_that_cannot_be_opened_keeps_none_of_other_connections_closed() {
    let broker = broker();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let mut options = Options::from_uri(&format!("amqp://{address}")).unwrap();
    options.channel_max = 1;
    let never = Duration::from_secs(24 * 3600);
    let building = Client::builder().endpoint(options).unwrap().check_every(never);
    let client = building.connect().await.unwrap();
    let pool = client.channel_pool().size(2).connections(2).build().await.unwrap();
    let (one, two) = (pool.borrow().await.unwrap(), pool.borrow().await.unwrap());
    spoil(&one).await;
    spoil(&two).await;
    // The only channel of the first connection is taken.
    let _publisher = client.publisher("").build().await.unwrap();
    drop(two);
    drop(one);
    eventually(PATIENCE, "a channel of the second one", async || {
        client.health().pools[0].open == 1
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_broken_channel_that_is_given_back_during_a_block_is_opened_after_it() {
    let broker = broker();
    let client = unchecked_client(&broker).await;
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let pool = client.channel_pool().size(1).build().await.unwrap();
    let channel = pool.borrow().await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    spoil(&channel).await;
    let mut events = client.watch();
    broker.faults().block("low on memory");
    // The broker tells a connection that it is blocked once that publishes.
    publisher.publish("q", "1").await.unwrap();
    assert!(matches!(events.next().await, Some(ClientEvent::Blocked { .. })));
    drop(channel);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(client.health().pools[0].open, 0);
    broker.faults().unblock();
    eventually(PATIENCE, "a channel", async || client.health().pools[0].open == 1).await;
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_channel_becomes_one_of_the_client_by_question_mark() {
    async fn publish(client: &Client) -> Result<(), Error> {
        let pool = client.channel_pool().size(1).build().await?;
        let channel = pool.borrow().await?;
        let long = "k".repeat(256);
        let publish = Publish { routing_key: &long, ..Publish::default() };
        let _confirmation = channel.publish(&publish).await?;
        Ok(())
    }
    let client = client(&broker()).await;
    let error = publish(&client).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.get_ref().is_some_and(|behind| behind.is::<leveret::amqp::Error>()));
}
