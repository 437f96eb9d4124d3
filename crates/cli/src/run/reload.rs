//! Reading the file again: what is wrong with it is found before anything is changed.

use std::path::Path;

use leveret::{Change, ErrorKind};

use super::file::File;
use super::running::{Context, Definition, MissingQueue, Prepared};
use crate::failure::Failure;

/// A file that can be run.
pub(super) struct Reloaded {
    pub(super) file: File,
    pub(super) definitions: Vec<Definition>,
    pub(super) new: Vec<Prepared>,
}

/// Reads a file, has its topology declared, and prepares what `new_among` finds new of it.
pub(super) async fn prepare(
    context: Context,
    file: File,
    definitions: Vec<Definition>,
    new: Vec<Definition>,
) -> Result<Reloaded, Failure> {
    let client = &context.client;
    let plan = client.plan(file.topology()).await?;
    for step in plan.steps() {
        match &step.change {
            Change::Conflict(conflict) => {
                return Err(Failure::new(format_args!("{}: {conflict}", step.object)));
            }
            Change::Refused(error) => {
                return Err(Failure::new(format_args!("{}: {error}", step.object)));
            }
            _ => {}
        }
    }
    for definition in &new {
        let Definition::Consumer(consumer) = definition else { continue };
        if file.declared(&consumer.queue).is_some() {
            continue;
        }
        match client.inspect_queue(&consumer.queue).await {
            Err(error) if error.kind() == ErrorKind::Missing => {
                return Err(Failure::new(format_args!(
                    "there is no queue {:?} for its consumer: declare it, or leave the consumer out",
                    consumer.queue
                )));
            }
            // What else is in the way, the consumer itself is told.
            _ => {}
        }
    }
    client.apply(file.topology()).await?;
    if file.relay_delays {
        client.delays().relay().await?;
    }
    let mut prepared = Vec::new();
    for definition in new {
        prepared.push(context.prepare(definition, MissingQueue::IsRefused).await?);
    }
    Ok(Reloaded { file, definitions, new: prepared })
}

/// Says what of a new file is only taken up when the program is started again.
pub(super) fn unheard_changes(old: &File, new: &File, path: &Path) -> Option<String> {
    let changed = [("url", old.urls() != new.urls()), ("name", old.name != new.name)];
    let names: Vec<&str> =
        changed.iter().filter(|(_, is_changed)| *is_changed).map(|(name, _)| *name).collect();
    (!names.is_empty()).then(|| {
        let names = names.join(" and ");
        format!("{}: the new {names} is not used before the next start", path.display())
    })
}
