//! Looking at the broker, and taking steps there.

use std::time::{Duration, Instant};

use leveret::amqp::{DeleteQueue, GetOptions, QueueOptions, ReplyCode, Table, Value as AmqpValue};
use leveret::{Change, Client, Queue, QueueType, Target, Topology};
use serde_json::{Map, Value, json};

use super::Arguments;
use super::guess::guesses;
use super::hold::Hold;
use super::step::{Declared, Names, Seen, Step};
use super::watch::{Others, Watch};
use crate::failure::Failure;
use crate::management::{Bound, Management, QueueFacts, To};
use crate::output::{counted, note};
use crate::progress::bar;

/// How often the broker is asked whether a queue is empty.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// When it is said for what it waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long it may take until the policies of a queue are told. They come with the counts, which is every 5 s unless the broker was
/// told otherwise.
const TOLD: Duration = Duration::from_secs(60);

/// Beyond the reach of any message, as for parking lots.
const DELIVERY_LIMIT: i64 = 1_000_000_000;

/// In which argument of the exchange `old` the declaration of the queue is kept.
const FORMER: &str = "x-leveret-former";

/// What ends messages by itself.
const ENDINGS: [&str; 5] =
    ["message-ttl", "max-length", "max-length-bytes", "expires", "delivery-limit"];

/// The broker, and what is wanted there.
pub(super) struct Place<'a> {
    pub(super) client: &'a Client,
    pub(super) management: &'a Management,
    pub(super) hold: &'a Hold<'a>,
    pub(super) names: &'a Names,
    pub(super) wanted: &'a Queue,
    pub(super) arguments: &'a Arguments,
}

/// How many messages were moved.
#[derive(Debug, Default)]
pub(super) struct Moved {
    /// Out of the queue.
    pub(super) there: u64,
    /// Back into it.
    pub(super) back: u64,
    /// Deleted with the queue.
    pub(super) gone: u64,
}

/// What became of the queue.
enum Deleted {
    /// It is replaced, and so many messages went with it.
    With(u32),
    /// It is not: something has come directly at the last moment.
    No,
}

impl Place<'_> {
    pub(super) async fn look(&self) -> Result<Seen, Failure> {
        self.hold.check()?;
        let Names { queue, gate, old, new, back, .. } = self.names;
        let api = self.management;
        let mut bindings = api.bindings_to(To::Queue(queue)).await?;
        let is_open = bindings.iter().any(|bound| bound.source == *gate);
        bindings.retain(|bound| !self.names.is_ours(&bound.source));
        let mut exchanges = Vec::new();
        for name in [old, new, back] {
            if api.has_exchange(name).await? {
                exchanges.push(name.clone());
            }
        }
        let mut seen = Seen {
            queue: Declared::Absent,
            bindings,
            has_gate: api.has_exchange(gate).await?,
            is_open,
            gated: api.bindings_to(To::Exchange(gate)).await?,
            has_old: api.queue(old).await?.is_some(),
            has_new: api.queue(new).await?.is_some(),
            exchanges,
        };
        if let Some(facts) = api.queue(queue).await? {
            seen.queue = match self.arguments.undo {
                true => self.kept(&facts, &seen).await?,
                false => self.declared(&facts).await?,
            };
        }
        Ok(seen)
    }

    /// With `--undo` the queue stays as it is, which is wanted only while it is the one that was there at first.
    async fn kept(&self, facts: &QueueFacts, seen: &Seen) -> Result<Declared, Failure> {
        let (former, now) = (self.former().await?, facts.declaration().to_string());
        let is_replaced = match &former {
            Some(former) => *former != now,
            // The declaration was not kept yet, or by an earlier version never.
            None => seen.is_begun() && self.declared(facts).await? == Declared::AsWanted,
        };
        match is_replaced {
            false => Ok(Declared::AsWanted),
            true => Err(self.replaced(former.as_deref())),
        }
    }

    /// The declaration that the queue had before it was replaced, as JSON. The exchange that is deleted last keeps it.
    async fn former(&self) -> Result<Option<String>, Failure> {
        let arguments = self.management.exchange_arguments(&self.names.old).await?;
        let former = arguments.as_ref().and_then(|arguments| arguments.get(FORMER)?.as_str());
        Ok(former.map(str::to_owned))
    }

    fn replaced(&self, former: Option<&str>) -> Failure {
        let queue = &self.names.queue;
        let was = former.map(|former| format!(", which was {former},")).unwrap_or_default();
        Failure::new(format_args!(
            "queue {queue:?} is replaced already, and --undo cannot bring its former declaration back. Run it without --undo, and \
             it finishes: all messages come back. For the former declaration{was} write that into the file then, and migrate again"
        ))
    }

    /// How the queue is. The broker alone can tell whether two declarations are the same.
    async fn declared(&self, facts: &QueueFacts) -> Result<Declared, Failure> {
        // No other connection can ask for it.
        if facts.exclusive {
            return Ok(Declared::Otherwise);
        }
        let plan = self.client.plan(&Topology::new().queue(self.wanted.clone())).await?;
        match plan.steps().iter().map(|step| &step.change).next() {
            Some(Change::Create) => Ok(Declared::Absent),
            Some(Change::Same) => Ok(Declared::AsWanted),
            // What differs is not told to the end if the name is long.
            Some(Change::Refused(error))
                if error.reply_code() != Some(ReplyCode::PRECONDITION_FAILED) =>
            {
                Err(error.clone().into())
            }
            _ => Ok(Declared::Otherwise),
        }
    }

    /// Whether the API is that of this broker, and tells what has to be known.
    pub(super) async fn check_api(&self) -> Result<(), Failure> {
        let overview = self.management.overview().await?;
        overview.check(self.hold.cluster().as_deref(), !self.arguments.direct)
    }

    /// Whether the broker would take the queue as it is wanted.
    pub(super) async fn try_out(&self) -> Result<(), Failure> {
        self.hold.try_out(self.declaration()?).await
    }

    /// Whether it can be done, before anything is touched.
    pub(super) async fn check(&self, seen: &Seen) -> Result<(), Failure> {
        if seen.queue != Declared::Otherwise {
            return Ok(());
        }
        let facts = self.facts(&self.names.queue).await?;
        let why = match facts.kind.as_deref() {
            Some("stream") => "is a stream, which is read and not emptied",
            _ if facts.exclusive => "belongs to one connection, and is gone with that",
            _ if facts.auto_delete => "is deleted with its last consumer",
            _ if seen.bindings.is_empty() && seen.gated.is_empty() && !self.arguments.direct => {
                return Err(self.direct("has no bindings, so what it gets comes"));
            }
            _ => return self.check_senders().await,
        };
        Err(Failure::new(format_args!("queue {:?} {why}", self.names.queue)))
    }

    /// Somebody sends to the queue by its name.
    fn direct(&self, how: &str) -> Failure {
        let queue = &self.names.queue;
        Failure::new(format_args!(
            "queue {queue:?} {how} directly, by the default exchange{DIRECT}"
        ))
    }

    /// Queues that dead-letter straight to the queue: what expires while it is gone would be dropped.
    async fn check_senders(&self) -> Result<(), Failure> {
        if self.arguments.direct {
            return Ok(());
        }
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        for (name, facts) in self.management.queues().await? {
            let setting = |name: &str| text(facts.setting(name));
            // Without a key, messages go to the queue that is called as their own key.
            let is_straight = setting("dead-letter-exchange").as_deref() == Some("")
                && setting("dead-letter-routing-key").is_none_or(|key| key == self.names.queue);
            let is_safe = setting("dead-letter-strategy").as_deref() == Some("at-least-once");
            if is_straight && !is_safe && facts.messages != Some(0) {
                return Err(Failure::new(format_args!(
                    "queue {name:?} has messages which it may dead-letter to {:?} directly, by the default exchange{DIRECT}",
                    self.names.queue
                )));
            }
        }
        Ok(())
    }

    pub(super) async fn take(
        &self,
        step: Step,
        seen: &Seen,
        moved: &mut Moved,
    ) -> Result<(), Failure> {
        let Names { queue, gate, old, new, .. } = self.names;
        let api = self.management;
        match step {
            Step::Prepare => self.prepare(seen).await,
            Step::Connect => api.lead(gate, To::Queue(queue)).await,
            Step::Redirect => self.redirect(&seen.bindings).await,
            Step::Divert => {
                let leading = api.bindings_to(To::Queue(queue)).await?;
                let of_gate = leading.iter().find(|bound| bound.source == *gate);
                match of_gate {
                    Some(bound) => api.unbind(bound).await,
                    None => Ok(()),
                }
            }
            Step::Replace => self.replace(moved).await,
            Step::Declare => self.declare().await,
            Step::ReturnOld => self.give_back(old, moved).await,
            Step::Reopen => self.reopen(moved).await,
            Step::Restore => {
                let bindings = &seen.gated;
                self.lead_instead(bindings, To::Queue(queue)).await
            }
            Step::RemoveGate => api.delete_exchange(gate).await,
            Step::ReturnNew => self.give_back(new, moved).await,
            Step::Clean => {
                // `old` last: it tells how the queue was.
                for exchange in seen.exchanges.iter().rev() {
                    api.delete_exchange(exchange).await?;
                }
                Ok(())
            }
        }
    }

    /// The gate comes last: it must not be there with nowhere to lead to.
    async fn prepare(&self, seen: &Seen) -> Result<(), Failure> {
        let Names { queue, gate, old, new, .. } = self.names;
        let api = self.management;
        let facts = self.full_facts(queue).await?;
        let arguments = self.beside(&facts);
        for name in [old, new] {
            self.hold.declare(name, &arguments).await?;
        }
        if let Err(failure) = self.check_policies(&facts).await {
            // What was there before may hold messages.
            for (name, _) in [(old, seen.has_old), (new, seen.has_new)].iter().filter(|one| !one.1)
            {
                self.client.delete_queue(name, DeleteQueue::default()).await?;
            }
            return Err(failure);
        }
        if !seen.exchanges.contains(old) {
            let former = facts.declaration().to_string();
            api.declare_fanout(old, json!({ FORMER: former })).await?;
        }
        api.declare_fanout(new, json!({})).await?;
        for name in [old, new] {
            api.lead(name, To::Queue(name)).await?;
        }
        api.declare_fanout(gate, json!({ "alternate-exchange": new })).await
    }

    /// The arguments of a queue that keeps what the queue would keep: it is no less safe than before or after, and what expires goes
    /// where it would have gone.
    fn beside(&self, facts: &QueueFacts) -> Vec<(String, AmqpValue<'static>)> {
        let is_quorum = facts.kind.as_deref() == Some("quorum")
            || self.wanted.queue_type() == Some(QueueType::Quorum);
        let mut arguments = match is_quorum {
            true => vec![
                ("x-queue-type".to_owned(), "quorum".into()),
                ("x-delivery-limit".to_owned(), DELIVERY_LIMIT.into()),
            ],
            false => vec![("x-queue-type".to_owned(), "classic".into())],
        };
        for name in ["dead-letter-exchange", "dead-letter-routing-key"] {
            if let Some(value) = facts.setting(name).and_then(Value::as_str) {
                arguments.push((format!("x-{name}"), value.to_owned().into()));
            }
        }
        arguments
    }

    /// A policy that fits the name of a queue beside may end messages there that would have lived.
    async fn check_policies(&self, queue: &QueueFacts) -> Result<(), Failure> {
        for name in [&self.names.old, &self.names.new] {
            let facts = self.full_facts(name).await?;
            let is_unsafe = |ending: &&&str| {
                let there = facts.policy(ending);
                // Nobody consumes there, which is what a queue expires for.
                there.is_some() && (there != queue.policy(ending) || **ending == "expires")
            };
            if let Some(ending) = ENDINGS.iter().find(is_unsafe) {
                return Err(Failure::new(format_args!(
                    "a policy sets {ending} for queue {name:?}, where messages are to wait: change its pattern, so that it does \
                     not fit that name"
                )));
            }
        }
        Ok(())
    }

    /// Has messages of these bindings of the queue come by the gate.
    async fn redirect(&self, bindings: &[Bound]) -> Result<(), Failure> {
        self.lead_instead(bindings, To::Exchange(&self.names.gate)).await
    }

    /// Makes bindings that lead elsewhere, and takes those away for which there is another.
    async fn lead_instead(&self, bindings: &[Bound], to: To<'_>) -> Result<(), Failure> {
        let api = self.management;
        for bound in bindings {
            match bound.arguments() {
                None => api.bind(&bound.source, &bound.routing_key, to).await?,
                Some(arguments) => self.bind_with(arguments, bound, to).await?,
            }
        }
        let made = api.bindings_to(to).await?;
        for bound in bindings {
            if !made.iter().any(|other| other.is_like(bound)) {
                return Err(cannot_bind(bound));
            }
            api.unbind(bound).await?;
        }
        Ok(())
    }

    /// Makes a binding that is like another, arguments included.
    async fn bind_with(
        &self,
        told: &Map<String, Value>,
        bound: &Bound,
        to: To<'_>,
    ) -> Result<(), Failure> {
        let arguments = self.arguments_of(told, bound).await?;
        self.bind(bound, to, &arguments).await
    }

    /// The arguments of a binding. Those that the API tells are not all that there is to know, so they are guessed until it calls
    /// both bindings the same; at an exchange that leads nowhere.
    async fn arguments_of(
        &self,
        told: &Map<String, Value>,
        bound: &Bound,
    ) -> Result<Table<'static>, Failure> {
        let trial = &self.names.trial;
        self.management.declare_fanout(trial, json!({})).await?;
        let mut found = Err(cannot_bind(bound));
        for guess in guesses(told) {
            let guess = guess?;
            self.bind(bound, To::Exchange(trial), &guess).await?;
            let made = self.management.bindings_to(To::Exchange(trial)).await?;
            if made.iter().any(|made| made.is_like(bound)) {
                found = Ok(guess);
                break;
            }
        }
        self.management.delete_exchange(trial).await?;
        found
    }

    async fn bind(&self, bound: &Bound, to: To<'_>, arguments: &Table<'_>) -> Result<(), Failure> {
        let Bound { source, routing_key, .. } = bound;
        let channel = self.hold.channel().await?;
        let made = match to {
            To::Queue(queue) => channel.bind_queue(queue, source, routing_key, arguments).await,
            To::Exchange(exchange) => {
                channel.bind_exchange(exchange, source, routing_key, arguments).await
            }
        };
        made.map_err(|error| cannot_bind(bound).and(&format!(": {error}")))
    }

    /// Takes a binding away again that a client has made for the queue, which comes by the gate already.
    async fn keep_diverted(&self) -> Result<(), Failure> {
        let Names { queue, gate, .. } = self.names;
        let mut bindings = self.management.bindings_to(To::Queue(queue)).await?;
        let is_open = bindings.iter().any(|bound| bound.source == *gate);
        bindings.retain(|bound| !self.names.is_ours(&bound.source));
        if is_open || bindings.is_empty() || !self.management.has_exchange(gate).await? {
            return Ok(());
        }
        self.redirect(&bindings).await
    }

    /// Moves what is in a queue by an exchange, until it is known that nothing is left: not in it, not at consumers, and not on
    /// the way to where dead letters go.
    async fn empty(
        &self,
        from: &str,
        by: &str,
        count: &mut u64,
        watch: &mut Watch,
    ) -> Result<(), Failure> {
        let began = Instant::now();
        let mut has_told = false;
        loop {
            self.hold.check()?;
            self.keep_diverted().await?;
            let facts = self.facts(from).await?;
            let info = self.client.inspect_queue(from).await?;
            let ready = info.messages;
            watch.note(&facts, ready, info.consumers);
            if watch.has_seen_others(&facts) {
                return Err(self.direct("gets messages"));
            }
            if ready == 0
                && (watch.is_over() || watch.is_silent() && self.gives_nothing(from).await?)
            {
                return Ok(());
            }
            let waited = began.elapsed();
            if waited >= self.arguments.within {
                return Err(Failure::new(format_args!(
                    "queue {from:?} is not empty after {:?}: {}",
                    self.arguments.within,
                    left(&facts, ready)
                )));
            }
            if !has_told && waited >= PATIENCE && (ready > 0 || facts.out() != Some(0)) {
                has_told = true;
                note(&format!("waiting: {}", left(&facts, ready)));
            }
            match ready > 0 && !is_held_by_one(&facts) {
                true => drop(self.move_ready(from, by, count).await?),
                false => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Whether nothing can be taken out of a queue, which its leader alone knows.
    async fn gives_nothing(&self, queue: &str) -> Result<bool, Failure> {
        match self.client.get(queue, GetOptions::default()).await {
            Ok(None) => Ok(true),
            Ok(Some(delivery)) => delivery.requeue().map(|()| false).map_err(Failure::from),
            Err(error) => Err(self.dead(queue).and(&format!(": {error}"))),
        }
    }

    /// A quorum queue that was declared only by half is there, and has no process.
    fn dead(&self, queue: &str) -> Failure {
        Failure::new(format_args!(
            "the management API tells nothing of queue {queue:?}: its node is down, statistics are turned off, or a run that was \
             killed has declared it only by half. If no message was moved yet, delete that queue, and run it again"
        ))
    }

    /// Moves what is ready in a queue. How many that were.
    async fn move_ready(&self, from: &str, by: &str, count: &mut u64) -> Result<u64, Failure> {
        let bar = bar(0, "moved");
        let shown = bar.clone();
        // All messages leave; what is given back because the next queue does not take it counts as a delivery.
        let lot = self.client.parking_lot(from).allow_counted_returns();
        let task = lot.move_to(Target::exchange(by)).progress(move |progress| {
            shown.set_length(progress.total);
            shown.set_position(progress.done);
        });
        let progress = task.run().await;
        bar.finish_and_clear();
        let progress = progress?;
        *count += progress.done;
        match progress.not_done.first() {
            None => Ok(progress.done),
            Some(one) => Err(Failure::new(format_args!(
                "{} cannot be moved from {from:?}: {}",
                counted(progress.failed, "message"),
                one.error
            ))),
        }
    }

    /// Moves back what has come meanwhile, and then has messages come to the queue again. Who publishes faster than can be moved
    /// is not waited for.
    async fn reopen(&self, moved: &mut Moved) -> Result<(), Failure> {
        let Names { queue, gate, new, back, .. } = self.names;
        self.prepare_back().await?;
        let mut before = u64::MAX;
        loop {
            let number = self.move_ready(new, back, &mut moved.back).await?;
            if number == 0 || number > before / 2 {
                break;
            }
            before = number;
        }
        self.management.lead(gate, To::Queue(queue)).await
    }

    /// Empties the queue, deletes it, and declares it as it is wanted.
    async fn replace(&self, moved: &mut Moved) -> Result<(), Failure> {
        let Names { queue, old, .. } = self.names;
        let began = Instant::now();
        let others = if self.arguments.direct { Others::Allowed } else { Others::LookedFor };
        let mut watch = Watch::new(others);
        loop {
            self.empty(queue, old, &mut moved.there, &mut watch).await?;
            let facts = self.facts(queue).await?;
            self.check_senders().await?;
            match self.exchange_for_wanted(&facts).await? {
                Deleted::With(gone) => {
                    moved.gone += u64::from(gone);
                    return Ok(());
                }
                Deleted::No if began.elapsed() < self.arguments.within => {}
                Deleted::No => {
                    return Err(Failure::new(format_args!(
                        "messages keep coming to queue {queue:?} directly, by the default exchange: stop whoever sends them"
                    )));
                }
            }
        }
    }

    /// Deletes the queue, in which nothing is, and declares it. Both are sent at once, so that there is a queue of this name again
    /// as soon as can be.
    async fn exchange_for_wanted(&self, facts: &QueueFacts) -> Result<Deleted, Failure> {
        let queue = self.names.queue.as_str();
        let cannot = |error| Failure::new(format_args!("cannot replace queue {queue:?}: {error}"));
        let channel = self.hold.channel().await?;
        // Quorum queues do not know the condition.
        let if_empty = facts.kind.as_deref() == Some("classic");
        let when = DeleteQueue { if_empty, if_unused: false };
        let (deleted, declared) = tokio::join!(
            channel.delete_queue(queue, when),
            channel.declare_queue(queue, self.declaration()?)
        );
        match deleted {
            Err(error) if error.reply_code() == Some(ReplyCode::PRECONDITION_FAILED) => {
                Ok(Deleted::No)
            }
            Err(error) => Err(cannot(error)),
            // A node of a cluster may not know yet that the old one is deleted, or somebody was faster to declare it as it was. What
            // there is then is looked at before the next step.
            Ok(gone) => match declared {
                Err(error) if error.reply_code() != Some(ReplyCode::PRECONDITION_FAILED) => {
                    Err(cannot(error))
                }
                _ => Ok(Deleted::With(gone)),
            },
        }
    }

    async fn declare(&self) -> Result<(), Failure> {
        let queue = self.names.queue.as_str();
        let cannot = |error| Failure::new(format_args!("cannot declare queue {queue:?}: {error}"));
        let channel = self.hold.channel().await?;
        channel.declare_queue(queue, self.declaration()?).await.map(drop).map_err(cannot)
    }

    /// Not by the client: it would declare the queue again whenever it was away.
    fn declaration(&self) -> Result<QueueOptions, Failure> {
        let wanted = self.wanted;
        let arguments = wanted.arguments().map(|(name, value)| (name, value.clone()));
        Ok(QueueOptions {
            durable: wanted.is_durable(),
            exclusive: false,
            auto_delete: false,
            arguments: Table::from_pairs(arguments).map_err(Failure::wrong)?,
        })
    }

    async fn prepare_back(&self) -> Result<(), Failure> {
        let Names { queue, back, .. } = self.names;
        self.management.declare_fanout(back, json!({})).await?;
        self.management.lead(back, To::Queue(queue)).await
    }

    /// Moves all of a queue beside back, and deletes it.
    async fn give_back(&self, from: &str, moved: &mut Moved) -> Result<(), Failure> {
        self.prepare_back().await?;
        let mut watch = Watch::new(Others::None);
        self.empty(from, &self.names.back, &mut moved.back, &mut watch).await?;
        let gone = self.client.delete_queue(from, DeleteQueue::default()).await?;
        moved.gone += u64::from(gone);
        Ok(())
    }

    /// What is known of a queue, its policies included. Those of one that was just made are told some time later.
    async fn full_facts(&self, queue: &str) -> Result<QueueFacts, Failure> {
        let began = Instant::now();
        loop {
            let facts = self.facts(queue).await?;
            if facts.has_policies() {
                return Ok(facts);
            }
            if began.elapsed() >= TOLD {
                return Err(self.dead(queue));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn facts(&self, queue: &str) -> Result<QueueFacts, Failure> {
        let found = self.management.queue(queue).await?;
        found.ok_or_else(|| Failure::new(format_args!("queue {queue:?} is gone")))
    }
}

fn cannot_bind(bound: &Bound) -> Failure {
    let Bound { source, routing_key, .. } = bound;
    Failure::new(format_args!(
        "a binding to exchange {source:?} with key {routing_key:?} cannot be made again as it is"
    ))
}

/// What to do about who sends directly.
const DIRECT: &str = ". While it is deleted and declared there is no queue of that name, and what comes in that moment is lost, \
                      unless publishes are mandatory. Have it sent to an exchange, or wait, or say --direct";

/// Whether others get messages only when a consumer goes.
fn is_held_by_one(facts: &QueueFacts) -> bool {
    let is_single = facts.setting("single-active-consumer") == Some(&Value::Bool(true));
    !facts.consumer_details.is_empty() && (is_single || facts.exclusive_consumer_tag.is_some())
}

/// What is left in a queue, and who has it.
fn left(facts: &QueueFacts, ready: u32) -> String {
    let Some(unacked) = facts.messages_unacknowledged else {
        return "the management API tells no counts; statistics may be turned off".to_owned();
    };
    let mut text =
        format!("{} in it, {unacked} out at consumers", counted(ready.into(), "message"));
    for consumer in facts.consumers() {
        text += &format!("\n  {consumer}");
    }
    text
}
