//! Arguments of queues and bindings, and headers of messages: good ones, and such as a broker refuses.

use leveret_wire::{Array, Properties, ShortStr, Table, Value};

use super::program::{SHORT_EXPIRES, SHORT_TTL, table};
use super::random::Random;

type Pairs = Vec<(&'static str, Value<'static>)>;

/// What kind of times a program has: see `differential` for why not both.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Times {
    Long,
    ShortTtl,
    ShortExpires,
}

/// The arguments of a classic queue that a broker takes, without those for dead-lettering.
pub(super) fn classic(random: &mut Random, times: Times, dead_letters: bool) -> Pairs {
    let mut pairs = Pairs::new();
    if random.percent(35) {
        return pairs;
    }
    if random.percent(20) || times == Times::ShortTtl {
        let short = times == Times::ShortTtl && random.percent(70);
        let ttl = if short { SHORT_TTL } else { random.pick(&[0, 600_000]) };
        pairs.push(("x-message-ttl", number(random, ttl)));
    }
    if random.percent(8) || times == Times::ShortExpires {
        let short = times == Times::ShortExpires && random.percent(70);
        let expires = if short { SHORT_EXPIRES } else { 600_000 };
        pairs.push(("x-expires", number(random, expires)));
    }
    if random.percent(30) {
        let most = random.pick(&[0, 1, 2, 3]);
        pairs.push(("x-max-length", number(random, most)));
    }
    if random.percent(10) {
        let most = random.pick(&[0, 2, 5, 12]);
        pairs.push(("x-max-length-bytes", number(random, most)));
    }
    if random.percent(20) {
        let overflow = random.pick(&["drop-head", "reject-publish", "reject-publish-dlx"]);
        pairs.push(("x-overflow", overflow.into()));
    }
    if random.percent(20) {
        // RabbitMQ takes its time for a queue with all of them, and others must not run out meanwhile.
        let most = match times {
            Times::ShortExpires => random.pick(&[1, 3, 10]),
            _ => random.weighted(&[(35, 1), (30, 3), (30, 10), (5, 255)]),
        };
        pairs.push(("x-max-priority", number(random, most)));
    }
    if random.percent(12) {
        pairs.push(("x-single-active-consumer", random.percent(80).into()));
    }
    if random.percent(8) {
        pairs.push(("x-queue-type", "classic".into()));
    }
    if random.percent(5) && !dead_letters {
        pairs.push(("x-queue-mode", random.pick(&["lazy", "default"]).into()));
    }
    if random.percent(4) {
        pairs.push(("x-nobody-knows", 1.into()));
    }
    pairs
}

/// The arguments of a quorum queue that a broker takes, without dead-lettering.
pub(super) fn quorum(random: &mut Random, times: Times) -> Pairs {
    let mut pairs = vec![("x-queue-type", "quorum".into())];
    if random.percent(40) {
        let limit = random.pick(&[0, 1, 2, 3]);
        pairs.push(("x-delivery-limit", number(random, limit)));
    }
    if times == Times::ShortTtl {
        pairs.push(("x-message-ttl", number(random, SHORT_TTL)));
    }
    if random.percent(8) {
        pairs.push(("x-expires", number(random, 600_000)));
    }
    if random.percent(20) {
        let most = random.pick(&[1, 2, 3]);
        pairs.push(("x-max-length", number(random, most)));
    }
    if random.percent(15) {
        let overflow = random.pick(&["drop-head", "reject-publish"]);
        pairs.push(("x-overflow", overflow.into()));
    }
    if random.percent(15) {
        pairs.push(("x-single-active-consumer", true.into()));
    }
    pairs
}

/// One argument that is wrong, odd or of the wrong kind of queue.
pub(super) fn doubtful(random: &mut Random) -> (&'static str, Value<'static>) {
    let numbers = [
        "x-message-ttl",
        "x-expires",
        "x-max-length",
        "x-max-length-bytes",
        "x-max-priority",
        "x-delivery-limit",
        "x-quorum-initial-group-size",
    ];
    let values: [Value<'static>; 9] = [
        (-1).into(),
        0.into(),
        "10".into(),
        1.5f64.into(),
        true.into(),
        256.into(),
        i64::MAX.into(),
        Value::Void,
        Value::Timestamp(5),
    ];
    let odd: [(&'static str, Value<'static>); 15] = [
        ("x-overflow", "nonsense".into()),
        ("x-overflow", 1.into()),
        ("x-overflow", "reject-publish-dlx".into()),
        ("x-dead-letter-exchange", 5.into()),
        ("x-dead-letter-exchange", "no/such".into()),
        ("x-dead-letter-routing-key", "q1".into()),
        ("x-dead-letter-routing-key", true.into()),
        ("x-single-active-consumer", "true".into()),
        ("x-queue-type", "nonsense".into()),
        ("x-queue-type", 1.into()),
        ("x-queue-mode", "nonsense".into()),
        ("x-queue-leader-locator", "nonsense".into()),
        ("x-dead-letter-strategy", "at-most-once".into()),
        ("x-dead-letter-strategy", "nonsense".into()),
        ("x-queue-version", 7.into()),
    ];
    if random.percent(50) {
        let (name, value) = (random.pick(&numbers), random.pick(&values));
        // Not so short that a queue is gone before it is looked at.
        let short = name == "x-expires" && value == 256.into();
        (name, if short { 600_000.into() } else { value })
    } else {
        random.pick(&odd)
    }
}

/// The same number in one of the widths that a client may choose.
fn number(random: &mut Random, n: i32) -> Value<'static> {
    match random.below(6) {
        0 => Value::I64(n.into()),
        1 => i16::try_from(n).map_or(Value::I32(n), Value::I16),
        2 => u8::try_from(n).map_or(Value::I32(n), Value::U8),
        3 => i8::try_from(n).map_or(Value::I32(n), Value::I8),
        _ => Value::I32(n),
    }
}

/// Arguments of a binding: of a headers exchange, mostly.
pub(super) fn binding(random: &mut Random) -> Table<'static> {
    let mut pairs = Pairs::new();
    if random.percent(70) {
        let kinds = ["all", "any", "all-with-x", "any-with-x", "nonsense"];
        let weights = [(30, 0), (30, 1), (15, 2), (15, 3), (2, 4)];
        pairs.push(("x-match", kinds[random.weighted(&weights)].into()));
    }
    if random.percent(60) {
        pairs.push(("h1", random.pick(&[Value::from("a"), 1.into(), true.into(), Value::Void])));
    }
    if random.percent(40) {
        pairs.push(("h2", random.pick(&[Value::from("b"), 1i64.into(), 1.0f64.into()])));
    }
    if random.percent(20) {
        pairs.push(("x-h", "x".into()));
    }
    table(pairs)
}

/// The properties of a message.
pub(super) fn properties(random: &mut Random, times: Times) -> Properties<'static> {
    let mut properties = Properties::default();
    if random.percent(40) {
        return properties;
    }
    let short = ShortStr::from_static;
    if random.percent(40) {
        properties.delivery_mode = Some(random.weighted(&[(40, 1), (55, 2), (3, 0), (2, 3)]));
    }
    if random.percent(30) {
        properties.priority = Some(random.pick(&[0, 1, 2, 3, 5, 255]));
    }
    if random.percent(15) || times == Times::ShortTtl {
        let ttl = match times {
            Times::ShortTtl if random.percent(60) => SHORT_TTL.to_string(),
            _ => {
                let odd = ["0", "600000", "", "-1", "abc", "1.5", "10 ", "99999999999"];
                let weights = [(40, 0), (40, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 6), (3, 7)];
                odd[random.weighted(&weights)].to_owned()
            }
        };
        properties.expiration = Some(ttl.try_into().expect("short"));
    }
    if random.percent(40) {
        properties.headers = Some(headers(random));
    }
    if random.percent(6) {
        properties.user_id = Some(short(random.pick(&["guest", "guest", "somebody"])));
    }
    if random.percent(10) {
        properties.reply_to = Some(short(random.pick(&["q1", "amq.rabbitmq.reply-to"])));
    }
    if random.percent(10) {
        properties.content_type = Some(short("text/plain"));
        properties.content_encoding = Some(short("identity"));
        properties.correlation_id = Some(short("correlation"));
        properties.message_id = Some(short("id"));
        properties.timestamp = Some(1_000_000_000);
        properties.kind = Some(short("kind"));
        properties.app_id = Some(short("app"));
        properties.cluster_id = Some(short("cluster"));
    }
    properties
}

fn headers(random: &mut Random) -> Table<'static> {
    let mut pairs = Pairs::new();
    if random.percent(25) {
        let to = random.pick(&[vec!["q2"], vec!["q1", "q3"], vec!["a.b"], vec![], vec!["q1"]]);
        let copies = Array::from_values(to.into_iter().map(Value::from)).expect("short");
        pairs.push((random.pick(&["CC", "BCC"]), Value::Array(copies.into_owned())));
    }
    if random.percent(2) {
        pairs.push((random.pick(&["CC", "BCC"]), random.pick(&["q2".into(), Value::from(1)])));
    }
    if random.percent(40) {
        pairs.push(("h1", random.pick(&[Value::from("a"), "c".into(), 1.into(), true.into()])));
    }
    if random.percent(40) {
        pairs.push(("h2", random.pick(&[Value::from("b"), 1.into(), 1i64.into(), 1.0f64.into()])));
    }
    if random.percent(10) {
        pairs.push(("x-h", "x".into()));
    }
    if random.percent(10) {
        pairs.extend(every_type());
    }
    if random.percent(5) {
        pairs.push(("x-death", "forged".into()));
    }
    if random.percent(3) {
        pairs.push(("x-delivery-count", 7.into()));
    }
    random.shuffle(&mut pairs);
    table(pairs)
}

fn every_type() -> Pairs {
    let inner = table(vec![("k", Value::Void)]);
    let list = Array::from_values([1.into(), "x".into(), Value::Void]).expect("short");
    vec![
        ("t-array", Value::Array(list.into_owned())),
        ("t-bytes", Value::Bytes(vec![0, 255].into())),
        ("t-decimal", Value::Decimal { scale: 2, value: 5 }),
        ("t-f32", 1.5f32.into()),
        ("t-i16", Value::I16(-3)),
        ("t-i8", Value::I8(-3)),
        ("t-table", inner.into()),
        ("t-time", Value::Timestamp(5)),
        ("t-u16", Value::U16(3)),
        ("t-u32", Value::U32(3)),
        ("t-u8", Value::U8(3)),
        ("t-void", Value::Void),
    ]
}
