//! Makes a program of a seed.
//!
//! A program begins with a plan: some queues and exchanges with their arguments. Most steps stick to it, so that most of
//! them do something; the others are wrong in one way or another.

use leveret_wire::method::{access, basic, channel, confirm, exchange, queue, tx};
use leveret_wire::{Method, ShortStr, Table, Value};

use super::arguments::{self, Times};
use super::names::{made_queue, made_tag};
use super::program::{CONNECTIONS, How, Op, Program, Publish, Step, Which, table};
use super::random::Random;

const QUEUES: [&str; 3] = ["q1", "q2", "q3"];
const EXCHANGES: [&str; 2] = ["e1", "e2"];
const KEYS: [&str; 12] =
    ["q1", "q2", "q3", "", "a", "a.b", "a.b.c", "b", "a..b", ".", "q1.q2", "b.a"];
const PATTERNS: [&str; 14] = [
    "#", "*", "a.#", "#.b", "*.b", "a.*", "a.#.c", "#.#", "*.#", "a.b", "q1", "", "#.b.#", "*.*.*",
];
const TAGS: [&str; 3] = ["t1", "t2", "t3"];

/// How often a text is repeated in a body that takes more than two frames of 128 KiB.
const LONG_BODY: usize = 14_000;

/// Makes the program of a seed.
pub(super) fn generate(seed: u64) -> Program {
    let mut random = Random::new(seed);
    let plan = Plan::new(&mut random);
    let mut maker =
        Maker { random, plan, cancelled: Vec::new(), has_global_limit: false, steps: Vec::new() };
    maker.set_up();
    for _ in 0..5 + maker.random.below(20) {
        maker.step();
    }
    Program { seed, limited: maker.plan.limited, steps: maker.steps }
}

/// What there should be.
struct Plan {
    connections: usize,
    /// The connection of a user who may not do everything.
    limited: Option<usize>,
    channels: usize,
    times: Times,
    dead_letters: bool,
    /// There is a quorum queue that refuses publishes, and publishers are told a little later.
    refuses_late: bool,
    /// There is a classic queue with a single active consumer: cancelling it makes 3.10 lose the queue's messages.
    single_active: bool,
    /// There is a quorum queue with a single active consumer: one of a higher priority makes 4.3 lose hold of what the active one
    /// has, if both go together.
    stuck_by_priority: bool,
    quorum: bool,
    /// Both types of queues, and dead letters.
    mixed_deaths: bool,
    queues: Vec<queue::Declare<'static>>,
    exchanges: Vec<exchange::Declare<'static>>,
}

impl Plan {
    fn new(random: &mut Random) -> Plan {
        let times =
            random.weighted(&[(82, Times::Long), (14, Times::ShortTtl), (4, Times::ShortExpires)]);
        let quorum = random.percent(12);
        let deaths = Deaths::new(random);
        let queues: Vec<_> = QUEUES[..1 + random.below(QUEUES.len())]
            .iter()
            .enumerate()
            .map(|(index, name)| queue_of_plan(random, index, name, times, quorum, &deaths))
            .collect();
        let has = |declare: &queue::Declare<'_>, name, value: &Value<'_>| {
            declare.arguments.get(name).is_some_and(|found| found == *value)
        };
        let exchanges = EXCHANGES[..random.below(EXCHANGES.len() + 1)]
            .iter()
            .map(|name| exchange_of_plan(random, name))
            .collect();
        let connections = random.weighted(&[(55, 1), (30, 2), (15, CONNECTIONS)]);
        Plan {
            connections,
            limited: random.percent(12).then_some(connections - 1),
            channels: random.weighted(&[(70, 1), (30, 2)]),
            times,
            dead_letters: !matches!(deaths, Deaths::None),
            refuses_late: queues.iter().any(|one| {
                has(one, "x-queue-type", &"quorum".into())
                    && has(one, "x-overflow", &"reject-publish".into())
            }),
            single_active: queues.iter().any(|one| {
                !has(one, "x-queue-type", &"quorum".into())
                    && has(one, "x-single-active-consumer", &true.into())
            }),
            mixed_deaths: !matches!(deaths, Deaths::None)
                && queues.iter().any(|one| has(one, "x-queue-type", &"quorum".into()))
                && queues.iter().any(|one| !has(one, "x-queue-type", &"quorum".into())),
            quorum: queues.iter().any(|one| has(one, "x-queue-type", &"quorum".into())),
            stuck_by_priority: queues.iter().any(|one| {
                has(one, "x-queue-type", &"quorum".into())
                    && has(one, "x-single-active-consumer", &true.into())
            }),
            queues,
            exchanges,
        }
    }
}

/// Which queues dead-letter, and where to. No queue gets the dead letters of two others: they would arrive in any order.
enum Deaths {
    None,
    /// One queue, to anywhere.
    Of(usize, Vec<(&'static str, Value<'static>)>),
    /// Each queue to the next one, around.
    Ring,
}

impl Deaths {
    fn new(random: &mut Random) -> Deaths {
        match random.weighted(&[(45, 0), (40, 1), (15, 2)]) {
            0 => Deaths::None,
            1 => {
                let to = random.pick(&["", "e1", "amq.fanout", "amq.topic", "missing", ""]);
                let mut pairs = vec![("x-dead-letter-exchange", to.into())];
                if random.percent(60) {
                    let key = random.pick(&["q1", "q2", "q3", "a.b", ""]);
                    pairs.push(("x-dead-letter-routing-key", key.into()));
                }
                Deaths::Of(random.below(2), pairs)
            }
            _ => Deaths::Ring,
        }
    }

    fn arguments(&self, index: usize) -> Vec<(&'static str, Value<'static>)> {
        match self {
            Deaths::Of(of, pairs) if *of == index => pairs.clone(),
            Deaths::Ring => vec![
                ("x-dead-letter-exchange", "".into()),
                ("x-dead-letter-routing-key", QUEUES[(index + 1) % QUEUES.len()].into()),
            ],
            _ => Vec::new(),
        }
    }
}

fn queue_of_plan(
    random: &mut Random,
    index: usize,
    name: &'static str,
    times: Times,
    quorum: bool,
    deaths: &Deaths,
) -> queue::Declare<'static> {
    let quorum = quorum && random.percent(70);
    let mut pairs = match quorum {
        true => arguments::quorum(random, times),
        false => arguments::classic(random, times, !matches!(deaths, Deaths::None)),
    };
    pairs.extend(deaths.arguments(index));
    queue::Declare {
        queue: ShortStr::from_static(name),
        durable: quorum || random.percent(50),
        exclusive: !quorum && random.percent(8),
        auto_delete: !quorum && random.percent(10),
        arguments: table(pairs),
        ..Default::default()
    }
}

fn exchange_of_plan(random: &mut Random, name: &'static str) -> exchange::Declare<'static> {
    let mut pairs = Vec::new();
    if random.percent(30) {
        let to = random.pick(&["e1", "e2", "e2", "amq.fanout", "amq.topic", "missing", ""]);
        pairs.push(("alternate-exchange", to.into()));
    }
    exchange::Declare {
        exchange: ShortStr::from_static(name),
        kind: ShortStr::from_static(random.pick(&["direct", "fanout", "topic", "headers"])),
        durable: random.percent(40),
        auto_delete: random.percent(12),
        internal: random.percent(6),
        arguments: table(pairs),
        ..Default::default()
    }
}

/// Appends a step or some.
type Make = fn(&mut Maker);

struct Maker {
    random: Random,
    plan: Plan,
    /// Consumers that may have been cancelled: where there are quorum queues, 3.10 stumbles (541) over those that come back.
    cancelled: Vec<String>,
    /// A channel may have a prefetch for all its consumers together.
    has_global_limit: bool,
    steps: Vec<Step>,
}

impl Maker {
    fn push(&mut self, op: Op) {
        let connection = self.random.below(self.plan.connections);
        let channel = 1 + self.random.below(self.plan.channels) as u16;
        self.steps.push(Step { connection, channel, op });
    }

    /// On a channel that asked for messages before, if there is one.
    fn push_where_consumed(&mut self, op: Op) {
        let asked = |step: &&Step| {
            matches!(step.op, Op::Call(Method::BasicGet(_) | Method::BasicConsume(_)))
        };
        let places: Vec<(usize, u16)> =
            self.steps.iter().filter(asked).map(|step| (step.connection, step.channel)).collect();
        if places.is_empty() || self.random.percent(5) {
            return self.push(op);
        }
        let (connection, channel) = self.random.pick(&places);
        self.steps.push(Step { connection, channel, op });
    }

    fn call(&mut self, method: impl Into<Method<'static>>) {
        self.push(Op::Call(method.into()));
    }

    fn set_up(&mut self) {
        for declare in self.plan.queues.clone() {
            if self.random.percent(95) {
                self.call(declare);
            }
        }
        for declare in self.plan.exchanges.clone() {
            if self.random.percent(95) {
                self.call(declare);
            }
        }
        for _ in 0..self.random.below(4) {
            self.bind();
        }
        for _ in 0..self.random.below(3) {
            self.publish();
        }
        if self.random.percent(25) {
            let nowait = self.random.percent(10);
            self.call(confirm::Select { nowait });
        }
        if self.random.percent(60) {
            self.consume();
        }
    }

    fn step(&mut self) {
        let kinds: [(usize, Make); 17] = [
            (30, Maker::publish),
            (22, Maker::settle),
            (14, Maker::get),
            (9, Maker::consume),
            (5, Maker::declare_queue),
            (3, Maker::declare_exchange),
            (5, Maker::bind),
            (3, Maker::unbind),
            (3, Maker::cancel),
            (3, Maker::qos),
            (3, Maker::purge),
            (3, Maker::delete_queue),
            (2, Maker::delete_exchange),
            (3, Maker::select),
            (4, Maker::recover),
            (4, Maker::close),
            (1, Maker::nonsense),
        ];
        let kind = self.random.weighted(&kinds);
        kind(self);
        if self.plan.times == Times::ShortExpires && self.random.percent(12) {
            self.push(Op::Wait);
        }
    }

    /// The name of a queue: one of the plan, mostly.
    fn queue(&mut self) -> ShortStr<'static> {
        let planned = self.plan.queues.len();
        let known = QUEUES[self.random.below(planned)];
        let name = match self.random.weighted(&[(92, 0), (3, 1), (3, 2), (2, 3)]) {
            0 => known.to_owned(),
            1 => String::new(),
            2 => made_queue(1),
            _ => self.random.pick(&["missing", "q3"]).to_owned(),
        };
        name.try_into().expect("a short name")
    }

    /// The name of an exchange, and its type if it is known.
    fn exchange(&mut self) -> ShortStr<'static> {
        let planned = self.plan.exchanges.len();
        let own = self.random.weighted(&[(planned * 40, true), (30, false)]);
        ShortStr::from_static(if own {
            EXCHANGES[self.random.below(planned)]
        } else {
            let names = ["amq.direct", "amq.fanout", "amq.topic", "amq.headers", "amq.match"];
            let odd = ["missing", "", "amq.missing", "e2"];
            if self.random.percent(85) { self.random.pick(&names) } else { self.random.pick(&odd) }
        })
    }

    fn key(&mut self) -> ShortStr<'static> {
        ShortStr::from_static(self.random.pick(&KEYS))
    }

    fn binding_key(&mut self) -> ShortStr<'static> {
        let pattern = self.random.percent(50);
        ShortStr::from_static(if pattern {
            self.random.pick(&PATTERNS)
        } else {
            self.random.pick(&KEYS)
        })
    }

    fn binding_arguments(&mut self) -> Table<'static> {
        if self.random.percent(35) { arguments::binding(&mut self.random) } else { Table::new() }
    }

    fn publish(&mut self) {
        let mut properties = arguments::properties(&mut self.random, self.plan.times);
        // A reply address that is not wanted: the publisher must consume from it.
        if properties.reply_to.is_some() && self.random.percent(70) {
            properties.reply_to = None;
        }
        // From a classic queue, a dead letter may overtake the copy of the message that a quorum queue gets at the same time.
        if self.plan.mixed_deaths
            && let Some(headers) = &mut properties.headers
        {
            headers.remove("CC");
            headers.remove("BCC");
        }
        let (exchange, routing_key) = if self.plan.mixed_deaths || self.random.percent(60) {
            (ShortStr::EMPTY, self.queue())
        } else {
            (self.exchange(), self.key())
        };
        let method = basic::Publish {
            exchange,
            routing_key,
            mandatory: self.random.percent(25),
            immediate: self.random.below(150) == 0,
        };
        let body = match self.random.below(30) {
            0..3 => String::new(),
            3..6 => format!("m{} and somewhat more", self.steps.len()),
            6 => format!("m{} in several frames ", self.steps.len()).repeat(LONG_BODY),
            _ => format!("m{}", self.steps.len()),
        };
        // What dies of the first message would race with the second.
        let times = match self.plan.dead_letters || self.plan.refuses_late {
            true => 1,
            false => self.random.weighted(&[(70, 1), (15, 2), (10, 3), (5, 5)]),
        };
        // With a MiB under way to a consumer, others may get what comes next: whether it keeps up is a matter of time.
        let times = if body.len() > LONG_BODY { times.min(3) } else { times };
        self.push(Op::Publish(Box::new(Publish { method, properties, body, times })));
        if self.random.percent(3) {
            self.push(Op::Reply);
        }
    }

    fn settle(&mut self) {
        let which = match self.random.below(30) {
            0 => Which::Settled(self.random.below(4)),
            1 => Which::Tag(self.random.pick(&[0, 1, 99])),
            _ => Which::Held(self.random.below(4)),
        };
        let (multiple, requeue) = (self.random.percent(20), self.random.percent(45));
        let requeue = requeue && !self.has_global_limit;
        let how = match self.random.below(3) {
            0 => How::Ack { multiple },
            1 => How::Nack { multiple, requeue },
            _ => How::Reject { requeue },
        };
        self.push_where_consumed(Op::Settle(which, how));
    }

    fn get(&mut self) {
        let (queue, no_ack) = (self.queue(), self.random.percent(35));
        self.call(basic::Get { queue, no_ack });
    }

    fn consume(&mut self) {
        if self.random.percent(40) {
            self.qos();
        }
        let mut arguments = Vec::new();
        if self.random.percent(12) && !self.plan.stuck_by_priority {
            let priority: [Value<'static>; 5] =
                [1.into(), (-1).into(), 10.into(), "high".into(), 1i64.into()];
            let priority = priority
                [self.random.weighted(&[(30, 0), (30, 1), (30, 2), (2, 3), (8, 4)])]
            .clone();
            arguments.push(("x-priority", priority));
        }
        let tag = match self.random.below(10) {
            0 => "",
            1..7 => TAGS[self.steps.len() % TAGS.len()],
            _ => self.random.pick(&TAGS),
        };
        let tag = if self.cancelled.iter().any(|cancelled| cancelled == tag) { "" } else { tag };
        let direct_reply = self.random.percent(5);
        let queue = match direct_reply {
            true => ShortStr::from_static("amq.rabbitmq.reply-to"),
            false => self.queue(),
        };
        let consume = basic::Consume {
            queue,
            consumer_tag: ShortStr::from_static(tag),
            no_local: self.random.percent(3),
            no_ack: if direct_reply { self.random.percent(90) } else { self.random.percent(25) },
            exclusive: self.random.percent(8),
            nowait: !tag.is_empty() && self.random.percent(5),
            arguments: table(arguments),
        };
        self.call(consume);
    }

    fn cancel(&mut self) {
        if self.plan.single_active {
            return;
        }
        let tag = match self.random.below(8) {
            0 => made_tag(1),
            1 => "nobody".to_owned(),
            _ => self.random.pick(&TAGS).to_owned(),
        };
        if self.plan.quorum {
            self.cancelled.push(tag.clone());
        }
        let consumer_tag = tag.try_into().expect("a short name");
        let nowait = self.random.percent(5);
        self.push_where_consumed(Op::Call(basic::Cancel { consumer_tag, nowait }.into()));
    }

    fn qos(&mut self) {
        let prefetch_size = if self.random.below(60) == 0 { 10 } else { 0 };
        let prefetch_count = self.random.pick(&[0, 1, 1, 2, 3]);
        let global = self.random.percent(15);
        self.has_global_limit |= global;
        self.call(basic::Qos { prefetch_size, prefetch_count, global });
    }

    fn declare_queue(&mut self) {
        let mut declare = self.random.pick(&self.plan.queues);
        match self.random.below(12) {
            0 => declare.durable = !declare.durable,
            1 => declare.exclusive = !declare.exclusive,
            2 => declare.auto_delete = !declare.auto_delete,
            3 | 4 => {
                // A queue of its own, so that the arguments are looked at even if they are fine.
                let (name, value) = arguments::doubtful(&mut self.random);
                if self.random.percent(70) {
                    declare.queue = ShortStr::from_static("q4");
                }
                declare.arguments.insert(name, value).expect("a short name");
            }
            5 => declare.arguments = Table::new(),
            6 => declare.queue = ShortStr::from_static(self.random.pick(&["amq.mine", "missing"])),
            7 | 8 => {
                declare.queue = ShortStr::EMPTY;
                declare.exclusive = self.random.percent(50);
            }
            _ => {}
        }
        declare.passive = self.random.percent(30);
        declare.nowait = !declare.queue.is_empty() && self.random.percent(5);
        self.call(declare);
    }

    fn declare_exchange(&mut self) {
        let mut declare = match self.plan.exchanges.is_empty() {
            true => exchange_of_plan(&mut self.random, "e1"),
            false => self.random.pick(&self.plan.exchanges),
        };
        match self.random.below(12) {
            0 => declare.durable = !declare.durable,
            1 => declare.auto_delete = !declare.auto_delete,
            2 => declare.internal = !declare.internal,
            3 => {
                declare.kind =
                    ShortStr::from_static(self.random.pick(&["direct", "topic", "nonsense"]))
            }
            4 => declare.arguments = Table::new(),
            5 => {
                let names = ["", "amq.mine", "amq.direct", "missing"];
                declare.exchange = ShortStr::from_static(self.random.pick(&names));
            }
            6 => {
                let wrong = table(vec![("alternate-exchange", 5.into())]);
                declare.arguments = wrong;
            }
            _ => {}
        }
        declare.passive = self.random.percent(25);
        declare.nowait = self.random.percent(5);
        self.call(declare);
    }

    fn bind(&mut self) {
        let (source, routing_key) = (self.exchange(), self.binding_key());
        let arguments = self.binding_arguments();
        if self.random.percent(65) {
            let queue = self.queue();
            self.call(queue::Bind {
                queue,
                exchange: source,
                routing_key,
                nowait: false,
                arguments,
            });
        } else {
            // Only to an exchange that is deleted with the program.
            let destination = ShortStr::from_static(self.random.pick(&EXCHANGES));
            let bind =
                exchange::Bind { destination, source, routing_key, nowait: false, arguments };
            self.call(bind);
        }
    }

    /// Undoes a binding of before, mostly.
    fn unbind(&mut self) {
        let bindings: Vec<Method<'static>> = self
            .steps
            .iter()
            .filter_map(|step| match &step.op {
                Op::Call(method @ (Method::QueueBind(_) | Method::ExchangeBind(_))) => {
                    Some(method.clone())
                }
                _ => None,
            })
            .collect();
        if bindings.is_empty() || self.random.percent(15) {
            let (queue, exchange) = (self.queue(), self.exchange());
            let routing_key = self.binding_key();
            let arguments = self.binding_arguments();
            return self.call(queue::Unbind { queue, exchange, routing_key, arguments });
        }
        match self.random.pick(&bindings) {
            Method::QueueBind(queue::Bind { queue, exchange, routing_key, arguments, .. }) => {
                self.call(queue::Unbind { queue, exchange, routing_key, arguments });
            }
            Method::ExchangeBind(bind) => {
                let exchange::Bind { destination, source, routing_key, nowait, arguments } = bind;
                self.call(exchange::Unbind { destination, source, routing_key, nowait, arguments });
            }
            _ => unreachable!("only bindings were looked for"),
        }
    }

    fn purge(&mut self) {
        let (queue, nowait) = (self.queue(), self.random.percent(5));
        self.call(queue::Purge { queue, nowait });
    }

    fn delete_queue(&mut self) {
        let (if_unused, if_empty) = (self.random.percent(30), self.random.percent(30));
        let (queue, nowait) = (self.queue(), self.random.percent(5));
        self.call(queue::Delete { queue, if_unused, if_empty, nowait });
    }

    fn delete_exchange(&mut self) {
        // Not RabbitMQ's own: those cannot be deleted, and that is a case of its own.
        let name = self.random.weighted(&[
            (80, "e1"),
            (10, "e2"),
            (5, "missing"),
            (3, ""),
            (2, "amq.direct"),
        ]);
        let exchange = ShortStr::from_static(name);
        let if_unused = self.random.percent(40);
        self.call(exchange::Delete { exchange, if_unused, nowait: false });
    }

    fn select(&mut self) {
        match self.random.below(8) {
            0..3 => self.call(confirm::Select { nowait: false }),
            3..5 => self.call(tx::Select {}),
            5 | 6 => self.call(tx::Commit {}),
            _ => self.call(tx::Rollback {}),
        }
        if self.random.percent(40) {
            self.publish();
            self.settle();
            self.call(tx::Commit {});
        }
    }

    fn recover(&mut self) {
        match self.random.below(16) {
            _ if self.has_global_limit => {}
            0 => self.call(basic::Recover { requeue: false }),
            1 => self.call(basic::RecoverAsync { requeue: false }),
            2..6 => self.call(basic::RecoverAsync { requeue: true }),
            _ => self.call(basic::Recover { requeue: true }),
        }
    }

    fn close(&mut self) {
        match self.random.below(8) {
            0 => self.push(Op::CutConnection),
            1..4 => self.push(Op::CloseConnection),
            _ => self.call(channel::Close {
                reply_code: leveret_wire::ReplyCode::SUCCESS,
                ..Default::default()
            }),
        }
    }

    /// What no client should do.
    fn nonsense(&mut self) {
        match self.random.below(6) {
            0 => self.push(Op::Unopened(basic::Qos::default().into())),
            1 => self.call(channel::Open {}),
            2 => self.call(channel::Flow { active: false }),
            3 => self.call(queue::DeclareOk::default()),
            4 => self.call(basic::Deliver::default()),
            _ => self.call(access::Request::default()),
        }
    }
}
