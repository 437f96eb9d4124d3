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
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
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

    /// What is done with the messages.
    type Job: Choice;
    /// What does it.
    type Candidate: Choice;
    /// The command's own options.
    type Options: Args;
    /// What is the same for all candidates that are compared: sizes, and the addresses of servers.
    type Setting: Clone + Serialize + DeserializeOwned;

    /// Starts the servers that all runs share.
    async fn start(arguments: &mut ArgumentsOf<Self>) -> Result<Self, Failure>;

    /// The settings of a job. In each, all candidates run in turns.
    fn settings(&self, job: Self::Job) -> Vec<Self::Setting>;

    /// How many messages a run has, which the command line may say. `None` if the candidate does not do that.
    fn messages(
        job: Self::Job,
        candidate: Self::Candidate,
        setting: &Self::Setting,
        asked: Option<u64>,
    ) -> Option<u64>;

    /// Whether one round has to do, because the job takes long.
    fn runs_once(_: Self::Job) -> bool {
        false
    }

    /// Before a run: puts its messages to where it begins with them.
    async fn prepare(&self, _: &RunOf<Self>) -> Result<(), Failure> {
        Ok(())
    }

    /// How many threads the run's process has: as many as there are cores, unless it says so.
    fn threads(_: &Self::Setting) -> Option<u16> {
        None
    }

    /// Does a run, in the run's process.
    async fn run(run: RunOf<Self>) -> Result<Measured, Failure>;

    /// After a run, even one that failed: leaves nothing of it for the next. Fails if its messages are not where they should be.
    async fn check(&self, _: &RunOf<Self>, _: &mut Measured) -> Result<(), Failure> {
        Ok(())
    }

    /// What the median is taken by, and candidates are compared by. Per message.
    fn cost(measured: &Measured) -> f64 {
        measured.cpu_us_per_message()
    }

    /// Whether it is not of this project.
    fn is_peer(candidate: Self::Candidate) -> bool;

    /// The columns that describe a setting.
    fn labels(_: &Self::Setting) -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// What a row is held to.
    fn targets(_: &Row<Self>, _: &[Row<Self>]) -> Vec<Target> {
        Vec::new()
    }
}

/// The values of an option.
pub(crate) trait Choice:
    ValueEnum + Copy + PartialEq + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

impl<T> Choice for T where
    T: ValueEnum + Copy + PartialEq + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

/// What to measure. Options that name several things may be given more than once.
#[derive(Args)]
pub(crate) struct Arguments<J: Choice, C: Choice, O: Args> {
    /// Only these jobs
    #[arg(long, value_enum)]
    pub(crate) job: Vec<J>,
    /// Only these candidates
    #[arg(long, value_enum)]
    pub(crate) candidate: Vec<C>,
    /// Messages, or calls, per run. Given twice, everything runs with either number
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) messages: Vec<u64>,
    #[command(flatten)]
    pub(crate) options: O,
}

pub(crate) type ArgumentsOf<S> =
    Arguments<<S as Suite>::Job, <S as Suite>::Candidate, <S as Suite>::Options>;

/// One run of one candidate, as its process gets it.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Run<J, C, S> {
    pub(crate) job: J,
    pub(crate) candidate: C,
    pub(crate) messages: u64,
    pub(crate) setting: S,
}

pub(crate) type RunOf<S> = Run<<S as Suite>::Job, <S as Suite>::Candidate, <S as Suite>::Setting>;

/// One candidate in one setting.
pub(crate) struct Row<S: Suite> {
    pub(crate) run: RunOf<S>,
    /// Candidates with the same number ran in turns.
    comparison: usize,
    /// What its runs took, the least first, or why one failed.
    pub(crate) result: Result<Vec<Measured>, String>,
}

impl<S: Suite> Row<S> {
    pub(crate) fn median(&self) -> Option<&Measured> {
        self.result.as_ref().ok().and_then(|runs| runs.get(runs.len() / 2))
    }

    pub(crate) fn cost(&self) -> Option<f64> {
        self.median().map(S::cost)
    }

    /// Another candidate in the same setting, or this one.
    pub(crate) fn beside<'a>(
        &self,
        rows: &'a [Row<S>],
        candidate: S::Candidate,
    ) -> Option<&'a Row<S>> {
        let is_meant =
            |row: &&Row<S>| row.comparison == self.comparison && row.run.candidate == candidate;
        rows.iter().find(is_meant)
    }

    /// The cost, divided by that of another candidate in the same setting.
    pub(crate) fn times(&self, rows: &[Row<S>], candidate: S::Candidate) -> Option<f64> {
        ratio(self.cost()?, self.beside(rows, candidate)?.cost()?)
    }

    /// The cost, divided by that of the best peer in the same setting.
    pub(crate) fn times_best_peer(&self, rows: &[Row<S>]) -> Option<f64> {
        let is_peer =
            |row: &&Row<S>| row.comparison == self.comparison && S::is_peer(row.run.candidate);
        let best = rows.iter().filter(is_peer).filter_map(Row::cost).min_by(f64::total_cmp)?;
        ratio(self.cost()?, best)
    }
}

/// `None` if the other figure is nothing, because the run was too short to measure it.
pub(crate) fn ratio(figure: f64, other: f64) -> Option<f64> {
    (other > 0.0).then_some(figure / other)
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

/// What the command line names or, if it names nothing, all there is.
pub(crate) fn chosen<T: ValueEnum + Clone>(named: &[T]) -> Vec<T> {
    if named.is_empty() { T::value_variants().to_vec() } else { named.to_vec() }
}

/// The name of a value on the command line.
pub(crate) fn name(value: impl ValueEnum) -> Value {
    value.to_possible_value().map(|value| value.get_name().to_owned()).into()
}

/// Runs the suite and prints its table or, in a run's process, does that run.
pub(crate) fn execute<S: Suite>(arguments: ArgumentsOf<S>, common: &Common) -> Result<(), Failure> {
    if let Some(run) = &common.run {
        return child::answer::<S>(run);
    }
    let rounds = common.rounds.unwrap_or(S::ROUNDS);
    let rows = Runtime::new()?.block_on(run_all::<S>(arguments, rounds))?;
    match common.json {
        true => println!("{}", table::json(&rows)),
        false => println!("{}\n\n{}\n{}", table::text(&rows), table::NOTES, S::NOTES),
    }
    Ok(())
}

async fn run_all<S: Suite>(
    mut arguments: ArgumentsOf<S>,
    rounds: u32,
) -> Result<Vec<Row<S>>, Failure> {
    let suite = S::start(&mut arguments).await?;
    let numbers = match arguments.messages.as_slice() {
        [] => vec![None],
        numbers => numbers.iter().copied().map(Some).collect(),
    };
    let (mut rows, mut comparison) = (Vec::new(), 0);
    for job in chosen(&arguments.job) {
        for setting in suite.settings(job) {
            for &asked in &numbers {
                let row = |candidate| {
                    let messages = S::messages(job, candidate, &setting, asked)?;
                    let run = Run { job, candidate, messages, setting: setting.clone() };
                    Some(Row { run, comparison, result: Ok(Vec::new()) })
                };
                let mut compared: Vec<Row<S>> =
                    chosen(&arguments.candidate).into_iter().filter_map(row).collect();
                run_in_turns(&suite, &mut compared, rounds).await?;
                rows.append(&mut compared);
                comparison += 1;
            }
        }
    }
    Ok(rows)
}

/// Has the candidates of a setting run in turns.
async fn run_in_turns<S: Suite>(
    suite: &S,
    rows: &mut [Row<S>],
    rounds: u32,
) -> Result<(), Failure> {
    for round in 0..rounds {
        for Row { run, result, .. } in &mut *rows {
            // One failure is enough to say so.
            let Ok(runs) = result else { continue };
            if round > 0 && S::runs_once(run.job) {
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
    Ok(())
}

/// What a run took, or why it failed. An error of its own ends everything.
async fn once<S: Suite>(suite: &S, run: &RunOf<S>) -> Result<Result<Measured, String>, Failure> {
    suite.prepare(run).await?;
    let mut answer = child::ask::<S>(run).await?;
    let checked = suite.check(run, answer.as_mut().unwrap_or(&mut Measured::default())).await;
    Ok(answer.and_then(|measured| match checked {
        Ok(()) => Ok(measured),
        Err(wrong) => Err(wrong.to_string()),
    }))
}
