//! A suite: several candidates do the same jobs.
//!
//! ```text
//!   this process --starts--> servers
//!        |                      ^
//!        +--starts, per run--> one candidate
//! ```
//!
//! Machines are noisy, and noise comes in stretches. So candidates run in turns, several rounds, and the median counts. A run in
//! which a message is not accounted for has failed, however fast it was.

use std::time::Duration;

use clap::{Args, ValueEnum};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::child;
use crate::meter::{Failure, Measured};
use crate::table::{self, Target};

/// One command of this program.
pub(crate) trait Suite: Sized {
    /// The command.
    const NAME: &'static str;
    /// A run that takes this long hangs.
    const DEADLINE: Duration;
    /// How often each candidate runs, unless the command line says so.
    const ROUNDS: u32 = 3;
    /// What a reader of the table has to know.
    const NOTES: &'static str;

    /// The command's own options.
    type Arguments;
    /// One run of one candidate, as its process gets it.
    type Run: Serialize + DeserializeOwned;

    /// Starts the servers that all runs share.
    async fn start(arguments: Self::Arguments) -> Result<Self, Failure>;

    /// All runs. Those of one setting are done in turns.
    fn settings(&self) -> Vec<Vec<Self::Run>>;

    /// Whether one round has to do, because the run takes long.
    fn runs_once(_: &Self::Run) -> bool {
        false
    }

    /// Before a run: puts its messages to where it begins with them.
    async fn prepare(&self, _: &Self::Run) -> Result<(), Failure> {
        Ok(())
    }

    /// How many threads the run's process has: as many as there are cores, unless it says so.
    fn threads(_: &Self::Run) -> Option<u16> {
        None
    }

    /// Does a run, in the run's process.
    async fn run(run: Self::Run) -> Result<Measured, Failure>;

    /// After a run, even one that failed: leaves nothing of it for the next. Fails if its messages are not where they should be.
    async fn check(&self, _: &Self::Run, _: &mut Measured) -> Result<(), Failure> {
        Ok(())
    }

    /// What the median is taken by.
    fn cost(measured: &Measured) -> f64 {
        measured.cpu_us_per_message()
    }

    /// The first columns: what a run is.
    fn labels(run: &Self::Run) -> Vec<(&'static str, Value)>;

    /// The last columns: how a row compares with others. All rows have the same.
    fn comparisons(_: &Row<Self::Run>, _: &[Row<Self::Run>]) -> Vec<(&'static str, Option<f64>)> {
        Vec::new()
    }

    /// What a row is held to.
    fn targets(_: &Row<Self::Run>, _: &[Row<Self::Run>]) -> Vec<Target> {
        Vec::new()
    }
}

/// One candidate in one setting.
pub(crate) struct Row<R> {
    pub(crate) run: R,
    /// What its runs took, the least first, or why one failed.
    pub(crate) result: Result<Vec<Measured>, String>,
}

impl<R> Row<R> {
    pub(crate) fn median(&self) -> Option<&Measured> {
        self.result.as_ref().ok().and_then(|runs| runs.get(runs.len() / 2))
    }

    pub(crate) fn cpu(&self) -> Option<f64> {
        self.median().map(Measured::cpu_us_per_message)
    }

    /// The CPU time, divided by that of the first row with such a run.
    pub(crate) fn times(&self, rows: &[Row<R>], is_meant: impl Fn(&R) -> bool) -> Option<f64> {
        let other = rows.iter().find(|row| is_meant(&row.run))?;
        Some(self.cpu()? / other.cpu()?)
    }
}

/// Options of every command.
#[derive(Args)]
pub(crate) struct Common {
    /// Print JSON instead of a table
    #[arg(long, global = true)]
    json: bool,
    /// How often each candidate runs; the median counts [default: 7 for codec, 3 for the others]
    #[arg(long, global = true, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Do one run, described in JSON
    #[arg(long, global = true, hide = true)]
    run: Option<String>,
}

/// The values of an option.
pub(crate) trait Choice: ValueEnum + Copy + Send + Sync + 'static {}

impl<T: ValueEnum + Copy + Send + Sync + 'static> Choice for T {}

/// Options of the commands that send messages to RabbitMQ. Those that name several things may be given more than once.
#[derive(Args, Clone)]
pub(crate) struct Load<J: Choice, C: Choice> {
    /// Only these jobs, or brokers
    #[arg(long, visible_alias = "broker", value_enum)]
    pub(crate) job: Vec<J>,
    /// Only these candidates
    #[arg(long, visible_alias = "client", value_enum)]
    pub(crate) candidate: Vec<C>,
    /// Messages per run, or calls, of which with one in flight there is a tenth. Given twice, everything runs with either number
    /// [default: about a second's worth for client, 50000 for rpc, 100000 for retry, 20000 for outbox, 10000 to consume and 1000000
    /// to remember for inbox]
    #[arg(long, visible_alias = "calls", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) messages: Vec<u64>,
    /// Which RabbitMQ [default: 3.10 for client, 4.3 for the others]
    #[arg(long)]
    rabbitmq: Option<Version>,
}

impl<J: Choice, C: Choice> Load<J, C> {
    pub(crate) fn jobs(&self) -> Vec<J> {
        chosen(&self.job)
    }

    /// The runs of all candidates for which there is one, as a setting for each number of messages.
    pub(crate) fn settings<R>(
        &self,
        default: impl Fn(C) -> u64,
        run: impl Fn(C, u64) -> Option<R>,
    ) -> Vec<Vec<R>> {
        let setting = |messages: Option<u64>| {
            let run = |candidate| run(candidate, messages.unwrap_or_else(|| default(candidate)));
            chosen(&self.candidate).into_iter().filter_map(run).collect()
        };
        match self.messages.as_slice() {
            [] => vec![setting(None)],
            numbers => numbers.iter().map(|messages| setting(Some(*messages))).collect(),
        }
    }

    pub(crate) async fn start_rabbitmq(&self, default: Version) -> RabbitNode {
        RabbitNode::start(self.rabbitmq.unwrap_or(default)).await
    }
}

/// What the command line names or, if it names nothing, all there is.
pub(crate) fn chosen<T: ValueEnum + Clone>(named: &[T]) -> Vec<T> {
    if named.is_empty() { T::value_variants().to_vec() } else { named.to_vec() }
}

/// The name of a value on the command line.
pub(crate) fn name(value: impl ValueEnum) -> Value {
    value.to_possible_value().map(|value| value.get_name().to_owned()).into()
}

/// Runs the suite and prints its table or, in a run's process, does that run.
pub(crate) fn execute<S: Suite>(arguments: S::Arguments, common: &Common) -> Result<(), Failure> {
    if let Some(run) = &common.run {
        return child::answer::<S>(run);
    }
    let rounds = common.rounds.unwrap_or(S::ROUNDS);
    let rows = Runtime::new()?.block_on(run_all::<S>(arguments, rounds))?;
    match common.json {
        true => println!("{}", table::json::<S>(&rows)),
        false => println!("{}\n{}", table::text::<S>(&rows), S::NOTES),
    }
    Ok(())
}

async fn run_all<S: Suite>(
    arguments: S::Arguments,
    rounds: u32,
) -> Result<Vec<Row<S::Run>>, Failure> {
    let suite = S::start(arguments).await?;
    let mut rows = Vec::new();
    for setting in suite.settings() {
        rows.extend(compare(&suite, setting, rounds).await?);
    }
    Ok(rows)
}

/// Has the candidates of a setting run in turns.
async fn compare<S: Suite>(
    suite: &S,
    setting: Vec<S::Run>,
    rounds: u32,
) -> Result<Vec<Row<S::Run>>, Failure> {
    let begin = |run| Row { run, result: Ok(Vec::new()) };
    let mut rows: Vec<Row<S::Run>> = setting.into_iter().map(begin).collect();
    for round in 0..rounds {
        for Row { run, result } in &mut rows {
            // One failure is enough to say so.
            let Ok(runs) = result else { continue };
            if round > 0 && S::runs_once(run) {
                continue;
            }
            match once(suite, run).await? {
                Ok(measured) => runs.push(measured),
                Err(reason) => *result = Err(reason),
            }
        }
    }
    for runs in rows.iter_mut().flat_map(|row| &mut row.result) {
        runs.sort_by(|a, b| S::cost(a).total_cmp(&S::cost(b)));
        // Of wrong outcomes, the most count.
        let mislabelled = runs.iter().filter_map(|run| run.mislabelled).max();
        runs.iter_mut().for_each(|run| run.mislabelled = mislabelled);
    }
    Ok(rows)
}

/// What a run took, or why it failed. An error of its own ends everything.
async fn once<S: Suite>(suite: &S, run: &S::Run) -> Result<Result<Measured, String>, Failure> {
    suite.prepare(run).await?;
    let mut answer = child::ask::<S>(run).await?;
    let checked = suite.check(run, answer.as_mut().unwrap_or(&mut Measured::default())).await;
    Ok(answer.and_then(|measured| match checked {
        Ok(()) => Ok(measured),
        Err(wrong) => Err(wrong.to_string()),
    }))
}
