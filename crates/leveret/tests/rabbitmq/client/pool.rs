use std::time::Duration;

use leveret::amqp::{Options, Outcome, Publish};
use leveret::{Client, ErrorKind, Queue, Topology};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{self, Vhost};
use tokio::task::JoinSet;

use crate::support::client::{PUBLISHING, SOON, builder, client_with, cut, soon};
use crate::support::rabbit::Dice;

fn letter<'a>(exchange: &'a str, routing_key: &'a str, body: &str) -> Publish<'a> {
    let body = body.to_owned().into();
    Publish { exchange, routing_key, mandatory: true, body, ..Publish::default() }
}

/// A client whose connections have so many channels at most: one more is an error.
async fn client_with_channels(vhost: &Vhost, channels: u16) -> Client {
    let mut options = Options::from_uri(&vhost.url()).unwrap();
    options.channel_max = channels;
    let client = Client::connect(options).await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    client
}

#[tokio::test]
async fn a_channel_that_broke_is_replaced() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with_channels(&vhost, 1).await;
    let pool = client.channel_pool().size(1).build().await.unwrap();
    for round in 0..20 {
        let channel = soon("a channel", pool.borrow()).await.unwrap();
        let outcome = channel.publish(&letter("", "q", "1")).await.unwrap();
        assert!(soon("an outcome", outcome).await.is_acked());
        let outcome = channel.publish(&letter("missing", "q", "2")).await.unwrap();
        if round % 2 == 0 {
            let outcome = soon("an outcome", outcome).await;
            assert!(matches!(outcome, Outcome::Lost(_)), "{outcome:?}");
        }
    }
    assert_eq!(pool.size(), 1);
}

#[tokio::test]
async fn a_pool_comes_back_after_its_connections_were_cut() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let pool = client.channel_pool().size(3).build().await.unwrap();
    cut(&vhost, &client, PUBLISHING).await;
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(soon("a channel", pool.borrow()).await.unwrap());
    }
    for channel in all {
        drop(soon("room", channel.publish(&letter("", "q", "1"))).await.unwrap());
        assert_eq!(soon("the confirms", channel.give_back()).await.unwrap().acked, 1);
    }
    assert_eq!(pool.idle(), 3);
}

#[tokio::test]
async fn after_a_reconnect_all_channels_are_opened_before_any_is_borrowed() {
    let vhost = rabbitmq::vhost().await;
    let never = Duration::from_secs(24 * 3600);
    let client = soon("a client", builder(&vhost).check_every(never).connect()).await.unwrap();
    let pool = client.channel_pool().size(3).build().await.unwrap();
    cut(&vhost, &client, PUBLISHING).await;
    eventually(SOON, "all channels", async || client.health().pools[0].open == 3).await;
    assert_eq!(pool.size(), 3);
}

#[tokio::test]
async fn a_closed_client_lends_nothing() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let pool = client.channel_pool().size(1).build().await.unwrap();
    soon("closing", client.close()).await;
    let error = soon("an answer", pool.borrow()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

const SIZE: usize = 7;
const BORROWERS: usize = 200;
const ROUNDS: usize = 5;

/// Borrows a channel, publishes some messages that arrive and some that come back, and breaks the channel now and then.
/// Says how many messages have arrived at least.
async fn borrow_and_publish(pool: &leveret::ChannelPool, name: &str, dice: &mut Dice) -> u64 {
    let channel = soon("a channel", pool.borrow()).await.unwrap();
    let mut expected = Vec::new();
    for number in 0..1 + dice.below(5) {
        let arrives = !dice.one_in(3);
        let body = format!("{name}-{number}");
        let key = if arrives { "q" } else { "nowhere" };
        let confirmation = soon("room", channel.publish(&letter("", key, &body))).await.unwrap();
        expected.push((arrives, body, confirmation));
    }
    let breaks = dice.one_in(4);
    if breaks {
        drop(soon("room", channel.publish(&letter("missing", "q", name))).await);
        if dice.one_in(2) {
            return 0;
        }
    }
    let (mut acked, mut returned) = (0, 0);
    for (arrives, body, confirmation) in expected {
        match soon("an outcome", confirmation).await {
            Outcome::Acked if arrives => acked += 1,
            Outcome::Returned(message) if !arrives => {
                assert_eq!(message.body, body);
                returned += 1;
            }
            Outcome::Lost(_) if breaks => {}
            other => panic!("{body}: {other:?}"),
        }
    }
    if !breaks {
        let tally = soon("the confirms", channel.give_back()).await.unwrap();
        assert_eq!(
            (tally.acked, tally.returned, tally.lost, tally.nacked),
            (acked, returned, 0, 0)
        );
    }
    acked
}

/// Never above the maximum, none missing afterwards, and each borrower sees its own confirms and no others.
#[tokio::test]
async fn many_borrowers_get_their_own_confirms_while_channels_break() {
    let vhost = rabbitmq::vhost().await;
    // An eighth channel would be refused.
    let client = client_with_channels(&vhost, SIZE as u16).await;
    let pool = client.channel_pool().size(SIZE).build().await.unwrap();
    let mut dice = Dice::seeded();
    let mut tasks = JoinSet::new();
    for borrower in 0..BORROWERS {
        let (pool, mut dice) = (pool.clone(), Dice::new(dice.roll()));
        tasks.spawn(async move {
            let mut acked = 0;
            for round in 0..ROUNDS {
                acked += borrow_and_publish(&pool, &format!("{borrower}-{round}"), &mut dice).await;
            }
            acked
        });
    }
    let mut acked = 0;
    while let Some(done) = tasks.join_next().await {
        acked += done.unwrap();
    }
    assert!(u64::from(client.inspect_queue("q").await.unwrap().messages) >= acked);
    eventually(SOON, "all channels", async || pool.idle() == SIZE).await;
    let mut all = Vec::new();
    for _ in 0..SIZE {
        all.push(soon("a channel", pool.borrow()).await.unwrap());
    }
    for channel in all {
        drop(channel.publish(&letter("", "q", "last")).await.unwrap());
        assert_eq!(soon("the confirms", channel.give_back()).await.unwrap().acked, 1);
    }
}
