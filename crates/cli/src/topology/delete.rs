//! `leveret topology delete`: a queue goes with all that retrying has put beside it.

use clap::{Args, ValueEnum};
use leveret::{Acapi, Belonging, Chandra, Client, Exchange, QueueRemoval, Retry, RetryPolicy};
use serde_json::json;

use crate::failure::Failure;
use crate::management::{Management, ManagementOptions};
use crate::output::{Form, counted, print, print_json};
use crate::reach::{Reach, deadline_in};

/// Deletes a queue with all that belongs to it: its retry, wait and parking queues and their exchanges.
///
/// Nothing is deleted while one of the queues has messages or consumers. Wait queues that the default policy does not name are
/// found by RabbitMQ's management API; without it, name them with --also.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The queue.
    #[arg(value_name = "QUEUE")]
    queue: String,

    /// Which design has put objects beside it.
    #[arg(long, value_enum, default_value_t)]
    profile: Profile,

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
}

impl Profile {
    fn retry(self) -> Retry {
        match self {
            Profile::Leveret => RetryPolicy::default().into(),
            Profile::Acapi => Acapi::new().into(),
            // The primary exchange stays, whatever its name.
            Profile::Chandra => Chandra::new(Exchange::topic("amq.topic")).into(),
        }
    }
}

pub(super) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let reach = arguments.reach.until(deadline_in(arguments.reach.timeout()));
    let (reach, options) = reach.to_first().await?;
    let management = arguments.management.of(&options, reach.left() / 2).await?;
    let waiting = match arguments.profile {
        Profile::Leveret => waiting(&management, &arguments.queue).await,
        _ => Vec::new(),
    };
    let command = async |client: &Client| {
        let removal = client.queue_removal(&arguments.queue).retry(arguments.profile.retry());
        let further = arguments.also.iter().chain(&waiting);
        let removal = further.fold(removal, QueueRemoval::also);
        let belongings = match arguments.dry_run {
            true => removal.plan().await?,
            false => removal.run().await?,
        };
        Ok(belongings)
    };
    let belongings = reach.with_client_briefly(command).await?;
    arguments.show(&belongings)
}

/// The wait queues of a queue, if the management API answers: those that dead-letter to its return exchange.
async fn waiting(management: &Management, queue: &str) -> Vec<String> {
    let back = format!("{queue}.return");
    let all = management.queues().await.unwrap_or_default();
    let is_waiting = all.into_iter().filter(|(_, facts)| {
        let exchange = facts.setting("dead-letter-exchange");
        exchange.and_then(|exchange| exchange.as_str()) == Some(&back)
    });
    is_waiting.map(|(name, _)| name).collect()
}

impl Arguments {
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
