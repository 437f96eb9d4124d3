//! Objects by the thousands: what one client sets up must not keep the others waiting, or take memory that is not given back.
//!
//! Nothing is timed here. Where the work grew with the square of what there is, these tests would take minutes.

use std::pin::pin;
use std::task::{Context, Waker};

use bytes::Bytes;
use leveret_wire::method::{basic, exchange, queue, tx};
use leveret_wire::{Array, Outbound, Properties, RawProperties, Value};

use super::*;
use crate::users::Permissions;

const MANY: usize = 20_000;

/// Where each of them costs little.
const VERY_MANY: usize = 100_000;

/// A virtual host with one client, which is not read from.
struct Stage {
    vhost: Vhost,
    connection: ConnectionId,
    channel: ChannelId,
}

fn short(text: impl Into<String>) -> ShortStr<'static> {
    ShortStr::try_from(text.into()).unwrap()
}

impl Stage {
    fn new(profile: Profile) -> Self {
        let settings = Settings { profile, consumer_timeout: u64::MAX, record: None };
        let mut vhost = Vhost::new("/", settings, Clock::new());
        let connection = vhost.connect(Client {
            user: "guest".to_owned(),
            access: Arc::new(Access::new(&Permissions::all()).unwrap()),
            outlet: Arc::new(Outlet::new()),
            name: None,
            peer: None,
            hears_of_cancels: true,
        });
        let channel = vhost.open_channel(connection, 1);
        Stage { vhost, connection, channel }
    }

    fn ask<'m>(&mut self, method: impl Into<Method<'m>>) {
        self.vhost.method(self.channel, &method.into()).unwrap();
        self.vhost.renew();
    }

    fn declare(&mut self, name: &str, exclusive: bool, arguments: Table<'static>) {
        let queue = short(name);
        self.ask(queue::Declare {
            queue,
            exclusive,
            arguments,
            nowait: true,
            ..Default::default()
        });
    }

    fn queue(&mut self, name: &str) {
        self.declare(name, false, Table::new());
    }

    fn quorum_queue<const N: usize>(&mut self, name: &str, arguments: [(&str, Value<'_>); N]) {
        let arguments = [("x-queue-type", "quorum".into())].into_iter().chain(arguments);
        self.ask(queue::Declare {
            queue: short(name),
            durable: true,
            nowait: true,
            arguments: Table::from_pairs(arguments).unwrap(),
            ..Default::default()
        });
    }

    fn exchange(&mut self, name: &str, kind: &'static str) {
        let (exchange, kind) = (short(name), ShortStr::from_static(kind));
        self.ask(exchange::Declare { exchange, kind, nowait: true, ..Default::default() });
    }

    fn bind(
        &mut self,
        queue: &str,
        exchange: &str,
        key: impl Into<String>,
        arguments: Table<'static>,
    ) {
        self.ask(queue::Bind {
            queue: short(queue),
            exchange: short(exchange),
            routing_key: short(key),
            nowait: true,
            arguments,
        });
    }

    fn publish(&mut self, exchange: &str, key: &str, headers: Option<Table<'static>>) {
        self.publish_body(exchange, key, headers, Bytes::from_static(b"body"));
    }

    fn publish_body(
        &mut self,
        exchange: &str,
        key: &str,
        headers: Option<Table<'static>>,
        body: Bytes,
    ) {
        let incoming = Incoming {
            exchange: short(exchange),
            routing_key: short(key),
            mandatory: false,
            immediate: false,
            properties: RawProperties::from(&Properties { headers, ..Properties::default() }),
            body,
        };
        self.vhost.publish(self.channel, incoming).unwrap();
        self.vhost.renew();
    }

    fn consume(&mut self, queue: &str, arguments: Table<'static>) {
        self.ask(basic::Consume {
            queue: short(queue),
            nowait: true,
            arguments,
            ..Default::default()
        });
    }

    fn get(&mut self, queue: &str) {
        self.ask(basic::Get { queue: short(queue), no_ack: false });
    }

    fn ack(&mut self, delivery_tag: u64) {
        self.ask(basic::Ack { delivery_tag, multiple: false });
    }

    /// The client reads all that there is for it.
    fn read(&mut self) {
        let outlet = Arc::clone(&self.vhost.connections[self.connection].outlet);
        let mut buffer = Outbound::new();
        let mut taken = pin!(outlet.take(&mut buffer));
        // Nothing to wait for, unless there is nothing to read.
        let _ = taken.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        self.vhost.drained(self.connection);
        self.vhost.renew();
    }

    /// Often enough for its deliveries to go on.
    fn read_now_and_then(&mut self, number: usize) {
        if number.is_multiple_of(5000) {
            self.read();
        }
    }

    fn ready(&self, queue: &str) -> usize {
        self.vhost.queues[self.vhost.queue_names[queue.as_bytes()]].ready.len()
    }

    fn places(&self, queue: &str) -> Vec<u64> {
        let queue = &self.vhost.queues[self.vhost.queue_names[queue.as_bytes()]];
        queue.ready.iter().map(|entry| entry.place).collect()
    }
}

impl Vhost {
    /// The next call.
    fn renew(&mut self) {
        self.set_now(self.now);
    }
}

fn copies(header: &str, keys: impl IntoIterator<Item = String>) -> Table<'static> {
    let keys = Array::from_values(keys.into_iter().map(|key| key.as_str().to_owned().into()));
    Table::from_pairs([(header, keys.unwrap().into())]).unwrap()
}

#[test]
fn a_message_with_many_keys_is_routed_once() {
    const BINDINGS: usize = 1000;
    const KEYS: usize = 26_000;
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    for kind in ["fanout", "topic", "headers", "direct"] {
        stage.queue(kind);
        stage.exchange(kind, kind);
        for number in 0..BINDINGS {
            // All match in a fanout; in a topic exchange, two of them, each time.
            let key = if number == 0 { "#".to_owned() } else { format!("{number}.#") };
            stage.bind(kind, kind, key, Table::new());
        }
        stage.publish(kind, "", Some(copies("CC", (0..KEYS).map(|_| String::new()))));
        stage.publish(kind, "", Some(copies("CC", (0..KEYS).map(|key| key.to_string()))));
        assert_eq!(stage.ready(kind), if kind == "direct" { 0 } else { 2 }, "{kind}");
        let capacity = stage.vhost.routes.capacity();
        assert!(capacity <= 8 * BINDINGS, "{kind}: room for {capacity}");
    }
}

#[test]
fn what_comes_back_before_many_others_is_merged_with_them() {
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    stage.queue("q");
    (0..2 * MANY).for_each(|_| stage.publish("", "q", None));
    (0..MANY).for_each(|_| stage.get("q"));
    stage.ask(basic::Recover { requeue: true });
    let expected: Vec<_> = (1..=2 * MANY as u64).collect();
    assert_eq!(stage.places("q"), expected);

    // Every other one of what is there.
    let other = stage.vhost.open_channel(stage.connection, 2);
    for number in 0..MANY {
        let channel = if number % 2 == 0 { stage.channel } else { other };
        let get = basic::Get { queue: short("q"), no_ack: false };
        stage.vhost.method(channel, &get.into()).unwrap();
    }
    stage.vhost.close_channel(other);
    stage.vhost.close_channel(stage.channel);
    assert_eq!(stage.places("q"), expected);
}

#[test]
fn acks_from_the_middle_of_many_deliveries_are_carried_out() {
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    stage.queue("q");
    let (count, middle) = (2 * MANY as u64, MANY as u64);
    (0..count).for_each(|_| stage.publish("", "q", None));
    (0..count).for_each(|_| stage.get("q"));
    for distance in 0..middle - 1 {
        stage.ack(middle + distance);
        stage.ack(middle - distance - 1);
    }
    assert_eq!(stage.vhost.channels[stage.channel].unsettled_count(), 2);
    let again = basic::Ack { delivery_tag: middle, multiple: false };
    assert!(stage.vhost.method(stage.channel, &again.into()).is_err());
}

#[test]
fn many_acks_are_rolled_back() {
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    stage.queue("q");
    (0..2 * MANY).for_each(|_| stage.publish("", "q", None));
    (0..2 * MANY).for_each(|_| stage.get("q"));
    stage.ask(tx::Select {});
    for tag in 1..=MANY as u64 {
        stage.ack(tag);
    }
    stage.ask(tx::Rollback {});
    stage.ask(basic::Ack { delivery_tag: 0, multiple: true });
    stage.ask(tx::Commit {});
    stage.read();
    assert_eq!((stage.vhost.memory(), stage.vhost.tally.acked), (0, 2 * MANY as u64));
}

#[test]
fn many_bindings_go_with_their_queues() {
    for kind in ["fanout", "direct", "topic", "headers"] {
        let mut stage = Stage::new(Profile::RabbitMq4_3);
        stage.exchange("x", kind);
        stage.queue("q");
        let arguments = |number: usize| Table::from_pairs([("n", (number as i32).into())]).unwrap();
        for number in 0..MANY {
            let name = format!("own {number}");
            stage.declare(&name, true, Table::new());
            stage.bind(&name, "x", "", arguments(0));
            stage.bind("q", "x", number.to_string(), arguments(number));
        }
        stage.ask(queue::Delete { queue: short("q"), ..Default::default() });
        // Bound last, unbound first.
        for number in (0..MANY / 2).rev() {
            stage.ask(queue::Unbind {
                queue: short(format!("own {number}")),
                exchange: short("x"),
                routing_key: short(""),
                arguments: arguments(0),
            });
        }
        stage.vhost.disconnect(stage.connection);
        let exchange = &stage.vhost.exchanges[stage.vhost.exchange_names[&b"x"[..]]];
        assert!(exchange.bindings.is_empty());
        assert_eq!(stage.vhost.queues.len(), 0, "{kind}");
    }
}

#[test]
fn a_queue_with_many_sources_loses_them_one_by_one() {
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    stage.queue("q");
    for number in 0..MANY {
        let name = format!("x{number}");
        stage.exchange(&name, "fanout");
        stage.bind("q", &name, "", Table::new());
    }
    for number in 0..MANY {
        let exchange = short(format!("x{number}"));
        match number % 2 {
            0 => stage.ask(exchange::Delete { exchange, nowait: true, ..Default::default() }),
            _ => stage.ask(queue::Unbind {
                queue: short("q"),
                exchange,
                routing_key: short(""),
                arguments: Table::new(),
            }),
        }
    }
    assert!(stage.vhost.queues[stage.vhost.queue_names[&b"q"[..]]].bound_to.is_empty());
}

#[test]
fn many_arguments_and_headers_are_compared() {
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let mut stage = Stage::new(profile);
        stage.queue("q");
        stage.exchange("x", "headers");
        // Two bytes each: an empty name, and nothing.
        let same = Table::decode(&b"\0V".repeat(65_000)).unwrap().into_owned();
        let several = (0..10_000).map(|number| (number.to_string(), number));
        let mut different = Vec::new();
        for (name, number) in several {
            let field = Table::from_pairs([(name.as_str(), number.into())]).unwrap();
            different.extend_from_slice(field.as_bytes());
        }
        let different = Table::decode(&different).unwrap().into_owned();
        for (at, table) in [same, different].into_iter().enumerate() {
            stage.bind("q", "x", "", table.clone());
            stage.publish("x", "", Some(table));
            assert_eq!(stage.ready("q"), at + 1, "{profile:?}");
        }
    }
}

#[test]
fn a_message_with_many_secret_keys_dies() {
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let mut stage = Stage::new(profile);
        let arguments = [("x-message-ttl", 0.into()), ("x-dead-letter-exchange", "x".into())];
        stage.declare("q", false, Table::from_pairs(arguments).unwrap());
        stage.exchange("x", "fanout");
        stage.queue("dead");
        stage.bind("dead", "x", "", Table::new());
        // Looked for from the front, the last would be found last.
        stage.publish("", "q", Some(copies("BCC", (0..26_000).map(|key| key.to_string()))));
        stage.vhost.go_on_burying();
        assert_eq!(stage.ready("dead"), 1);
        assert!(stage.vhost.memory() > 1_000_000, "{} bytes", stage.vhost.memory());
        stage.ask(queue::Purge { queue: short("dead"), nowait: true });
        assert_eq!(stage.vhost.memory(), 0);
    }
}

#[test]
fn channels_with_many_deliveries_of_many_queues_are_closed() {
    const QUEUES: usize = 2000;
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    stage.queue("q");
    (0..MANY).for_each(|_| stage.publish("", "q", None));
    for number in 0..QUEUES {
        let name = format!("q{number}");
        let arguments = Table::from_pairs([("x-dead-letter-exchange", "".into())]).unwrap();
        stage.declare(&name, false, arguments);
        let consumer_tag = ShortStr::EMPTY;
        let queue = short(name);
        stage.ask(basic::Consume { queue, consumer_tag, nowait: true, ..Default::default() });
    }
    (0..QUEUES).for_each(|number| stage.publish("", &format!("q{number}"), None));
    (0..MANY).for_each(|_| stage.get("q"));
    stage.vhost.close_channel(stage.channel);
    assert_eq!(stage.ready("q"), MANY);
    assert!((0..QUEUES).all(|number| stage.ready(&format!("q{number}")) == 1));
}

#[test]
fn deadlines_of_queues_that_are_gone_are_forgotten() {
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    let expires = Table::from_pairs([("x-expires", 3_600_000.into())]).unwrap();
    let stays = "stays";
    stage.declare(stays, false, expires.clone());
    stage.get(stays);
    for _ in 0..10_000 {
        stage.declare("q", false, expires.clone());
        stage.get("q");
        stage.ask(queue::Delete { queue: short("q"), ..Default::default() });
    }
    let deadlines = stage.vhost.deadlines.len();
    assert!((1..3000).contains(&deadlines), "{deadlines} deadlines");
    stage.vhost.set_now(Moment::START.after_millis(4_000_000));
    stage.vhost.meet_deadlines();
    assert!(stage.vhost.queue_names.is_empty());
}

#[test]
fn many_consumers_share_a_queue_and_leave_it() {
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    stage.queue("q");
    stage.ask(basic::Qos { prefetch_count: 1, ..Default::default() });
    (0..VERY_MANY).for_each(|_| stage.consume("q", Table::new()));
    for number in 0..2 * VERY_MANY {
        stage.publish("", "q", None);
        stage.read_now_and_then(number);
    }
    assert_eq!((stage.vhost.tally.delivered, stage.ready("q")), (VERY_MANY as u64, VERY_MANY));
    // Those ack first that were found last to have no room.
    for tag in (1..=VERY_MANY).rev() {
        stage.ack(tag as u64);
        stage.read_now_and_then(tag);
    }
    assert_eq!((stage.vhost.tally.delivered, stage.ready("q")), (2 * VERY_MANY as u64, 0));
    stage.vhost.close_channel(stage.channel);
    assert!(stage.vhost.consumers.is_empty());
    assert_eq!(stage.ready("q"), VERY_MANY);
}

#[test]
fn one_of_many_consumers_is_active_and_acks() {
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    stage.quorum_queue("q", [("x-single-active-consumer", true.into())]);
    (0..VERY_MANY).for_each(|_| stage.consume("q", Table::new()));
    for tag in 1..=VERY_MANY {
        stage.publish("", "q", None);
        stage.ack(tag as u64);
        stage.read_now_and_then(tag);
    }
    assert_eq!(stage.vhost.tally.acked, VERY_MANY as u64);
    stage.vhost.close_channel(stage.channel);
    assert!(stage.vhost.consumers.is_empty());
}

#[test]
fn many_deliveries_are_taken_away_and_acked_late() {
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    stage.quorum_queue("q", []);
    stage.ask(basic::Qos { prefetch_count: 1, ..Default::default() });
    // They take turns, and every other delivery is due after the others.
    for number in 0..VERY_MANY {
        let timeout = if number % 2 == 0 { 120_000 } else { 60_000 };
        let timeout = Table::from_pairs([("x-consumer-timeout", timeout.into())]).unwrap();
        stage.consume("q", timeout);
    }
    for number in 0..VERY_MANY {
        stage.publish("", "q", None);
        stage.read_now_and_then(number);
    }
    assert_eq!(stage.vhost.tally.delivered, VERY_MANY as u64);
    for seconds in [61, 121] {
        stage.vhost.set_now(Moment::START.after_millis(seconds * 1000));
        stage.vhost.meet_deadlines();
        stage.read();
    }
    assert_eq!(stage.ready("q"), VERY_MANY);
    for tag in (1..=VERY_MANY).rev() {
        stage.ack(tag as u64);
        stage.read_now_and_then(tag);
    }
    // Consumers get messages again once they have acked.
    assert_eq!((stage.vhost.tally.acked, stage.ready("q")), (0, 0));
}

#[test]
fn messages_with_large_headers_die_a_few_at_a_time() {
    const MESSAGES: usize = 64;
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        let mut stage = Stage::new(profile);
        let to = Table::from_pairs([("x-dead-letter-exchange", "x".into())]).unwrap();
        stage.declare("q", false, to);
        stage.exchange("x", "fanout");
        stage.queue("dead");
        stage.bind("dead", "x", "", Table::new());
        let headers: Vec<_> = (0..5000).map(|number| (format!("h{number}"), number)).collect();
        let headers = headers.iter().map(|(name, number)| (name.as_str(), (*number).into()));
        let headers = Table::from_pairs(headers).unwrap();
        for _ in 0..MESSAGES {
            stage.publish("", "q", Some(headers.clone()));
            stage.get("q");
        }
        let tag = MESSAGES as u64;
        let nack = basic::Nack { delivery_tag: tag, multiple: true, requeue: false };
        stage.vhost.method(stage.channel, &nack.into()).unwrap();
        let mut dead = stage.ready("dead");
        assert!((1..10).contains(&dead), "{profile:?}: {dead} at once");
        while dead < MESSAGES {
            stage.vhost.renew();
            stage.vhost.go_on_burying();
            let before = std::mem::replace(&mut dead, stage.ready("dead"));
            assert!((1..10).contains(&(dead - before)), "{profile:?}: {dead} after {before}");
        }
    }
}

/// A headers exchange reads of each death.
#[test]
fn messages_with_many_deaths_are_routed_by_their_headers_a_few_at_a_time() {
    const STATIONS: usize = 100;
    const MESSAGES: usize = 100;
    let mut stage = Stage::new(Profile::RabbitMq3_10);
    for number in 0..STATIONS {
        let next = match number + 1 {
            STATIONS => {
                [("x-dead-letter-exchange", "x".into()), ("x-message-ttl", 1.into())].to_vec()
            }
            next => {
                let key = format!("q{next}");
                vec![
                    ("x-dead-letter-exchange", "".into()),
                    ("x-dead-letter-routing-key", key.into()),
                    ("x-message-ttl", 0.into()),
                ]
            }
        };
        stage.declare(&format!("q{number}"), false, Table::from_pairs(next).unwrap());
    }
    stage.exchange("x", "headers");
    stage.queue("dead");
    stage.bind("dead", "x", "", Table::new());
    let last = format!("q{}", STATIONS - 1);
    for _ in 0..MESSAGES {
        stage.publish("", "q0", None);
        while !stage.vhost.dying.is_empty() {
            stage.vhost.renew();
            stage.vhost.go_on_burying();
        }
    }
    assert_eq!(stage.ready(&last), MESSAGES);
    stage.vhost.set_now(stage.vhost.now.after_millis(1000));
    stage.vhost.meet_deadlines();
    let dead = stage.ready("dead");
    assert!((1..MESSAGES / 2).contains(&dead), "{dead} at once");
}

/// As long as they are few, they share the reads that they came in: that saves a copy.
#[test]
fn bodies_do_not_keep_much_of_the_reads_they_came_in() {
    const READS: usize = 3000;
    let mut stage = Stage::new(Profile::RabbitMq4_3);
    stage.queue("q");
    for _ in 0..2 {
        let reads: Vec<_> = (0..READS).map(|_| Bytes::from(vec![7; 8 * 1024])).collect();
        reads.iter().for_each(|read| stage.publish_body("", "q", None, read.slice(..4096)));
        let kept = || reads.iter().filter(|read| !read.is_unique()).count();
        assert!((1..=1024).contains(&kept()), "{} are kept", kept());
        // Where they are makes no difference.
        (0..READS).for_each(|_| stage.get("q"));
        assert!((1..=1024).contains(&kept()), "{} are kept", kept());
        stage.ask(basic::Ack { delivery_tag: 0, multiple: true });
        stage.read();
        assert_eq!((kept(), stage.vhost.memory()), (0, 0));
    }
}
