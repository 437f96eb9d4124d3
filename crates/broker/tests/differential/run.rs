//! Runs a program against one broker and writes down all that could be observed.

use std::collections::BTreeMap;
use std::time::Duration;

use leveret_wire::method::{basic, channel, connection, exchange, queue};
use leveret_wire::{Method, Properties, ReplyCode, ShortStr};
use tokio::time::{Instant, sleep};

use super::link::{Event, HIDDEN, Link, Mode};
use super::names::Names;
use super::program::{CONNECTIONS, How, Op, Pace, Program, Publish, Step, WAIT, Which};
use super::record::{Record, in_order};
use super::show::bare;

/// Everything a step causes has happened after this long, or never will have.
const QUIET_DEADLINE: Duration = Duration::from_secs(60);

/// So many looks in a row must see nothing new. One is not enough: RabbitMQ's queues answer before they deliver.
const LOOKS: usize = 3;

/// How long a broker may take to notice that a connection was cut.
const CUT_WAIT: Duration = Duration::from_millis(60);

/// More than a program publishes, so that a queue that never runs empty is noticed.
const MOST_MESSAGES: usize = 300;

/// The harness's channel that gets and deletes at the end.
const CLEANER: u16 = HIDDEN;

/// A channel that no program opens.
const NEVER_OPENED: u16 = 60;

/// The user who may do everything.
const ALMIGHTY: &str = "guest";

/// The user who may do what [`LIMITED_TO`] says. Its password is the same.
pub(crate) const LIMITED: &str = "limited";

/// The names of what [`LIMITED`] may configure, write and read.
pub(crate) const LIMITED_TO: [&str; 3] =
    ["^(q1|q4|e1|amq[.]gen.*)$", "^(q1|q2|e1|amq[.]d.*)$", "^(q1|q3|e1|e2|amq[.]topic)$"];

/// A virtual host of a broker, in which nobody else does anything.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// How reports call it.
    pub(crate) name: String,
    /// `host:port`
    pub(crate) address: String,
    pub(crate) vhost: String,
}

/// Runs the program at the [pace](Program::pace) of so much patience, and cleans up behind it.
pub(super) async fn run(target: &Target, program: &Program, patience: u32) -> Vec<Record> {
    let mut run = Run::new(target, program, patience).await;
    for (number, step) in program.steps.iter().enumerate() {
        run.step(number, step).await;
    }
    run.end(program).await;
    run.records
}

/// Deletes what a program may have left behind that did not come to its end.
pub(super) async fn scrub(target: &Target, program: &Program) {
    let mut link = Link::open(&target.address, &target.vhost, ALMIGHTY).await;
    for name in program.queues() {
        // One that cannot be deleted costs the channel.
        if link.hidden.insert(CLEANER) {
            link.ask(CLEANER, &channel::Open {});
        }
        let queue = name.as_str().try_into().expect("a short name");
        link.ask(CLEANER, &queue::Delete { queue, ..Default::default() });
        link.exchange(0).await;
    }
    if link.hidden.insert(CLEANER) {
        link.ask(CLEANER, &channel::Open {});
    }
    for name in program.exchanges() {
        let exchange = name.as_str().try_into().expect("a short name");
        link.ask(CLEANER, &exchange::Delete { exchange, ..Default::default() });
    }
    link.exchange(0).await;
}

struct Run<'t> {
    target: &'t Target,
    /// The connection of a user who may not do everything.
    limited: Option<usize>,
    pace: Pace,
    names: Names,
    links: [Option<Link>; CONNECTIONS],
    /// Looks at queues, and is no part of the program.
    observer: Link,
    queues: BTreeMap<String, Watched>,
    /// Where the newest delivery wants its answer.
    reply_to: Option<String>,
    /// The number of the step that runs.
    now: usize,
    lines: Vec<String>,
    records: Vec<Record>,
}

/// A queue that the program declared, and that is looked at after every step.
struct Watched {
    /// The connection that it belongs to, if it is exclusive.
    owner: Option<usize>,
    /// The hidden channel on which it is looked at: asking for a queue that is gone costs the channel.
    channel: u16,
    counts: Option<(u32, u32)>,
    /// Whether it was there, or somebody declared it since it was found missing.
    expected: bool,
}

impl<'t> Run<'t> {
    async fn new(target: &'t Target, program: &Program, patience: u32) -> Run<'t> {
        Run {
            target,
            limited: program.limited,
            pace: program.pace(patience),
            names: Names::new(&target.vhost),
            links: Default::default(),
            observer: Link::open(&target.address, &target.vhost, ALMIGHTY).await,
            queues: BTreeMap::new(),
            reply_to: None,
            now: 0,
            lines: Vec::new(),
            records: Vec::new(),
        }
    }

    async fn step(&mut self, number: usize, step: &Step) {
        self.now = number;
        let Step { connection, channel, op } = step;
        self.open(*connection, *channel).await;
        match op {
            Op::Call(method) => self.call(*connection, *channel, method.clone()).await,
            Op::Unopened(method) => {
                let link = self.link(*connection);
                link.put(NEVER_OPENED, method);
                link.send().await;
            }
            Op::Publish(publish) => self.publish(*connection, *channel, publish).await,
            Op::Reply => self.reply(*connection, *channel).await,
            Op::Settle(which, how) => self.settle(*connection, *channel, *which, *how).await,
            Op::CloseConnection => self.close(*connection).await,
            Op::CutConnection => {
                if let Some(link) = self.links[*connection].take() {
                    link.cut();
                }
                sleep(CUT_WAIT).await;
            }
            Op::Wait => sleep(WAIT).await,
        }
        if op.may_enqueue() {
            sleep(self.pace.expiry).await;
        }
        self.quiet(if op.is_done_when_answered() { 1 } else { LOOKS }).await;
        self.record(format!("{:>2}. {step}", number + 1));
    }

    fn record(&mut self, step: String) {
        let lines = std::mem::take(&mut self.lines);
        self.records.push(Record { step, lines });
    }

    fn link(&mut self, connection: usize) -> &mut Link {
        self.links[connection].as_mut().expect("a step opens its connection")
    }

    async fn open(&mut self, connection: usize, number: u16) {
        if self.links[connection].is_none() {
            let user = if self.limited == Some(connection) { LIMITED } else { ALMIGHTY };
            let link = Link::open(&self.target.address, &self.target.vhost, user).await;
            self.links[connection] = Some(link);
        }
        let now = self.now;
        self.link(connection).open_channel(number, now).await;
    }

    async fn call(&mut self, connection: usize, number: u16, method: Method<'static>) {
        let method = self.with_actual_names(method);
        self.watch(connection, &method);
        let now = self.now;
        let link = self.link(connection);
        if let Some(channel) = link.channels.get_mut(&number) {
            channel.note(&method);
        }
        if matches!(method, Method::ChannelClose(_) | Method::TxCommit(_)) {
            // Nothing may be sent on a channel that is being closed, nor (RabbitMQ: 504) while it waits for the disk.
            link.ask(number, &method);
            link.exchange(now).await;
        } else {
            link.put(number, &method);
            link.send().await;
        }
    }

    async fn publish(&mut self, connection: usize, number: u16, publish: &Publish) {
        let Publish { method, properties, body, times } = publish;
        let routing_key = self.actual(&method.routing_key);
        let method = basic::Publish { routing_key, ..method.clone() };
        let now = self.now;
        let link = self.link(connection);
        for n in 1..=*times {
            let body = if *times > 1 { format!("{body}.{n}") } else { body.clone() };
            link.put_content(number, &method, properties, body);
        }
        link.await_confirms(now).await;
    }

    async fn reply(&mut self, connection: usize, number: u16) {
        let Some(reply_to) = &self.reply_to else {
            self.lines.push("nobody wants an answer".to_owned());
            return;
        };
        let routing_key = ShortStr::truncated(reply_to).into_owned();
        let method = basic::Publish { routing_key, mandatory: true, ..Default::default() };
        let now = self.now;
        let link = self.link(connection);
        link.put_content(number, &method, &Properties::default(), "answer".to_owned());
        link.await_confirms(now).await;
    }

    async fn settle(&mut self, connection: usize, number: u16, which: Which, how: How) {
        let link = self.link(connection);
        let channel = link.channels.get_mut(&number).expect("a step opens its channel");
        let tag = match which {
            Which::Tag(tag) => Some(tag),
            Which::Settled(n) => {
                let count = channel.settled.len();
                (count > 0).then(|| channel.settled[n % count])
            }
            Which::Held(n) => channel.held_tag(n, how.multiple()),
        };
        let Some(tag) = tag else {
            self.lines.push("no such delivery".to_owned());
            return;
        };
        let last = if how.multiple() && tag == 0 { u64::MAX } else { tag };
        let first = if how.multiple() { 0 } else { tag };
        let mut done: Vec<_> =
            channel.held.range(first..=last).map(|(tag, of)| (*of, *tag)).collect();
        done.sort();
        channel.held.retain(|tag, _| !(first..=last).contains(tag));
        if channel.mode == Mode::Tx {
            channel.uncommitted.extend(done.into_iter().map(|(of, tag)| (tag, of)));
        } else {
            channel.settled.extend(done.into_iter().map(|(_, tag)| tag));
        }
        link.put(number, &how.method(tag));
        link.send().await;
    }

    async fn close(&mut self, connection: usize) {
        let now = self.now;
        let link = self.link(connection);
        let close = connection::Close { reply_code: ReplyCode::SUCCESS, ..Default::default() };
        link.ask(0, &close);
        link.exchange(now).await;
    }

    /// Begins to look at a queue that may be there from now on.
    fn watch(&mut self, connection: usize, method: &Method<'_>) {
        if let Method::QueueDeclare(declare) = method
            && !declare.passive
            && !declare.queue.is_empty()
        {
            let owner = declare.exclusive.then_some(connection);
            self.watch_name(declare.queue.to_string(), owner);
        }
    }

    fn watch_name(&mut self, name: String, owner: Option<usize>) {
        let channel = CLEANER + 1 + self.queues.len() as u16;
        let fresh = Watched { owner, channel, counts: None, expected: true };
        let watched = self.queues.entry(name).or_insert(fresh);
        watched.expected = true;
        if watched.counts.is_none() {
            watched.owner = owner;
        }
    }

    /// Waits until nothing happens any more, and writes down what did.
    async fn quiet(&mut self, mut needed: usize) {
        let deadline = Instant::now() + QUIET_DEADLINE;
        let before = self.counts();
        for link in self.links.iter_mut().flatten() {
            link.ping();
            link.exchange(self.now).await;
        }
        let mut events = Vec::new();
        let mut looks = 0;
        while looks < needed {
            looks = if self.look(&mut events).await { 0 } else { looks + 1 };
            if events.iter().any(|(_, _, event)| event.is_close()) {
                needed = LOOKS;
            }
            if looks > 0 {
                sleep(self.pace.pause).await;
            }
            if Instant::now() > deadline {
                self.lines.push("there is no end to what happens".to_owned());
                break;
            }
        }
        self.write_down(events);
        for watched in self.queues.values_mut() {
            watched.expected = watched.counts.is_some();
        }
        for name in self.queues_in_order() {
            let counts = self.queues[&name].counts;
            if before.get(&name) != Some(&counts) {
                self.lines.push(self.names.clean(&match counts {
                    Some((messages, consumers)) => {
                        format!("queue {name:?}: {messages} ready, {consumers} consumers")
                    }
                    None => format!("queue {name:?}: not there"),
                }));
            }
        }
    }

    /// The broker's names for the queues, in the order of the program's names for them.
    fn queues_in_order(&self) -> Vec<String> {
        let mut names: Vec<String> = self.queues.keys().cloned().collect();
        names.sort_by_key(|name| self.names.clean(name));
        names
    }

    fn counts(&self) -> BTreeMap<String, Option<(u32, u32)>> {
        self.queues.iter().map(|(name, watched)| (name.clone(), watched.counts)).collect()
    }

    /// Asks every channel for a sign of life and every queue for its counts. Says whether anything happened.
    async fn look(&mut self, events: &mut Vec<(usize, u16, Event)>) -> bool {
        let before = self.counts();
        let known = events.len();
        for (name, watched) in self.queues.iter().filter(|(_, watched)| watched.expected) {
            let link = match watched.owner {
                None => Some(&mut self.observer),
                // An exclusive queue is gone with its connection, and nobody else may ask.
                Some(owner) => self.links[owner].as_mut(),
            };
            if let Some(link) = link {
                if link.hidden.insert(watched.channel) {
                    link.ask(watched.channel, &channel::Open {});
                }
                let queue = name.as_str().try_into().expect("a short name");
                link.ask(
                    watched.channel,
                    &queue::Declare { queue, passive: true, ..Default::default() },
                );
            }
        }
        for watched in self.queues.values_mut() {
            watched.counts = None;
        }
        // First the queues, then the channels: what a queue has sent by its answer, its channel has by then.
        let now = self.now;
        for link in self.links.iter_mut().flatten().chain([&mut self.observer]) {
            link.exchange(now).await;
        }
        for link in self.links.iter_mut().flatten() {
            link.ping();
            link.send().await;
        }
        let mut came: Vec<_> = self
            .observer
            .events
            .drain(..)
            .map(|(channel, event)| (usize::MAX, channel, event))
            .collect();
        for (connection, slot) in self.links.iter_mut().enumerate() {
            let Some(link) = slot else { continue };
            link.exchange(now).await;
            came.extend(link.events.drain(..).map(|(channel, event)| (connection, channel, event)));
            self.reply_to = link.reply_to.take().or(self.reply_to.take());
            if !link.open {
                *slot = None;
            }
        }
        for (connection, channel, event) in came {
            if channel < HIDDEN {
                self.learn(connection, &event);
                events.push((connection, channel, event));
            } else if let Event::Reply(Method::QueueDeclareOk(ok)) = event
                && let Some(watched) = self.queues.get_mut(&*ok.queue.to_str_lossy())
            {
                watched.counts = Some((ok.message_count, ok.consumer_count));
            }
        }
        events.len() > known || self.counts() != before
    }

    /// Learns the names that the broker made.
    fn learn(&mut self, connection: usize, event: &Event) {
        match event {
            Event::Reply(Method::QueueDeclareOk(ok)) => {
                let name = ok.queue.to_string();
                if !self.queues.contains_key(&name) && name.starts_with("amq.gen-") {
                    // Whether it is exclusive only the declare knows; its own connection may always look.
                    self.watch_name(name.clone(), Some(connection));
                }
                self.names.learn(&name);
            }
            Event::Reply(Method::BasicConsumeOk(ok)) => {
                self.names.learn(&ok.consumer_tag.to_str_lossy())
            }
            _ => {}
        }
    }

    /// Puts what came into an order that does not depend on which process of the broker was faster.
    fn write_down(&mut self, events: Vec<(usize, u16, Event)>) {
        let mut channels: BTreeMap<(usize, u16), Vec<Event>> = BTreeMap::new();
        for (connection, channel, event) in events {
            channels.entry((connection, channel)).or_default().push(event);
        }
        for ((connection, channel), events) in channels {
            let place = format!("c{}/{channel}", connection.wrapping_add(1));
            for line in in_order(events, &self.names) {
                self.lines.push(self.names.clean(&format!("{place} {line}")));
            }
        }
    }

    /// Closes one channel after the other, so that what they held goes back in an order that is known; then looks into
    /// every queue, and deletes what is left.
    async fn end(&mut self, program: &Program) {
        for connection in 0..CONNECTIONS {
            while let Some(number) = self.links[connection]
                .as_ref()
                .and_then(|link| link.channels.keys().next().copied())
            {
                let close = channel::Close { reply_code: ReplyCode::SUCCESS, ..Default::default() };
                self.call(connection, number, close.into()).await;
                self.quiet_end(format!("end: close c{}/{number}", connection + 1)).await;
            }
            if self.links[connection].is_some() {
                self.close(connection).await;
                self.quiet_end(format!("end: close c{}", connection + 1)).await;
            }
        }
        // Queues with an owner were either exclusive and are gone, or may be looked at by all.
        for watched in self.queues.values_mut() {
            watched.owner = None;
            watched.expected = true;
        }
        self.quiet_end("end: all is closed".to_owned()).await;
        for name in self.queues_in_order() {
            if self.queues[&name].counts.is_some() {
                self.drain(&name).await;
            }
        }
        self.quiet_end("end: all is drained".to_owned()).await;
        self.clean_up(program).await;
    }

    async fn quiet_end(&mut self, what: String) {
        sleep(self.pace.expiry).await;
        self.quiet(LOOKS).await;
        self.record(what);
    }

    async fn drain(&mut self, name: &str) {
        let observer = &mut self.observer;
        let queue: ShortStr<'_> = name.try_into().expect("a short name");
        for _ in 0..MOST_MESSAGES {
            if observer.hidden.insert(CLEANER) {
                observer.ask(CLEANER, &channel::Open {});
            }
            observer.ask(CLEANER, &basic::Get { queue: queue.borrowed(), no_ack: true });
            observer.exchange(self.now).await;
            let line = match observer.events.pop() {
                Some((CLEANER, Event::Content(text))) => text,
                Some((CLEANER, Event::Reply(Method::BasicGetEmpty(_)))) => break,
                Some((_, Event::Reply(method))) => {
                    self.lines.push(self.names.clean(&bare(&method)));
                    break;
                }
                _ => {
                    self.lines.push("nothing came for a get".to_owned());
                    break;
                }
            };
            self.lines.push(self.names.clean(&line));
        }
        observer.events.clear();
        self.record(format!("end: contents of {}", self.names.clean(name)));
    }

    /// Deletes one after the other: RabbitMQ 3.10 stumbles (541) over an exchange that is deleted while it deletes itself.
    async fn clean_up(&mut self, program: &Program) {
        let observer = &mut self.observer;
        if observer.hidden.insert(CLEANER) {
            observer.ask(CLEANER, &channel::Open {});
        }
        for (name, _) in self.queues.iter().filter(|(_, watched)| watched.counts.is_some()) {
            let queue = name.as_str().try_into().expect("a short name");
            observer.ask(CLEANER, &queue::Delete { queue, ..Default::default() });
        }
        for name in program.exchanges() {
            let exchange = name.as_str().try_into().expect("a short name");
            observer.ask(CLEANER, &exchange::Delete { exchange, ..Default::default() });
        }
        observer.exchange(self.now).await;
        let failed: Vec<String> = (observer.events.drain(..))
            .filter_map(|(_, event)| match event {
                Event::Reply(Method::QueueDeleteOk(_) | Method::ExchangeDeleteOk(_)) => None,
                Event::Reply(method) => Some(bare(&method)),
                _ => Some("something else".to_owned()),
            })
            .collect();
        assert!(observer.open && failed.is_empty(), "could not clean up: {failed:?}");
        let close = connection::Close { reply_code: ReplyCode::SUCCESS, ..Default::default() };
        observer.ask(0, &close);
        observer.exchange(self.now).await;
    }

    fn actual(&self, name: &ShortStr<'_>) -> ShortStr<'static> {
        self.names.actual(&name.to_str_lossy()).try_into().expect("a short name")
    }

    fn with_actual_names(&self, mut method: Method<'static>) -> Method<'static> {
        let name = match &mut method {
            Method::QueueDeclare(method) => &mut method.queue,
            Method::QueueBind(method) => &mut method.queue,
            Method::QueueUnbind(method) => &mut method.queue,
            Method::QueuePurge(method) => &mut method.queue,
            Method::QueueDelete(method) => &mut method.queue,
            Method::BasicGet(method) => &mut method.queue,
            Method::BasicConsume(method) => &mut method.queue,
            Method::BasicCancel(method) => &mut method.consumer_tag,
            _ => return method,
        };
        *name = self.actual(name);
        method
    }
}
