//! Repairing: `replay`, `edit`, `move`, `purge`.

use std::path::PathBuf;
use std::sync::Mutex;

use clap::Args;
use leveret::amqp::ShortStr;
use leveret::{Client, Draft, ParkingLot, Task};

use super::{Lot, Pace, Returns, SoFar, To, Which, carry_out, confirm};
use crate::failure::Failure;
use crate::message::Header;
use crate::output::counted;
use crate::reach::Reach;

/// What all of them share: the lot, how much of it is meant, and the broker.
#[derive(Debug, Args)]
struct Work {
    #[command(flatten)]
    lot: Lot,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    returns: Returns,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    reach: Reach,
}

impl Work {
    /// Does a task of the lot with the messages that are meant. `done` is a word for it.
    async fn run<'t>(
        &self,
        done: &str,
        task: impl AsyncFnOnce(&ParkingLot) -> Result<Task<'t>, Failure>,
    ) -> Result<(), Failure> {
        let so_far = SoFar::default();
        let command = async |client: &Client| {
            let task = task(&self.returns.lot(client, &self.lot.lot)).await?;
            carry_out(task, self.which.filter(), &self.pace, self.lot.form, done, &so_far).await
        };
        let result = self.reach.with_client(command).await;
        result.map_err(|failure| so_far.told_with(failure, done))
    }
}

/// Whether to go on without asking.
#[derive(Debug, Args)]
#[command(next_help_heading = None::<&'static str>)]
struct Consent {
    /// Do not ask before all messages of the lot are changed.
    #[arg(long, short = 'y')]
    yes: bool,
}

impl Consent {
    /// Asks before a command changes every message of the lot. One with a filter or a limit has said what it means.
    async fn check(&self, work: &Work, verb: &str, lot: &ParkingLot) -> Result<(), Failure> {
        let Pace { limit, dry_run, .. } = &work.pace;
        if self.yes || *dry_run || limit.is_some() || !work.which.filter().is_all() {
            return Ok(());
        }
        let messages = counted(lot.depth().await?, "message");
        confirm(&format!("{verb} all of {messages} in {:?}?", lot.queue()))
    }
}

/// Publish messages to the queue they failed in, with their counters reset; or elsewhere.
#[derive(Debug, Args)]
pub(super) struct Replay {
    #[command(flatten)]
    consent: Consent,
    #[command(flatten)]
    to: To,
    #[command(flatten)]
    work: Work,
}

impl Replay {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let replay = async |lot: &ParkingLot| {
            self.consent.check(&self.work, "Replay", lot).await?;
            Ok(lot.replay_to(self.to.target()))
        };
        self.work.run("replayed", replay).await
    }
}

/// Changes messages, and replays them.
#[derive(Debug, Args)]
#[command(
    override_usage = "leveret parking edit <LOT> [--body TEXT | --body-file FILE] [--content-type TYPE] \
                            [--set-header NAME=TEXT]... [--remove-header NAME]... [OPTIONS]"
)]
pub(super) struct Edit {
    #[command(flatten)]
    consent: Consent,
    #[command(flatten)]
    changes: Changes,
    #[command(flatten)]
    to: To,
    #[command(flatten)]
    work: Work,
}

/// What is changed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Changes")]
#[group(required = true, multiple = true)]
struct Changes {
    #[arg(long, value_name = "TEXT", conflicts_with = "body_file", help = "A new body")]
    body: Option<String>,

    #[arg(long, value_name = "FILE", help = "A new body, from a file")]
    body_file: Option<PathBuf>,

    #[arg(long, value_name = "TYPE", help = "A new content type")]
    content_type: Option<String>,

    #[arg(long = "set-header", value_name = "NAME=TEXT", value_parser = Header::parse, help = "Sets a header; NAME:=VALUE for numbers")]
    set_headers: Vec<Header>,

    #[arg(long = "remove-header", value_name = "NAME", help = "Takes a header away")]
    remove_headers: Vec<String>,
}

impl Edit {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let body = match (&self.changes.body, &self.changes.body_file) {
            (Some(text), _) => Some(text.clone().into_bytes()),
            (None, Some(path)) => Some(
                std::fs::read(path)
                    .map_err(|error| Failure::wrong(format_args!("{}: {error}", path.display())))?,
            ),
            (None, None) => None,
        };
        let body = body.map(bytes::Bytes::from);
        let content_type = self.changes.content_type.clone().map(ShortStr::try_from);
        let content_type = content_type
            .transpose()
            .map_err(|error| Failure::wrong(format_args!("--content-type: {error}")))?;
        let target = self.to.target();
        // A header that cannot be set is the same mistake for every message.
        let mistake = Mutex::new(None);
        let edit = |_: &_, draft: &mut Draft| {
            if let Some(body) = &body {
                draft.body = body.clone();
            }
            if let Some(content_type) = &content_type {
                draft.properties.content_type = Some(content_type.clone());
            }
            if let Err(error) = self.changes.change_headers(draft) {
                mistake.lock().unwrap_or_else(|lock| lock.into_inner()).get_or_insert(error);
            }
            draft.target = target.clone();
        };
        self.check_headers()?;
        let change = async |lot: &ParkingLot| {
            self.consent.check(&self.work, "Change and replay", lot).await?;
            Ok(lot.edit(edit))
        };
        self.work.run("replayed", change).await?;
        match mistake.into_inner().unwrap_or_else(|lock| lock.into_inner()) {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    /// A name that is too long is found before anything is touched.
    fn check_headers(&self) -> Result<(), Failure> {
        for name in self.changes.set_headers.iter().map(|header| &header.name) {
            ShortStr::try_from(name.as_str())
                .map_err(|error| Failure::wrong(format_args!("--set-header {name:?}: {error}")))?;
        }
        Ok(())
    }
}

impl Changes {
    fn change_headers(&self, draft: &mut Draft) -> Result<(), leveret::Error> {
        for name in &self.remove_headers {
            draft.remove_header(name);
        }
        for Header { name, value } in &self.set_headers {
            draft.set_header(name, value.clone())?;
        }
        Ok(())
    }
}

/// Moves messages to another queue or exchange as they are. They keep their story, and can be replayed from there.
#[derive(Debug, Args)]
pub(super) struct Move {
    #[command(flatten)]
    to: To,
    #[command(flatten)]
    work: Work,
}

impl Move {
    pub(super) async fn run(self) -> Result<(), Failure> {
        if self.to.to_queue.is_none() && self.to.to_exchange.is_none() {
            return Err(Failure::wrong(
                "where to? Give --to-queue or --to-exchange; `leveret parking replay` sends messages back to where they came from",
            ));
        }
        self.work.run("moved", async |lot| Ok(lot.move_to(self.to.target()))).await
    }
}

/// Drops messages for good. Asks first.
#[derive(Debug, Args)]
pub(super) struct Purge {
    /// Do not ask.
    #[arg(long, short = 'y')]
    yes: bool,

    #[command(flatten)]
    work: Work,
}

impl Purge {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let Work { which, pace, .. } = &self.work;
        let purge = async |lot: &ParkingLot| {
            if !self.yes && !pace.dry_run {
                let which = match which.filter().is_all() && pace.limit.is_none() {
                    true => format!("all of {}", counted(lot.depth().await?, "message")),
                    false => "the messages that are meant".to_owned(),
                };
                confirm(&format!("Drop {which} in {:?}, for good?", lot.queue()))?;
            }
            Ok(lot.purge())
        };
        self.work.run("dropped", purge).await
    }
}
