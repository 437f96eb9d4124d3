//! What runs: for each consumer and service of the file a task.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use leveret::{Client, ErrorKind, Incoming, Message, Queue, Summary, Topology};
use leveret_profiles::Orb;
use tokio::sync::{OnceCell, oneshot, watch};
use tokio::task::{self, JoinSet};
use tokio::time::{Instant, sleep};

use super::file::{Consumer, File, Service};
use super::pools::Pools;
use super::reaper::Reaper;
use super::wanted::{Wanted, until_ready};
use super::work::Work;
use crate::failure::Failure;
use crate::message::with;
use crate::output::{counted, note};

/// How long a consumer waits at its start for a queue that is not there: as long as the library does for one that is deleted
/// later.
const MISSING_FOR: Duration = Duration::from_secs(60);
/// The pause between two looks for it.
const MISSING_PAUSE: Duration = Duration::from_secs(1);
/// How much longer than a handler an entry that was replaced may take, to send on the messages that failed.
const SETTLING: Duration = Duration::from_secs(30);

/// What all tasks work with.
#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) client: Client,
    pub(super) pools: Pools,
    drain: Duration,
    /// Whether the program stops.
    stopping: watch::Sender<bool>,
    /// Started by the first command.
    reaper: Arc<OnceCell<Reaper>>,
}

/// One entry of a file. Two that are written alike are one and the same to a reload.
#[derive(Clone, Debug)]
pub(super) enum Definition {
    Consumer(Consumer),
    /// With its queue, if the file declares it.
    Service(Service, Option<Queue>),
    /// Sends back what consumers with this design of retries have rejected, from this queue.
    Redelivery(Orb, String),
}

/// A definition that only waits to be started.
pub(super) struct Prepared {
    definition: Definition,
    /// Of a service.
    topology: Topology,
    start: Start,
}

type Start = Box<dyn FnOnce(Stopped) -> Running + Send>;
type Stopped = oneshot::Receiver<()>;
type Running = Pin<Box<dyn Future<Output = Result<Summary, leveret::Error>> + Send>>;

impl Prepared {
    /// The queue that a consumer takes messages from.
    pub(super) fn queue(&self) -> Option<&str> {
        match &self.definition {
            Definition::Consumer(consumer) => Some(&consumer.queue),
            _ => None,
        }
    }
}

impl Definition {
    /// What a file defines.
    pub(super) fn all(file: &File, pools: &Pools) -> Vec<Definition> {
        let consumers = file.consumer.iter().cloned().map(Definition::Consumer);
        let services = file
            .service
            .iter()
            .map(|service| Definition::Service(service.clone(), file.declared(&service.name)));
        let orbs = file.orbs(pools).into_iter();
        let redeliveries = orbs.map(|(orb, queue)| Definition::Redelivery(orb, queue));
        consumers.chain(services).chain(redeliveries).collect()
    }

    fn is_same(&self, other: &Definition) -> bool {
        format!("{self:?}") == format!("{other:?}")
    }

    /// The queue that it consumes, with how many consumers.
    fn consumers(&self, pools: &Pools) -> (&str, usize) {
        match self {
            Definition::Consumer(consumer) => (&consumer.queue, consumer.subscribers(pools)),
            Definition::Service(service, _) => (&service.name, 1),
            Definition::Redelivery(_, queue) => (queue, 1),
        }
    }
}

impl Context {
    pub(super) fn new(client: &Client, pools: &Pools, drain: Duration) -> Self {
        let (client, pools) = (client.clone(), pools.clone());
        Context {
            client,
            pools,
            drain,
            stopping: watch::Sender::new(false),
            reaper: Arc::default(),
        }
    }

    /// Makes ready what definitions need, without the broker. A consumer waits for its queue if `missing` says so.
    pub(super) async fn prepare(
        &self,
        definitions: Vec<Definition>,
        missing: MissingQueue,
    ) -> Result<Vec<Prepared>, Failure> {
        let mut prepared = Vec::new();
        for definition in definitions {
            let (topology, start) = match &definition {
                Definition::Consumer(consumer) => {
                    (Topology::new(), self.consumer(consumer, missing).await?)
                }
                Definition::Service(service, queue) => self.service(service, queue).await?,
                Definition::Redelivery(orb, _) => {
                    let redelivery = orb.redelivery(&self.client);
                    let start = start(|stopped| async move {
                        // What it sends back is not handled by that.
                        redelivery.run_until(stopped).await.map(|_| Summary::default())
                    });
                    (Topology::new(), start)
                }
            };
            prepared.push(Prepared { definition, topology, start });
        }
        Ok(prepared)
    }

    /// The end of draining: `--drain` after the program stops. An entry that a reload replaces has as long as its handlers may
    /// take, and its failed messages to be settled.
    fn drained(&self, handler: Duration) -> impl Future<Output = ()> + Send + 'static {
        let (drain, mut stopping) = (self.drain, self.stopping.subscribe());
        let replaced = handler.saturating_add(SETTLING).max(drain);
        async move {
            let stopped = async {
                let _ = stopping.wait_for(|is_stopping| *is_stopping).await;
                sleep(drain).await;
            };
            tokio::select! {
                () = sleep(replaced) => {}
                () = stopped => {}
            }
        }
    }

    async fn consumer(&self, consumer: &Consumer, missing: MissingQueue) -> Result<Start, Failure> {
        let Consumer { queue, command, http, .. } = consumer;
        let work = Work::new(command, http, consumer.timeout.0, &self.reaper).await?;
        let retry = consumer.retry.as_ref().map(|retry| retry.retry(&self.pools));
        let builder = self
            .client
            .consumer(queue)
            .workers(consumer.workers)
            .subscribers(consumer.subscribers(&self.pools))
            .drain_until(self.drained(consumer.timeout.0));
        let builder =
            with(builder, &consumer.prefetch, |builder, prefetch| builder.prefetch(prefetch));
        let builder = with(builder, &retry, |builder, retry| builder.retry(retry));
        let queue = AwaitedQueue { client: self.client.clone(), name: queue.clone(), missing };
        Ok(match consumer.batch {
            None => {
                let runner = builder.handle(move |message: Incoming| {
                    let work = work.clone();
                    async move { work.on(message).await }
                });
                start(|mut stopped| async move {
                    match queue.is_there(&mut stopped).await? {
                        true => runner.run_until(stopped).await,
                        false => Ok(Summary::default()),
                    }
                })
            }
            Some(batch) => {
                let runner = builder.handle_batches(batch.into(), move |messages| {
                    let work = work.clone();
                    async move { work.on_batch(messages).await }
                });
                start(|mut stopped| async move {
                    match queue.is_there(&mut stopped).await? {
                        true => runner.run_until(stopped).await,
                        false => Ok(Summary::default()),
                    }
                })
            }
        })
    }

    async fn service(
        &self,
        service: &Service,
        queue: &Option<Queue>,
    ) -> Result<(Topology, Start), Failure> {
        let Service { name, command, http, .. } = service;
        let work = Work::new(command, http, service.timeout.0, &self.reaper).await?;
        let retry = service.retry.as_ref().map(|retry| retry.retry(&self.pools));
        let method = move |request: Incoming| {
            let work = work.clone();
            async move { work.answer(request).await.map(Message::from) }
        };
        let builder = self.client.service(name).fallback(method).workers(service.workers);
        let builder = builder.drain_until(self.drained(service.timeout.0));
        let builder =
            with(builder, &service.prefetch, |builder, prefetch| builder.prefetch(prefetch));
        let builder =
            with(builder, &service.exchange, |builder, exchange| builder.exchange(exchange));
        let builder = with(builder, queue, |builder, queue| builder.queue(queue));
        let builder = with(builder, &retry, |builder, retry| builder.retry(retry));
        Ok((builder.topology(), start(|stopped| builder.run_until(stopped))))
    }
}

fn start<F>(start: impl FnOnce(Stopped) -> F + Send + 'static) -> Start
where
    F: Future<Output = Result<Summary, leveret::Error>> + Send + 'static,
{
    Box::new(|stopped| Box::pin(start(stopped)))
}

/// What a file needs on the broker: its topology, and what its services declare, so that a caller finds their queues as soon as
/// they are said to run.
pub(super) fn needed(file: &File, prepared: &[Prepared]) -> Topology {
    prepared.iter().fold(file.topology().clone(), |all, one| all.and(one.topology.clone()))
}

/// What becomes of a consumer whose queue is not there when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MissingQueue {
    IsAwaited,
    IsRefused,
}

/// The queue of a consumer that is about to start. Another program may be about to declare it.
struct AwaitedQueue {
    client: Client,
    name: String,
    missing: MissingQueue,
}

impl AwaitedQueue {
    /// Waits for the queue, if it is to be waited for. False if the consumer is stopped meanwhile.
    async fn is_there(&self, stopped: &mut Stopped) -> Result<bool, leveret::Error> {
        if self.missing == MissingQueue::IsRefused {
            return Ok(true);
        }
        tokio::select! {
            found = self.until_there() => found.map(|()| true),
            _ = stopped => Ok(false),
        }
    }

    async fn until_there(&self) -> Result<(), leveret::Error> {
        let since = Instant::now();
        let mut is_said = false;
        loop {
            match self.client.inspect_queue(&self.name).await {
                Err(error) if error.kind() == ErrorKind::Missing => {
                    if since.elapsed() >= MISSING_FOR {
                        return Err(error);
                    }
                    if !is_said {
                        let name = &self.name;
                        note(&format!(
                            "queue {name:?} is not there: waits for it, up to {MISSING_FOR:?}"
                        ));
                    }
                    is_said = true;
                }
                // What else is in the way, the consumer itself is told.
                _ => return Ok(()),
            }
            sleep(MISSING_PAUSE).await;
        }
    }
}

/// The tasks, and what they have done.
#[derive(Debug)]
pub(super) struct Tasks {
    context: Context,
    tasks: JoinSet<Result<Summary, leveret::Error>>,
    known: HashMap<task::Id, Task>,
    wanted: Wanted,
    done: Done,
}

#[derive(Debug)]
struct Task {
    definition: Definition,
    phase: Phase,
    /// Dropping it stops the task.
    stop: Option<oneshot::Sender<()>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Of a reload that may be given up.
    New,
    Current,
    Stopping,
}

/// How a task has ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// It was told to.
    Stopped,
    /// One of a reload: the ones before go on.
    New(Failure),
    /// By itself, which none should.
    Current(Failure),
}

impl Tasks {
    pub(super) fn new(context: &Context) -> Self {
        Tasks {
            context: context.clone(),
            tasks: JoinSet::new(),
            known: HashMap::new(),
            wanted: Wanted::default(),
            done: Done::default(),
        }
    }

    /// What is to be consumed, for those who ask how the service is.
    pub(super) fn wanted(&self) -> Wanted {
        self.wanted.clone()
    }

    /// Notes what is to be consumed, before any of it is.
    pub(super) fn expect(&self, definitions: &[Definition]) {
        self.wanted.set(self.consumers_of(definitions.iter()));
    }

    pub(super) fn start(&mut self, prepared: Vec<Prepared>) {
        self.start_in(Phase::Current, prepared);
        self.note_wanted();
    }

    fn start_in(&mut self, phase: Phase, prepared: Vec<Prepared>) {
        for Prepared { definition, start, .. } in prepared {
            let (stop, stopped) = oneshot::channel();
            let id = self.tasks.spawn(start(stopped)).id();
            self.known.insert(id, Task { definition, phase, stop: Some(stop) });
        }
    }

    /// Of these definitions, those that do not run yet.
    pub(super) fn new_among(&self, definitions: Vec<Definition>) -> Vec<Definition> {
        let mut running: Vec<&Definition> = self.current().collect();
        let mut is_new = |definition: &Definition| {
            let same = running.iter().position(|known| known.is_same(definition));
            same.map(|index| running.swap_remove(index)).is_none()
        };
        definitions.into_iter().filter(|definition| is_new(definition)).collect()
    }

    fn current(&self) -> impl Iterator<Item = &Definition> {
        let current = self.known.values().filter(|task| task.phase == Phase::Current);
        current.map(|task| &task.definition)
    }

    /// Starts what is new beside what runs. What this returns is done when the broker delivers to all of it.
    pub(super) fn start_beside(
        &mut self,
        prepared: Vec<Prepared>,
    ) -> impl Future<Output = Result<(), Failure>> + Send + 'static {
        let wanted = self.consumers_of(prepared.iter().map(|new| &new.definition));
        let started = Instant::now();
        self.start_in(Phase::New, prepared);
        until_ready(self.context.client.clone(), wanted, started)
    }

    /// Stops what is no longer among these definitions, now that what is new is ready. Returns how many were started and
    /// stopped.
    pub(super) fn replace(&mut self, definitions: &[Definition]) -> (usize, usize) {
        let mut wanted: Vec<&Definition> = definitions.iter().collect();
        let (mut started, mut stopped) = (0, 0);
        // What is new takes its own definition, and not that of an old one that is written alike.
        let mut tasks: Vec<&mut Task> = self.known.values_mut().collect();
        tasks.sort_by_key(|task| task.phase != Phase::New);
        for task in tasks.into_iter().filter(|task| task.phase != Phase::Stopping) {
            match wanted.iter().position(|known| known.is_same(&task.definition)) {
                Some(index) => {
                    wanted.swap_remove(index);
                    started += usize::from(task.phase == Phase::New);
                    task.phase = Phase::Current;
                }
                None => {
                    stopped += 1;
                    task.stop();
                }
            }
        }
        self.note_wanted();
        (started, stopped)
    }

    /// Stops what a reload has started.
    pub(super) fn give_up_new(&mut self) {
        let new = self.known.values_mut().filter(|task| task.phase == Phase::New);
        new.for_each(Task::stop);
    }

    /// Waits until a task has ended.
    pub(super) async fn ended(&mut self) -> Ended {
        let Some(ended) = self.tasks.join_next_with_id().await else {
            // Delays are relayed by the client itself.
            return std::future::pending().await;
        };
        let (id, result) = match ended {
            Ok((id, result)) => (id, result.map_err(Failure::from)),
            Err(error) => (error.id(), Err(Failure::new(error))),
        };
        let phase = self.known.remove(&id).map_or(Phase::Stopping, |task| task.phase);
        let by_itself = || Failure::new("a handler has ended by itself");
        let failure = result.map(|summary| self.done.add(&summary)).err();
        match (phase, failure) {
            (Phase::New, failure) => Ended::New(failure.unwrap_or_else(by_itself)),
            (Phase::Current, failure) => Ended::Current(failure.unwrap_or_else(by_itself)),
            (Phase::Stopping, Some(failure)) => {
                note(&failure.to_string());
                Ended::Stopped
            }
            (Phase::Stopping, None) => Ended::Stopped,
        }
    }

    /// Stops all of them, and waits until they have finished what they were at.
    pub(super) async fn stop(mut self) -> Result<String, Failure> {
        self.wanted.stop();
        self.context.stopping.send_replace(true);
        self.known.values_mut().for_each(Task::stop);
        let mut failed = None;
        while let Some(ended) = self.tasks.join_next().await {
            match ended {
                Ok(Ok(summary)) => self.done.add(&summary),
                Ok(Err(error)) => failed = Some(Failure::from(error)),
                Err(error) => failed = Some(Failure::new(error)),
            }
        }
        failed.map_or_else(|| Ok(self.done.to_string()), Err)
    }

    /// Notes whether a reload is under way.
    pub(super) fn note_reloading(&self, is_reloading: bool) {
        self.wanted.set_reloading(is_reloading);
    }

    fn note_wanted(&self) {
        self.wanted.set(self.consumers_of(self.current()));
    }

    /// How many consumers the queues of these definitions have.
    fn consumers_of<'a>(
        &self,
        definitions: impl Iterator<Item = &'a Definition>,
    ) -> BTreeMap<String, usize> {
        let mut consumers = BTreeMap::new();
        for definition in definitions {
            let (queue, count) = definition.consumers(&self.context.pools);
            *consumers.entry(queue.to_owned()).or_default() += count;
        }
        consumers
    }
}

impl Task {
    fn stop(&mut self) {
        self.phase = Phase::Stopping;
        self.stop = None;
    }
}

/// What all tasks have done.
#[derive(Debug, Default)]
struct Done {
    handled: u64,
    retried: u64,
    parked: u64,
    abandoned: u64,
}

impl Done {
    fn add(&mut self, summary: &Summary) {
        self.handled += summary.handled;
        self.retried += summary.retried;
        self.parked += summary.parked;
        self.abandoned += summary.abandoned;
    }
}

/// What there is none of is left out.
impl std::fmt::Display for Done {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} handled", counted(self.handled, "message"))?;
        for (count, what) in [
            (self.retried, "sent to be tried again"),
            (self.parked, "parked"),
            (self.abandoned, "given back unfinished"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}
