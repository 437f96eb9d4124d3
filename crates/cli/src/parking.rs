//! `leveret parking`: what became of messages that failed for good, and another try for them.

mod look;
mod repair;
mod transfer;

use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::{Args, Subcommand};
use leveret::{Client, Filter, ParkingLot, Target, Task};

use crate::failure::Failure;
use crate::message::{Header, with};
use crate::output::{Form, counted, fault, print, print_json, unless_unread};
use crate::progress::bar;
use crate::reach::duration;
use crate::text::escape;

/// Looks into parking lots, and repairs what is there.
///
/// A parking lot is a queue of messages that are not tried again; by default that of the queue `jobs` is `jobs.parked`. Any
/// other queue can be looked into as well. Nothing is lost if a command is stopped in the middle: a message leaves the lot
/// when it is safe elsewhere.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(look::List),
    Show(look::Show),
    Groups(look::Groups),
    Replay(repair::Replay),
    Edit(repair::Edit),
    Move(repair::Move),
    Purge(repair::Purge),
    Export(transfer::Export),
    Import(transfer::Import),
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    match arguments.command {
        Command::List(arguments) => arguments.run().await,
        Command::Show(arguments) => arguments.run().await,
        Command::Groups(arguments) => arguments.run().await,
        Command::Replay(arguments) => arguments.run().await,
        Command::Edit(arguments) => arguments.run().await,
        Command::Move(arguments) => arguments.run().await,
        Command::Purge(arguments) => arguments.run().await,
        Command::Export(arguments) => arguments.run().await,
        Command::Import(arguments) => arguments.run().await,
    }
}

/// The lot, and what all commands share.
#[derive(Debug, Args)]
#[command(next_help_heading = None::<&'static str>)]
struct Lot {
    /// The queue of the parking lot.
    #[arg(value_name = "LOT")]
    lot: String,

    #[command(flatten)]
    form: Form,
}

/// What the broker may do to messages that are looked at.
#[derive(Debug, Args)]
#[command(next_help_heading = None::<&'static str>)]
pub(crate) struct Returns {
    /// Accept that RabbitMQ before 4.3 counts each look at a quorum queue against its delivery limit, and drops messages beyond
    /// it. Not needed for the parking lots of Leveret, nor for classic queues without further arguments.
    #[arg(long)]
    allow_counted_returns: bool,
}

impl Returns {
    /// The lot of this name.
    pub(crate) fn lot(&self, client: &Client, name: &str) -> ParkingLot {
        let lot = client.parking_lot(name);
        if self.allow_counted_returns { lot.allow_counted_returns() } else { lot }
    }
}

/// Which messages are meant: those that meet all of these; all messages if there are none.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Which messages")]
struct Which {
    #[arg(long, value_name = "NAME", help = "Those that failed in this queue")]
    from_queue: Option<String>,

    #[arg(long, value_name = "KIND", help = "Those whose last error was of this kind")]
    kind: Option<String>,

    #[arg(long, value_name = "REASON", help = "Those parked for this reason")]
    reason: Option<String>,

    #[arg(long, value_name = "TEXT", help = "Those whose last error has this in its text")]
    error: Option<String>,

    #[arg(long, value_name = "ID", help = "The one with this message id")]
    id: Option<String>,

    #[arg(
        long,
        value_name = "NUMBER",
        help = "The one at this place in the lot, as `list` counts them"
    )]
    position: Option<u64>,

    #[arg(long, value_name = "TIME", value_parser = duration, help = "Those that failed longer ago, as in 2h")]
    older_than: Option<Duration>,

    #[arg(long, value_name = "TIME", value_parser = duration, help = "Those that failed since then, as in 10m")]
    newer_than: Option<Duration>,

    #[arg(long = "with-header", value_name = "NAME=TEXT", value_parser = Header::parse, help = "Those with this header; NAME:=VALUE for numbers")]
    headers: Vec<Header>,
}

impl Which {
    fn filter(&self) -> Filter {
        let mut filter = Filter::new();
        filter = with(filter, &self.from_queue, Filter::queue);
        filter = with(filter, &self.kind, Filter::kind);
        filter = with(filter, &self.reason, Filter::reason);
        filter = with(filter, &self.error, Filter::error_contains);
        filter = with(filter, &self.id, Filter::message_id);
        filter = with(filter, &self.position, Filter::position);
        filter = with(filter, &self.older_than, Filter::older_than);
        filter = with(filter, &self.newer_than, Filter::newer_than);
        for Header { name, value } in &self.headers {
            filter = filter.header(name, value.clone());
        }
        filter
    }
}

/// How much of it is done, and how fast.
#[derive(Debug, Args)]
#[command(next_help_heading = None::<&'static str>)]
struct Pace {
    /// At most so many messages.
    #[arg(short = 'n', long, alias = "count", value_name = "COUNT")]
    limit: Option<u64>,

    /// At most so many messages a second.
    #[arg(long, value_name = "PER-SECOND")]
    rate: Option<f64>,

    /// Only tell what would be done.
    #[arg(long)]
    dry_run: bool,
}

/// Where messages go.
#[derive(Debug, Args)]
#[command(next_help_heading = "Where to")]
struct To {
    /// To this queue.
    #[arg(long, value_name = "QUEUE", conflicts_with = "to_exchange")]
    to_queue: Option<String>,

    /// To this exchange, under the message's own routing key.
    #[arg(long, value_name = "EXCHANGE")]
    to_exchange: Option<String>,

    /// With --to-exchange: under this routing key.
    #[arg(long, value_name = "KEY", requires = "to_exchange")]
    key: Option<String>,
}

impl To {
    fn target(&self) -> Target {
        match (&self.to_queue, &self.to_exchange) {
            (Some(queue), _) => Target::queue(queue),
            (None, Some(name)) => {
                Target::Exchange { name: name.clone(), routing_key: self.key.clone() }
            }
            (None, None) => Target::Origin,
        }
    }
}

/// How many messages are done, for the words of a command that a signal or a failure ends before it can count them itself.
#[derive(Debug, Default)]
struct SoFar {
    done: AtomicU64,
    possibly_duplicated: AtomicU64,
}

impl SoFar {
    fn set(&self, done: u64, possibly_duplicated: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.possibly_duplicated.store(possibly_duplicated, Ordering::Relaxed);
    }

    /// The failure, with what was done before. `done` is a word for it.
    fn told_with(&self, failure: Failure, done: &str) -> Failure {
        let failure = match self.done.load(Ordering::Relaxed) {
            0 => failure,
            count => failure.and(&format!("; at least {} {done}", counted(count, "message"))),
        };
        match duplicates(self.possibly_duplicated.load(Ordering::Relaxed)) {
            None => failure,
            Some(text) => failure.and(&format!("; {text}")),
        }
    }
}

/// Says how many messages may be there twice, if any.
fn duplicates(count: u64) -> Option<String> {
    (count > 0).then(|| format!("up to {} may have been sent twice", counted(count, "message")))
}

/// Does a task with its filter, pace and progress, and tells what was done. `done` is a word for it.
async fn carry_out(
    task: Task<'_>,
    filter: Filter,
    pace: &Pace,
    form: Form,
    done: &str,
    so_far: &SoFar,
) -> Result<(), Failure> {
    let mut task = with(task.filter(filter), &pace.limit, Task::limit);
    task = with(task, &pace.rate, Task::rate);
    if pace.dry_run {
        task = task.dry_run();
    }
    let bar = bar(0, "looked at");
    let shown = bar.clone();
    let task = task.progress(move |progress| {
        so_far.set(if pace.dry_run { 0 } else { progress.done }, progress.possibly_duplicated);
        shown.set_length(progress.total);
        shown.set_position(progress.seen);
        shown.set_message(format!("{} {done}, {} failed", progress.done, progress.failed));
    });
    let progress = task.run().await;
    bar.finish_and_clear();
    let progress = progress?;
    so_far.set(0, 0);
    for one in &progress.not_done {
        let id = one.message_id.as_ref().map(|id| format!(" ({})", escape(id))).unwrap_or_default();
        fault(&format!("message {}{id} stays: {}", one.position, one.error));
    }
    unless_unread(match form.json {
        true => print_json(&serde_json::json!({
            "dry_run": pace.dry_run,
            "total": progress.total,
            "seen": progress.seen,
            "selected": progress.selected,
            "done": progress.done,
            "failed": progress.failed,
            "possibly_duplicated": progress.possibly_duplicated,
        })),
        false => {
            let would = if pace.dry_run { "would be " } else { "" };
            let twice = duplicates(progress.possibly_duplicated);
            print(&format!(
                "{} of {} {would}{done}{}",
                progress.done,
                counted(progress.total, "message"),
                twice.map(|text| format!("; {text}")).unwrap_or_default()
            ))
        }
    })?;
    match progress.failed {
        0 => Ok(()),
        failed => Err(Failure::new(format_args!(
            "{} could not be {done} and stay",
            counted(failed, "message")
        ))),
    }
}

/// Asks whether to go on. Without a terminal nobody can be asked.
fn confirm(question: &str) -> Result<(), Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::wrong(format_args!(
            "{question} There is no terminal to ask on: pass --yes, or say which messages by an option"
        )));
    }
    let mut err = io::stderr().lock();
    let asked = write!(err, "{question} [y/N] ").and_then(|()| err.flush());
    drop(err);
    asked.map_err(|error| {
        Failure::new(format_args!("nothing was done: there is no way to ask: {error}"))
    })?;
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    match read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes") {
        true => Ok(()),
        false => Err(Failure::new("nothing was done")),
    }
}
