//! Repairing: `replay`, `edit`, `move`, `purge`.

use std::path::PathBuf;
use std::sync::Mutex;

use clap::Args;
use leveret::amqp::ShortStr;
use leveret::{Client, Draft};

use super::{Lot, Pace, To, Which, carry_out, confirm};
use crate::failure::Failure;
use crate::message::Header;
use crate::output::counted;
use crate::reach::Reach;

/// Sends messages back to where they came from, with their counters reset; or elsewhere.
#[derive(Debug, Args)]
pub(super) struct Replay {
    #[command(flatten)]
    lot: Lot,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    to: To,
    #[command(flatten)]
    which: Which,

    #[command(flatten)]
    reach: Reach,
}

impl Replay {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let command = async |client: &Client| {
            let task = client.parking_lot(&self.lot.lot).replay_to(self.to.target());
            carry_out(task, self.which.filter(), &self.pace, self.lot.form, "replayed").await
        };
        self.reach.with_client(command).await
    }
}

/// Changes messages, and replays them.
#[derive(Debug, Args)]
pub(super) struct Edit {
    #[command(flatten)]
    lot: Lot,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    to: To,
    #[command(flatten)]
    changes: Changes,
    #[command(flatten)]
    which: Which,

    #[command(flatten)]
    reach: Reach,
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
        let command = async |client: &Client| {
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
            let task = client.parking_lot(&self.lot.lot).edit(edit);
            carry_out(task, self.which.filter(), &self.pace, self.lot.form, "replayed").await
        };
        self.check_headers()?;
        self.reach.with_client(command).await?;
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
    lot: Lot,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    to: To,
    #[command(flatten)]
    which: Which,

    #[command(flatten)]
    reach: Reach,
}

impl Move {
    pub(super) async fn run(self) -> Result<(), Failure> {
        if self.to.to_queue.is_none() && self.to.to_exchange.is_none() {
            return Err(Failure::wrong(
                "where to? Give --to-queue or --to-exchange; `leveret parking replay` sends messages back to where they came from",
            ));
        }
        let command = async |client: &Client| {
            let task = client.parking_lot(&self.lot.lot).move_to(self.to.target());
            carry_out(task, self.which.filter(), &self.pace, self.lot.form, "moved").await
        };
        self.reach.with_client(command).await
    }
}

/// Drops messages for good. Asks first.
#[derive(Debug, Args)]
pub(super) struct Purge {
    #[command(flatten)]
    lot: Lot,
    #[command(flatten)]
    pace: Pace,

    /// Do not ask.
    #[arg(long, short = 'y')]
    yes: bool,

    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    reach: Reach,
}

impl Purge {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let command = async |client: &Client| {
            let lot = client.parking_lot(&self.lot.lot);
            if !self.yes && !self.pace.dry_run {
                let which = match self.which.filter().is_all() && self.pace.limit.is_none() {
                    true => format!("all of {}", counted(lot.depth().await?, "message")),
                    false => "the messages that are meant".to_owned(),
                };
                confirm(&format!("Drop {which} in {:?}, for good?", self.lot.lot))?;
            }
            carry_out(lot.purge(), self.which.filter(), &self.pace, self.lot.form, "dropped").await
        };
        self.reach.with_client(command).await
    }
}
