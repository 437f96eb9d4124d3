//! Looking: `list`, `show`, `groups`.

use std::time::SystemTime;

use clap::Args;
use leveret::{Client, Filter, ParkedMessage};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Lot, Returns, Which};
use crate::failure::Failure;
use crate::message::Shown;
use crate::output::{
    Table, ago, counted, last_line, note, print, print_bytes, print_json, rough, timestamp,
};
use crate::reach::Reach;
use crate::text::escape;

/// Lists messages: the first ones that are meant. They stay where they are.
#[derive(Debug, Args)]
pub(super) struct List {
    #[command(flatten)]
    lot: Lot,

    /// At most so many messages.
    #[arg(short = 'n', long, alias = "count", value_name = "COUNT", default_value_t = 50)]
    limit: usize,

    #[command(flatten)]
    returns: Returns,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    reach: Reach,
}

impl List {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let command = async |client: &Client| {
            let lot = self.returns.lot(client, &self.lot.lot);
            let messages = lot.list(&self.which.filter(), self.limit).await?;
            Ok((messages, lot.depth().await?))
        };
        let (messages, depth) = self.reach.with_client_briefly(command).await?;
        if self.lot.form.json {
            return messages.iter().try_for_each(|message| print_json(&told(message)));
        }
        if !messages.is_empty() {
            let headings = ["#", "id", "queue", "kind", "tries", "age", "error"];
            let mut table = Table::new(&headings);
            messages.iter().for_each(|message| table.row(row(message)));
            table.print()?;
        }
        let shown = messages.len() as u64;
        note(&format!("{shown} of {} shown", counted(depth, "message")));
        Ok(())
    }
}

fn row(message: &ParkedMessage) -> Vec<String> {
    let dash = || "–".to_owned();
    let story = message.story();
    vec![
        message.position().to_string(),
        message.message_id().unwrap_or_else(dash),
        story.queue.clone().unwrap_or_else(dash),
        story.kind.clone().unwrap_or_else(dash),
        story.attempts.map_or_else(dash, |attempts| attempts.to_string()),
        message.age(SystemTime::now()).map_or_else(dash, rough),
        story.error.as_deref().map(last_line).unwrap_or_default(),
    ]
}

/// A message with its story, for a program: the form of an export, and beside it what is known of its failures.
fn told(message: &ParkedMessage) -> Value {
    let story = message.story();
    let mut told: Value = serde_json::from_str(&message.to_json()).unwrap_or_default();
    told["position"] = json!(message.position());
    told["story"] = json!({
        "queue": story.queue,
        "reason": story.reason,
        "kind": story.kind,
        "error": story.error,
        "attempts": story.attempts,
        "first_failure": timestamp(story.first_failure),
        "last_failure": timestamp(story.last_failure),
    });
    told
}

/// Shows one message, all of it: its story, properties and body. It stays where it is.
#[derive(Debug, Args)]
pub(super) struct Show {
    #[command(flatten)]
    lot: Lot,

    /// Its place in the lot, as `list` counts them.
    #[arg(value_name = "NUMBER", required_unless_present = "id")]
    position: Option<u64>,

    /// Its message id, instead.
    #[arg(long, value_name = "ID", conflicts_with = "position")]
    id: Option<String>,

    /// Write only the body, as it is.
    #[arg(long, conflicts_with = "json")]
    raw: bool,

    #[command(flatten)]
    returns: Returns,
    #[command(flatten)]
    reach: Reach,
}

impl Show {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let mut filter = Filter::new();
        if let Some(id) = &self.id {
            filter = filter.message_id(id);
        }
        if let Some(position) = self.position {
            filter = filter.position(position);
        }
        let command = async |client: &Client| {
            Ok(self.returns.lot(client, &self.lot.lot).list(&filter, 1).await?)
        };
        let messages = self.reach.with_client_briefly(command).await?;
        let Some(message) = messages.first() else {
            return Err(Failure::new(format_args!(
                "there is no such message in {:?}",
                self.lot.lot
            )));
        };
        match (self.raw, self.lot.form.json) {
            (true, _) => print_bytes(message.body()),
            (_, true) => print_json(&told(message)),
            _ => print(&in_full(message)),
        }
    }
}

fn in_full(message: &ParkedMessage) -> String {
    let story = message.story();
    let time = |time| timestamp(time).map(|at| format!("{at} ({} ago)", ago(time)));
    let facts = [
        ("failed in", story.queue.clone()),
        ("reason", story.reason.clone()),
        ("error", story.error.clone()),
        ("kind", story.kind.clone()),
        ("tries", story.attempts.map(|attempts| attempts.to_string())),
        ("first failure", time(story.first_failure)),
        ("last failure", time(story.last_failure)),
    ];
    let mut text = format!("message {}\n", message.position());
    for (name, fact) in facts {
        if let Some(fact) = fact {
            text += &format!("{name:<15} {}\n", escape(&fact));
        }
    }
    for past in &story.history {
        text += &format!("  {} {}\n", ago(past.at), escape(&past.error));
    }
    text + &Shown::from(message).in_full()
}

/// Groups messages by queue, kind and text of their last error; the largest group first.
#[derive(Debug, Args)]
pub(super) struct Groups {
    #[command(flatten)]
    lot: Lot,
    #[command(flatten)]
    returns: Returns,
    #[command(flatten)]
    which: Which,

    #[command(flatten)]
    reach: Reach,
}

/// A group, for a program.
#[derive(Serialize)]
struct Told {
    count: u64,
    queue: Option<String>,
    kind: Option<String>,
    error: Option<String>,
    first: Option<String>,
    last: Option<String>,
    example: u64,
    example_id: Option<String>,
}

impl Groups {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let filter = self.which.filter();
        let command = async |client: &Client| {
            Ok(self.returns.lot(client, &self.lot.lot).groups(&filter).await?)
        };
        let groups = self.reach.with_client_briefly(command).await?;
        if self.lot.form.json {
            return groups.into_iter().try_for_each(|group| {
                print_json(&Told {
                    count: group.count,
                    queue: group.queue,
                    kind: group.kind,
                    error: group.error,
                    first: timestamp(group.first),
                    last: timestamp(group.last),
                    example: group.example,
                    example_id: group.example_id,
                })
            });
        }
        if groups.is_empty() {
            note(&format!("there is no such message in {:?}", self.lot.lot));
            return Ok(());
        }
        let mut table = Table::new(&["count", "queue", "kind", "last", "example", "error"]);
        let dash = || "–".to_owned();
        for group in groups {
            table.row(vec![
                group.count.to_string(),
                group.queue.unwrap_or_else(dash),
                group.kind.unwrap_or_else(dash),
                ago(group.last),
                format!("#{}", group.example),
                group.error.as_deref().map_or_else(dash, last_line),
            ]);
        }
        table.print()
    }
}
