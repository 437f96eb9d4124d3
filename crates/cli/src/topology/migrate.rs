//! `leveret topology migrate`: a queue gets another type or other arguments, and keeps its messages.
//!
//! The broker is looked at, the next step is taken, and the broker is looked at again, until there is nothing left to do. What
//! was done is to be seen on the broker and noted nowhere else, so it does not matter who did it, or how far one came who was
//! killed.

mod guess;
mod hold;
mod place;
mod step;
mod watch;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use leveret::{Client, Queue, QueueType, Topology};
use serde_json::json;

use crate::failure::Failure;
use crate::management::ManagementOptions;
use crate::output::{Form, counted, print, print_json};
use crate::reach::{Reach, duration};
use hold::Hold;
use place::{Moved, Place};
use step::{Declared, Names, Seen, Step};

/// Gives a queue the type and arguments that the file has for it, without losing a message. Publishers and consumers go on.
///
/// What comes by exchanges is led to another queue for the time being, what is in the queue to a third; then it is deleted,
/// declared as the file has it, and everything comes back. It can be stopped at any time: run it again and it goes on. Until the
/// queue is deleted, --undo goes back; after that, it refuses. Needs RabbitMQ's management API.
///
/// Messages keep their order, routing key and properties; what was moved says in x-leveret-exchange by which exchange it had come,
/// and its time to live begins anew. Consumers are cancelled when the queue is deleted, and have to subscribe again, which those of
/// Leveret do by themselves.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The topology: TOML, or YAML if its name ends so.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// The queue.
    #[arg(value_name = "QUEUE")]
    queue: String,

    /// Only tell what would be done.
    #[arg(long)]
    dry_run: bool,

    /// Go back: keep the queue as it is, and give it back what one that was stopped has led elsewhere. Refuses if the queue is
    /// replaced already.
    #[arg(long)]
    undo: bool,

    /// Go on although somebody sends to the queue by its name, through the default exchange. For a moment there is no queue of that
    /// name: what comes then is returned to publishers that ask for it (mandatory), and lost to others.
    #[arg(long)]
    direct: bool,

    /// How long consumers may take to finish the messages that they have.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration)]
    within: Duration,

    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
    #[command(flatten)]
    management: ManagementOptions,
}

/// How often a step may be taken. Who declares or binds the queue again and again is told of.
const MAX_TIMES: usize = 5;

/// What to do if it fails in the middle.
const LATER: &str = ". Nothing is lost: run it again and it goes on, with --undo it goes back";
/// The same once the queue is another.
const AGAIN: &str = ". Nothing is lost: run it again and it goes on";

pub(super) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let wanted = arguments.wanted()?;
    let (reach, options) = arguments.reach.to_first().await?;
    let management = arguments.management.of(&options, reach.timeout()).await?;
    let command = async |client: &Client| {
        let names = Names::of(&arguments.queue);
        let hold = Hold::open(&options, &names).await?;
        let place = Place {
            client,
            management: &management,
            hold: &hold,
            names: &names,
            wanted: &wanted,
            arguments: &arguments,
        };
        let result = match arguments.dry_run {
            true => arguments.plan(&place).await,
            false => match hold.take().await {
                Ok(()) => arguments.migrate(&place).await,
                Err(failure) => Err(failure),
            },
        };
        hold.release().await;
        result
    };
    reach.with_client(command).await
}

impl Arguments {
    /// The queue as the file has it.
    fn wanted(&self) -> Result<Queue, Failure> {
        let topology = Topology::read(&self.file)?;
        let queue = topology.queues().iter().find(|queue| queue.name() == self.queue);
        let Some(queue) = queue else {
            let file = self.file.display();
            return Err(Failure::wrong(format_args!("{file} has no queue {:?}", self.queue)));
        };
        let why = if queue.is_named_by_broker() {
            "is named by the broker, for one client"
        } else if queue.is_exclusive() {
            "belongs to one connection"
        } else if queue.is_auto_delete() {
            "is deleted with its last consumer"
        } else if queue.queue_type() == Some(QueueType::Stream) {
            "is a stream in the file, which is read and not emptied: declare it under another name"
        } else if Names::of(&self.queue).back.len() > usize::from(u8::MAX) {
            "has too long a name: no room is left for .leveret-migrate.back"
        } else {
            return Ok(queue.clone());
        };
        Err(Failure::wrong(format_args!("queue {:?} {why}: it cannot be migrated", self.queue)))
    }

    /// What there is to be done, if it can be.
    async fn first_look(&self, place: &Place<'_>) -> Result<Seen, Failure> {
        place.check_api().await?;
        let seen = place.look().await?;
        if seen.queue == Declared::Absent && (self.undo || !seen.is_begun()) {
            return Err(self.absent(&seen));
        }
        place.check(&seen).await?;
        Ok(seen)
    }

    async fn plan(&self, place: &Place<'_>) -> Result<(), Failure> {
        let seen = self.first_look(place).await?;
        let steps = seen.all_steps(place.names);
        if steps.is_empty() {
            return self.tell_same();
        }
        steps.into_iter().try_for_each(|step| self.tell_step(step, place))
    }

    async fn migrate(&self, place: &Place<'_>) -> Result<(), Failure> {
        let mut seen = self.first_look(place).await?;
        if seen.next().is_none() {
            return self.tell_same();
        }
        if seen.queue == Declared::Otherwise {
            place.try_out().await?;
        }
        let mut taken: Vec<Step> = Vec::new();
        let mut moved = Moved::default();
        while let Some(step) = seen.next() {
            taken.push(step);
            seen = match self.take(step, &taken, &seen, place, &mut moved).await {
                Ok(seen) => seen,
                Err(failure) => {
                    let then = place.look().await.map_or(AGAIN, |seen| self.advice(&seen));
                    return Err(failure.and(then));
                }
            };
        }
        self.finish(&moved)
    }

    /// Takes a step, and looks what there is then.
    async fn take(
        &self,
        step: Step,
        taken: &[Step],
        seen: &Seen,
        place: &Place<'_>,
        moved: &mut Moved,
    ) -> Result<Seen, Failure> {
        if taken.iter().filter(|other| **other == step).count() > MAX_TIMES {
            return Err(Failure::new(format_args!(
                "somebody declares or binds queue {:?} again and again",
                self.queue
            )));
        }
        // Whoever reads no further has not asked it to stop half-way.
        let _ = self.tell_step(step, place);
        place.take(step, seen, moved).await?;
        place.look().await
    }

    /// What to do after a failure.
    fn advice(&self, seen: &Seen) -> &'static str {
        match seen.queue {
            _ if !seen.is_begun() => "",
            Declared::Otherwise => LATER,
            Declared::AsWanted | Declared::Absent => AGAIN,
        }
    }

    fn absent(&self, seen: &Seen) -> Failure {
        let queue = &self.queue;
        match seen.is_begun() {
            true => Failure::new(format_args!(
                "queue {queue:?} is deleted already, and --undo cannot bring it back: run it without --undo, and it is declared as \
                 the file has it"
            )),
            false => Failure::new(format_args!(
                "there is no queue {queue:?}; `leveret topology apply` declares it"
            )),
        }
    }

    fn finish(&self, moved: &Moved) -> Result<(), Failure> {
        let Moved { there, back, gone } = moved;
        let _ = match self.form.json {
            true => print_json(
                &json!({ "step": "done", "moved_out": there, "moved_back": back, "gone": gone }),
            ),
            false => print(&format!(
                "done        queue {:?}: {} moved out, {back} back",
                self.queue,
                counted(*there, "message")
            )),
        };
        match gone {
            0 => Ok(()),
            gone => Err(Failure::new(format_args!(
                "{} that came directly while the queue was deleted went with it",
                counted(*gone, "message")
            ))),
        }
    }

    fn tell_same(&self) -> Result<(), Failure> {
        let why = if self.undo { "no migration was stopped, " } else { "" };
        self.tell("same", &format!("queue {:?}: {why}there is nothing to do", self.queue))
    }

    fn tell_step(&self, step: Step, place: &Place<'_>) -> Result<(), Failure> {
        self.tell(step.as_str(), &step.told(place.names))
    }

    fn tell(&self, step: &str, text: &str) -> Result<(), Failure> {
        match self.form.json {
            true => print_json(&json!({ "step": step, "text": text, "dry_run": self.dry_run })),
            false => print(&format!("{step:<11} {text}")),
        }
    }
}
