//! Objects by the thousands: what one client sets up must not keep the others waiting, or take memory that is not given back.
//!
//! Nothing is timed here. Where the work grew with the square of what there is, these tests would take minutes.

use bytes::Bytes;
use leveret_wire::method::{basic, exchange, queue, tx};
use leveret_wire::{Array, Properties, RawProperties};

use super::*;
use crate::users::Permissions;

const MANY: usize = 20_000;

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
        let incoming = Incoming {
            exchange: short(exchange),
            routing_key: short(key),
            mandatory: false,
            immediate: false,
            properties: RawProperties::from(&Properties { headers, ..Properties::default() }),
            body: Bytes::from_static(b"body"),
        };
        self.vhost.publish(self.channel, incoming).unwrap();
        self.vhost.renew();
    }

    fn get(&mut self, queue: &str) {
        self.ask(basic::Get { queue: short(queue), no_ack: false });
    }

    fn ack(&mut self, delivery_tag: u64) {
        self.ask(basic::Ack { delivery_tag, multiple: false });
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
