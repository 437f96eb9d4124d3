//! `leveret topology delete`: a queue goes with all that retrying has put beside it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use leveret::{Belonging, Client, Exchange, QueueRemoval, Retry, RetryPolicy};
use leveret_profiles::{Acapi, Chandra, CoverArt, Orb};
use serde_json::json;

use crate::failure::Failure;
use crate::management::{ManagementOptions, QueueFacts};
use crate::output::{Form, counted, note, print, print_json};
use crate::reach::{Reach, deadline_in};
use crate::run::retry_in;

/// Deletes a queue with all that belongs to it: its retry, wait and parking queues and their exchanges.
///
/// Nothing is deleted while one of the queues has messages or consumers. RabbitMQ's management API tells which messages are delivered
/// and not acknowledged, as of its last count some seconds ago, which other wait queues there are, and whether the queue dead-letters
/// by another design. Without it, none of that is known: stop consumers first, name the design, and wait queues with --also.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The queue.
    #[arg(value_name = "QUEUE")]
    queue: String,

    /// Which design has put objects beside it.
    #[arg(long, value_enum, default_value_t)]
    profile: Profile,

    /// The file of `leveret run` that has its consumer: the retry table there says which design, and what it calls its objects.
    #[arg(long, value_name = "FILE", conflicts_with = "profile")]
    file: Option<PathBuf>,

    /// Another queue that belongs to it. May be given more than once.
    #[arg(long, value_name = "QUEUE")]
    also: Vec<String>,

    /// Only tell what would be deleted.
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
    #[command(flatten)]
    management: ManagementOptions,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Profile {
    /// QUEUE.wait, QUEUE.wait.…, QUEUE.return, QUEUE.parked
    #[default]
    Leveret,
    /// QUEUE-retry, QUEUE-retry-requeue, QUEUE-error
    Acapi,
    /// QUEUE.dlx, QUEUE.retry, QUEUE.parking_lot
    Chandra,
    /// Nothing: its other objects serve several queues
    CoverArt,
    /// Nothing: its other objects serve several queues
    Orb,
}

impl Profile {
    fn retry(self) -> Retry {
        match self {
            Profile::Leveret => RetryPolicy::default().into(),
            Profile::Acapi => Acapi::new().into(),
            // The primary exchange stays, whatever its name.
            Profile::Chandra => Chandra::new(Exchange::topic("amq.topic")).into(),
            Profile::CoverArt => CoverArt::new().into(),
            Profile::Orb => Orb::new().into(),
        }
    }

    /// To which exchange its work queues dead-letter, if it has one of their own.
    fn dead_letter_exchange(self, queue: &str) -> Option<String> {
        match self {
            Profile::Acapi => Some(format!("{queue}-retry")),
            Profile::Chandra => Some(format!("{queue}.dlx")),
            Profile::Leveret | Profile::CoverArt | Profile::Orb => None,
        }
    }
}

pub(super) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let retry = match &arguments.file {
        Some(file) => retry_in(file, &arguments.queue)?,
        None => arguments.profile.retry(),
    };
    let reach = arguments.reach.until(deadline_in(arguments.reach.timeout()));
    let (reach, options) = reach.to_first().await?;
    let management = arguments.management.of(&options, reach.left() / 2).await?;
    let known = management.queues().await.unwrap_or_else(|failure| {
        note(&format!("{failure}. What consumers have is not known, nor further wait queues"));
        Vec::new()
    });
    arguments.check_design(&known)?;
    let command = async |client: &Client| {
        let removal = client.queue_removal(&arguments.queue).retry(retry.clone());
        let waiting = arguments.waiting(&known);
        let further = arguments.also.iter().map(String::as_str).chain(waiting);
        let removal = further.fold(removal, QueueRemoval::also);
        if arguments.dry_run {
            return Ok(removal.plan().await?);
        }
        arguments.check_unacked(&removal.plan().await?, &known)?;
        Ok(removal.run().await?)
    };
    let belongings = reach.with_client_briefly(command).await?;
    arguments.show(&belongings)
}

/// To which exchange a queue dead-letters.
fn dead_letters_to(facts: &QueueFacts) -> Option<&str> {
    facts.setting("dead-letter-exchange").and_then(|exchange| exchange.as_str())
}

impl Arguments {
    /// The wait queues that dead-letter to the queue's return exchange.
    fn waiting<'k>(&self, known: &'k [(String, QueueFacts)]) -> impl Iterator<Item = &'k str> {
        let back = match (self.profile, &self.file) {
            (Profile::Leveret, None) => Some(format!("{}.return", self.queue)),
            _ => None,
        };
        let is_waiting = move |facts| back.is_some() && dead_letters_to(facts) == back.as_deref();
        known.iter().filter(move |(_, facts)| is_waiting(facts)).map(|(name, _)| name.as_str())
    }

    /// Objects of another design would be left behind, with their messages.
    fn check_design(&self, known: &[(String, QueueFacts)]) -> Result<(), Failure> {
        let it = known.iter().find(|(name, _)| *name == self.queue);
        let Some(exchange) = it.and_then(|(_, facts)| dead_letters_to(facts)) else {
            return Ok(());
        };
        let is_by = |profile: Profile| {
            profile.dead_letter_exchange(&self.queue).is_some_and(|expected| expected == exchange)
        };
        if self.file.is_some() || is_by(self.profile) {
            return Ok(());
        }
        let queue = &self.queue;
        let advice = match (is_by(Profile::Acapi), is_by(Profile::Chandra)) {
            (true, _) => "say --profile acapi",
            (_, true) => "say --profile chandra",
            _ if self.profile.dead_letter_exchange(queue).is_none() => return Ok(()),
            _ => "name its objects by --file, as for `leveret run`",
        };
        Err(Failure::wrong(format_args!(
            "queue {queue:?} dead-letters to {exchange:?}, so other objects belong to it: {advice}"
        )))
    }

    /// Messages that are out at consumers, which AMQP does not tell of.
    fn check_unacked(
        &self,
        plan: &[Belonging],
        known: &[(String, QueueFacts)],
    ) -> Result<(), Failure> {
        for found in plan.iter().filter(|found| found.is_queue && found.is_there) {
            let facts = known.iter().find(|(name, _)| *name == found.name);
            let out = facts.and_then(|(_, facts)| facts.out()).unwrap_or(0);
            if out > 0 {
                return Err(Failure::new(format_args!(
                    "cannot delete queue {:?} with all that belongs to it: {found} has {} that consumers have and did not \
                     acknowledge. Nothing was deleted: wait until they have, and some seconds until the broker has counted",
                    self.queue,
                    counted(out, "message")
                )));
            }
        }
        Ok(())
    }

    fn show(&self, belongings: &[Belonging]) -> Result<(), Failure> {
        let there = || belongings.iter().filter(|belonging| belonging.is_there);
        for found in there() {
            match self.form.json {
                true => print_json(&json!({
                    "object": found.to_string(),
                    "messages": found.messages,
                    "consumers": found.consumers,
                    "deleted": !self.dry_run,
                }))?,
                false => print(&match (self.dry_run, found.is_queue) {
                    (true, true) => format!(
                        "would delete {found}: {}, {}",
                        counted(found.messages.into(), "message"),
                        counted(found.consumers.into(), "consumer")
                    ),
                    (true, false) => format!("would delete {found}"),
                    (false, true) if found.messages > 0 => format!(
                        "deleted {found}, and with it {} that came at the last moment",
                        counted(found.messages.into(), "message")
                    ),
                    (false, _) => format!("deleted {found}"),
                })?,
            }
        }
        if self.form.json {
            return Ok(());
        }
        let count = counted(there().count() as u64, "object");
        match (there().count(), self.dry_run) {
            (0, _) => print(&format!("nothing belongs to queue {:?} on this broker", self.queue)),
            (_, true) => print(&format!("{count} would be deleted")),
            (_, false) => print(&format!("{count} deleted")),
        }
    }
}
