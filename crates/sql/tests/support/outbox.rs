//! Outbox and relay, on either database, with the embedded broker.

use std::collections::HashMap;
use std::time::Duration;

use leveret::{Backoff, Client, Delivery, Exchange, Message, Queue, Topology, TraceContext};
use leveret_sql::{ErrorKind, Order, Outbox, Outgoing, RelayBuilder, RelayEvent};
use leveret_testkit::eventually;
use sqlx::Pool;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::database::{Db, Lang, schema, table};

const DEADLINE: Duration = Duration::from_secs(60);

/// A database with its tables, and a broker with the queue `q` and the exchange `events`, whose events are for `q`.
pub struct Stage {
    pub pool: Pool<Db>,
    pub client: Client,
    pub outbox: Outbox<Lang>,
}

impl Stage {
    pub async fn new(pool: Pool<Db>) -> Self {
        Stage::with(pool, Client::embedded().await.unwrap()).await
    }

    pub async fn with(pool: Pool<Db>, client: Client) -> Self {
        schema().migrate(&pool).await.unwrap();
        let topology = Topology::new()
            .exchange(Exchange::topic("events"))
            .queue(Queue::classic("q").bind("events", "event.#"));
        client.apply(&topology).await.unwrap();
        Stage { pool, client, outbox: Outbox::new(schema()) }
    }

    /// In a transaction of their own.
    pub async fn write(&self, outgoing: impl IntoIterator<Item = Outgoing>) {
        write(&self.pool, &self.outbox, outgoing).await;
    }

    /// One that is quick to try again.
    pub fn relay(&self) -> RelayBuilder {
        let (initial, max) = (Duration::from_millis(20), Duration::from_millis(20));
        let backoff = Backoff { initial, multiplier: 1.0, max };
        self.outbox.relay(&self.client, &self.pool).backoff(backoff)
    }

    pub async fn drain(&self) {
        self.relay().build().await.unwrap().drain().await.unwrap();
    }

    /// The next so many messages of a queue. They stay in it.
    pub async fn received(&self, queue: &str, count: usize) -> Vec<Delivery> {
        let mut deliveries = self.client.consumer(queue).prefetch(10_000).stream().await.unwrap();
        let mut all = Vec::new();
        while all.len() < count {
            let next = timeout(DEADLINE, deliveries.next()).await;
            let delivery = next.unwrap_or_else(|_| panic!("only {} of {count} came", all.len()));
            all.push(delivery.unwrap().unwrap());
        }
        all
    }

    /// Takes the next so many messages from a queue.
    pub async fn texts(&self, queue: &str, count: usize) -> Vec<String> {
        let mut texts = Vec::new();
        for delivery in self.received(queue, count).await {
            texts.push(text(&delivery));
            delivery.ack().unwrap();
        }
        texts
    }

    pub async fn backlog(&self) -> (u64, u64) {
        let backlog = self.outbox.backlog(&self.pool).await.unwrap();
        (backlog.waiting, backlog.set_aside)
    }
}

pub async fn write(
    pool: &Pool<Db>,
    outbox: &Outbox<Lang>,
    outgoing: impl IntoIterator<Item = Outgoing>,
) {
    let mut transaction = pool.begin().await.unwrap();
    outbox.write_all(&mut *transaction, outgoing).await.unwrap();
    transaction.commit().await.unwrap();
}

fn text(delivery: &Delivery) -> String {
    String::from_utf8(delivery.body().to_vec()).unwrap()
}

fn to_q(text: impl Into<String>) -> Outgoing {
    Outgoing::new("", "q", text.into())
}

pub async fn what_is_committed_is_sent_and_nothing_else(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    let mut transaction = stage.pool.begin().await.unwrap();
    stage.outbox.publish(&mut *transaction, "", "q", "never").await.unwrap();
    transaction.rollback().await.unwrap();
    let mut transaction = stage.pool.begin().await.unwrap();
    let message = Message::new("hello").header("tenant", "acme").kind("greeting").message_id("1");
    let context = TraceContext::root();
    let writing = stage.outbox.publish(&mut *transaction, "events", "event.hello", message);
    context.clone().scope(writing).await.unwrap();
    stage.outbox.publish(&mut *transaction, "", "q", "bye").await.unwrap();
    transaction.commit().await.unwrap();

    let summary = stage.relay().build().await.unwrap().drain().await.unwrap();
    assert_eq!((summary.sent, summary.refused), (2, 0));
    assert_eq!(stage.backlog().await, (0, 0));
    let mut all = stage.received("q", 2).await;
    all.sort_by_key(text);
    let [bye, hello] = &all[..] else { panic!("{all:?}") };
    let properties = hello.properties();
    assert_eq!((text(bye), text(hello)), ("bye".to_owned(), "hello".to_owned()));
    assert_eq!(hello.routing_key(), "event.hello");
    assert_eq!(properties.message_id.as_ref().unwrap().to_string(), "1");
    assert_eq!(properties.kind.as_ref().unwrap().to_string(), "greeting");
    assert_eq!(properties.delivery_mode, Some(2));
    assert_eq!(hello.header("tenant").unwrap().as_str(), Some("acme"));
    assert_eq!(hello.header("traceparent").unwrap().as_str(), Some(&*context.to_string()));
    assert_eq!(bye.properties().message_id.as_ref().unwrap().to_string().len(), 32);
}

/// Three relays at work while messages are written: none is sent twice, since nothing fails.
pub async fn several_relays_send_each_once_and_in_order_of_its_key(pool: Pool<Db>) {
    const KEYS: usize = 20;
    const OF_EACH: usize = 50;
    let stage = Stage::new(pool).await;
    let (stopper, stopped) = tokio::sync::watch::channel(false);
    let mut relays = JoinSet::new();
    for _ in 0..3 {
        let relay = stage.relay().batch(64).build().await.unwrap();
        let mut stopped = stopped.clone();
        relays.spawn(
            relay.run_until(async move { stopped.wait_for(|stopped| *stopped).await.map(drop) }),
        );
    }
    for number in 0..OF_EACH {
        let one = |key: usize| to_q(format!("{key} {number}")).ordered_by(format!("key {key}"));
        stage.write((0..KEYS).map(one)).await;
        stage.write([to_q(format!("none {number}"))]).await;
    }
    let all = stage.texts("q", KEYS * OF_EACH + OF_EACH).await;
    stopper.send_replace(true);
    let mut sent = 0;
    while let Some(summary) = relays.join_next().await {
        sent += summary.unwrap().unwrap().sent;
    }
    assert_eq!(sent as usize, all.len());
    assert_eq!(stage.backlog().await, (0, 0));
    let mut next: HashMap<&str, usize> = HashMap::new();
    for text in all.iter().filter(|text| !text.starts_with("none")) {
        let (key, number) = text.split_once(' ').unwrap();
        let next = next.entry(key).or_default();
        assert_eq!(number, next.to_string(), "of key {key}");
        *next += 1;
    }
    assert_eq!(next.len(), KEYS);
}

pub async fn what_is_refused_again_and_again_is_set_aside(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    stage
        .write([
            Outgoing::new("", "nowhere", "unroutable"),
            to_q("1"),
            Outgoing::new("no such exchange", "x", "lost"),
            to_q("2"),
            Outgoing::new("", "nowhere", "may be").allow_unroutable(),
        ])
        .await;
    let relay = stage.relay().attempts(3).poll_every(Duration::from_millis(10)).build();
    let relay = relay.await.unwrap();
    let monitor = relay.monitor();
    let mut events = monitor.watch();
    let both_are_aside = eventually(DEADLINE, "both to be set aside", || {
        std::future::ready(monitor.summary().set_aside == 2)
    });
    let summary = relay.run_until(both_are_aside).await.unwrap();
    assert_eq!((summary.sent, summary.refused, summary.set_aside), (3, 6, 2));
    drop(monitor);
    let mut told = HashMap::new();
    while let Some(event) = events.next().await {
        match event {
            RelayEvent::Refused { routing_key, .. } => *told.entry(routing_key).or_insert(0) += 1,
            RelayEvent::SetAside { routing_key, .. } => *told.entry(routing_key).or_insert(0) += 10,
            other => panic!("{other}"),
        }
    }
    assert_eq!(told, [("nowhere".to_owned(), 12), ("x".to_owned(), 12)].into());
    let mut texts = stage.texts("q", 2).await;
    texts.sort();
    assert_eq!(texts, ["1", "2"]);

    let aside = stage.outbox.aside(&stage.pool);
    let list = aside.list(0, 10).await.unwrap();
    let [unroutable, lost] = &list[..] else { panic!("{list:?}") };
    assert_eq!((unroutable.attempts, unroutable.routing_key.as_str()), (3, "nowhere"));
    assert_eq!(unroutable.message.body(), "unroutable");
    assert!(unroutable.error.contains("NO_ROUTE"), "{}", unroutable.error);
    assert!(lost.error.contains("there is no exchange \"no such exchange\""), "{}", lost.error);
    assert_eq!(aside.list(unroutable.id, 10).await.unwrap().len(), 1);
    assert_eq!(aside.list(0, 1).await.unwrap().len(), 1);

    // What was wrong is put right for one, and the other given up.
    stage.client.apply(&Topology::new().queue(Queue::classic("nowhere"))).await.unwrap();
    assert_eq!(aside.discard(&[lost.id]).await.unwrap(), 1);
    assert_eq!(aside.send_again(&[lost.id]).await.unwrap(), 0);
    assert_eq!(aside.send_again(&[unroutable.id]).await.unwrap(), 1);
    stage.drain().await;
    assert_eq!(stage.texts("nowhere", 1).await, ["unroutable"]);
    assert_eq!(stage.backlog().await, (0, 0));
}

pub async fn a_refused_message_holds_its_key_and_no_other(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    let late = |text: &'static str| Outgoing::new("events", "late", text);
    stage.write([late("1").ordered_by("a"), to_q("2").ordered_by("a")]).await;
    stage.write([to_q("other").ordered_by("b")]).await;
    let relay = stage.relay().poll_every(Duration::from_millis(10)).build().await.unwrap();
    let monitor = relay.monitor();
    let (stopper, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(relay.run_until(stopped));
    eventually(DEADLINE, "a few attempts", || std::future::ready(monitor.summary().refused > 3))
        .await;
    assert_eq!(monitor.summary().sent, 1);
    let bound = Topology::new().queue(Queue::classic("q").bind("events", "late"));
    stage.client.apply(&bound).await.unwrap();
    assert_eq!(stage.texts("q", 3).await, ["other", "1", "2"]);
    let _ = stopper.send(());
    assert_eq!(running.await.unwrap().unwrap().sent, 3);
}

/// However many there are: a lane in which everything has to wait must not be taken instead of others.
pub async fn keys_that_are_held_do_not_keep_others_waiting(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    for held in 0..200 {
        let lost = Outgoing::new("", "nowhere", "1").ordered_by(format!("held {held}"));
        stage.write([lost, to_q("2").ordered_by(format!("held {held}"))]).await;
    }
    let hour = Duration::from_secs(3600);
    let backoff = Backoff { initial: hour, multiplier: 1.0, max: hour };
    let relay = stage.relay().backoff(backoff).build().await.unwrap();
    let summary = relay.drain().await.unwrap();
    assert_eq!((summary.sent, summary.refused), (0, 200));
    stage.write((0..200).map(|other| to_q("3").ordered_by(format!("other {other}")))).await;
    assert_eq!(relay.drain().await.unwrap().sent, 200);
    assert_eq!(relay.drain().await.unwrap().sent, 0);
}

/// In the one way of ordering that lets them.
pub async fn later_messages_overtake_a_refused_one_if_pipelined(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    let lost = Outgoing::new("", "nowhere", "1").ordered_by("a");
    stage.write([lost, to_q("2").ordered_by("a"), to_q("3").ordered_by("a")]).await;
    let relay = stage.relay().order(Order::Pipelined).build().await.unwrap();
    assert_eq!(relay.drain().await.unwrap().sent, 2);
    assert_eq!(stage.texts("q", 2).await, ["2", "3"]);
}

pub async fn a_key_goes_on_without_what_is_set_aside_unless_it_is_held(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    for held in [false, true] {
        let lost = Outgoing::new("", "nowhere", "1").ordered_by("a");
        stage.write([lost, to_q("2").ordered_by("a"), to_q("other")]).await;
        let mut relay = stage.relay().attempts(1);
        if held {
            relay = relay.hold_keys();
        }
        let relay = relay.build().await.unwrap();
        let summary = relay.drain().await.unwrap();
        assert_eq!((summary.set_aside, summary.sent), (1, if held { 1 } else { 2 }));
        if held {
            assert_eq!(stage.backlog().await, (1, 1));
        }
        assert_eq!(stage.outbox.aside(&stage.pool).discard_all().await.unwrap(), 1);
        relay.drain().await.unwrap();
        assert_eq!(stage.backlog().await, (0, 0));
    }
}

pub async fn what_was_sent_is_kept_for_as_long_as_asked(
    pool: Pool<Db>,
    count: impl AsyncFn() -> i64,
) {
    let stage = Stage::new(pool).await;
    stage.write((0..10).map(|number| to_q(number.to_string()))).await;
    let kept = stage.relay().keep_sent(Duration::from_secs(3600)).build().await.unwrap();
    assert_eq!(kept.drain().await.unwrap().sent, 10);
    assert_eq!(kept.drain().await.unwrap().sent, 0);
    assert_eq!((count().await, stage.backlog().await), (10, (0, 0)));
    let relay = stage.relay().keep_sent(Duration::from_millis(1)).build().await.unwrap();
    let gone = eventually(DEADLINE, "the rows to go", async || count().await == 0);
    relay.run_until(gone).await.unwrap();

    // What was kept before goes even if nothing is to be kept any more.
    stage.write([to_q("kept")]).await;
    kept.drain().await.unwrap();
    assert_eq!(count().await, 1);
    let relay = stage.relay().build().await.unwrap();
    assert_eq!(relay.drain().await.unwrap().sent, 0);
    assert_eq!(count().await, 1, "deleted by a relay that does not run");
    let gone = eventually(DEADLINE, "the row to go", async || count().await == 0);
    relay.run_until(gone).await.unwrap();
}

pub async fn what_was_sent_when_it_is_stopped_is_noted(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    stage.write((0..500).map(|number| to_q(number.to_string()).ordered_by("one"))).await;
    let relay = stage.relay().batch(100).build().await.unwrap();
    let monitor = relay.monitor();
    let some =
        eventually(DEADLINE, "some to be sent", || std::future::ready(monitor.summary().sent > 0));
    let summary = relay.run_until(some).await.unwrap();
    assert!(!monitor.health().is_running);
    assert_eq!(stage.backlog().await.0, 500 - summary.sent);
    stage.drain().await;
    let numbers: Vec<String> = (0..500).map(|number: i32| number.to_string()).collect();
    assert_eq!(stage.texts("q", 500).await, numbers);
}

pub async fn a_relay_ends_with_its_client(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    let relay = stage.relay().build().await.unwrap();
    let monitor = relay.monitor();
    let running = tokio::spawn(relay.run());
    eventually(DEADLINE, "the relay to run", || std::future::ready(monitor.health().is_healthy()))
        .await;
    stage.client.close().await;
    stage.write([to_q("left")]).await;
    let error = timeout(DEADLINE, running).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker);
    assert_eq!(error.leveret().unwrap().kind(), leveret::ErrorKind::Closed);
    assert!(!monitor.health().is_healthy());
    assert_eq!(stage.backlog().await, (1, 0));
}

/// `spoil` overwrites the properties in all rows.
pub async fn a_row_that_cannot_be_read_is_set_aside_at_once(
    pool: Pool<Db>,
    spoil: impl AsyncFnOnce(),
) {
    let stage = Stage::new(pool).await;
    stage.write([to_q("spoilt")]).await;
    spoil().await;
    stage.write([to_q("sound")]).await;
    let summary = stage.relay().build().await.unwrap().drain().await.unwrap();
    assert_eq!((summary.sent, summary.set_aside), (1, 1));
    let list = stage.outbox.aside(&stage.pool).list(0, 10).await.unwrap();
    assert!(list[0].error.contains("cannot be read"), "{}", list[0].error);
}

/// More than a batch may hold at a time; and they come whole.
pub async fn large_messages_go_in_several_batches(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    let large = |number: u8| Outgoing::new("", "q", vec![number; 5 << 20]).ordered_by("one");
    stage.write((0..8).map(large)).await;
    let summary = stage.relay().build().await.unwrap().drain().await.unwrap();
    assert_eq!(summary.sent, 8);
    for (number, delivery) in stage.received("q", 8).await.iter().enumerate() {
        assert!(delivery.body() == &vec![number as u8; 5 << 20], "message {number}");
    }
}

pub async fn a_relay_without_tables_is_refused(pool: Pool<Db>) {
    let client = Client::embedded().await.unwrap();
    let refused = Outbox::new(schema()).relay(&client, &pool).build().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotMigrated);
}

/// It would look again in an hour.
pub async fn a_relay_ends_with_its_pool(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    stage.write([to_q("hello")]).await;
    let relay = stage.relay().poll_every(Duration::from_secs(3600)).build().await.unwrap();
    let monitor = relay.monitor();
    let story = async {
        let is_sent = || std::future::ready(monitor.summary().sent == 1);
        eventually(DEADLINE, "the message to be sent", is_sent).await;
        stage.pool.close().await;
        std::future::pending::<()>().await;
    };
    let ended = timeout(DEADLINE, relay.run_until(story)).await.expect("an end").unwrap_err();
    assert!(matches!(ended.sql(), Some(sqlx::Error::PoolClosed)), "{ended}");
}

/// As by who empties all tables between tests.
pub async fn lanes_that_were_deleted_come_back(pool: Pool<Db>) {
    let stage = Stage::new(pool).await;
    let table = table("outbox_lanes");
    let delete = || sqlx::raw_sql(sqlx::AssertSqlSafe(format!("DELETE FROM {table}")));
    delete().execute(&stage.pool).await.unwrap();
    stage.write([to_q("1")]).await;
    // It looks for them when it is made, and as often as it cleans up.
    let relay = stage.relay().poll_every(Duration::from_millis(20));
    let relay = relay.keep_sent(Duration::from_millis(50)).build().await.unwrap();
    let story = async {
        assert_eq!(stage.texts("q", 1).await, ["1"]);
        delete().execute(&stage.pool).await.unwrap();
        stage.write([to_q("2")]).await;
        assert_eq!(stage.texts("q", 1).await, ["2"]);
    };
    assert_eq!(relay.run_until(story).await.unwrap().sent, 2);
}

/// The test of each of these, on a database of its own that the function in scope, `pool`, makes.
#[allow(unused_macros)]
macro_rules! tests {
    () => {
        crate::support::outbox::tests! {
            what_is_committed_is_sent_and_nothing_else
            several_relays_send_each_once_and_in_order_of_its_key
            what_is_refused_again_and_again_is_set_aside
            a_refused_message_holds_its_key_and_no_other
            keys_that_are_held_do_not_keep_others_waiting
            later_messages_overtake_a_refused_one_if_pipelined
            a_key_goes_on_without_what_is_set_aside_unless_it_is_held
            what_was_sent_when_it_is_stopped_is_noted
            a_relay_ends_with_its_client
            large_messages_go_in_several_batches
            a_relay_without_tables_is_refused
            a_relay_ends_with_its_pool
            lanes_that_were_deleted_come_back
        }
    };
    ($($name:ident)*) => {$(
        #[tokio::test]
        async fn $name() {
            let (_database, pool) = pool().await;
            crate::support::outbox::$name(pool).await;
        }
    )*};
}

#[allow(unused_imports)]
pub(crate) use tests;
