//! Reading the file again: what can fail is tried first, and what cannot be undone comes last.

use std::path::Path;

use leveret::{Change, ErrorKind};

use super::file::File;
use super::running::{Context, Definition, MissingQueue, Prepared, needed};
use crate::failure::Failure;

/// A file that can be run.
pub(super) struct Reloaded {
    pub(super) file: File,
    pub(super) definitions: Vec<Definition>,
    pub(super) new: Vec<Prepared>,
}

/// Prepares what `new_among` finds new of a file, and declares its topology.
pub(super) async fn prepare(
    context: Context,
    file: File,
    definitions: Vec<Definition>,
    new: Vec<Definition>,
) -> Result<Reloaded, Failure> {
    let client = &context.client;
    let prepared = context.prepare(new, MissingQueue::IsRefused).await?;
    let topology = needed(&file, &prepared);
    let plan = client.plan(&topology).await?;
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
    let is_declared = |name: &str| topology.queues().iter().any(|queue| queue.name() == name);
    let consumed = prepared.iter().filter_map(Prepared::queue);
    let undeclared: Vec<String> =
        consumed.filter(|queue| !is_declared(queue)).map(str::to_owned).collect();
    for queue in undeclared {
        match client.inspect_queue(&queue).await {
            Err(error) if error.kind() == ErrorKind::Missing => {
                return Err(Failure::new(format_args!(
                    "there is no queue {queue:?} for its consumer: declare it, or leave the consumer out"
                )));
            }
            // What else is in the way, the consumer itself is told.
            _ => {}
        }
    }
    client.apply(&topology).await?;
    Ok(Reloaded { file, definitions, new: prepared })
}

/// Says what of a new file is only taken up when the program is started again.
pub(super) fn unheard_changes(old: &File, new: &File, path: &Path) -> Option<String> {
    let changed = [
        ("url", old.urls() != new.urls()),
        ("name", old.name != new.name),
        // It begins at once, and ends only with the client.
        ("relay-delays", old.relay_delays && !new.relay_delays),
    ];
    let names: Vec<&str> =
        changed.iter().filter(|(_, is_changed)| *is_changed).map(|(name, _)| *name).collect();
    (!names.is_empty()).then(|| {
        let names = names.join(" and ");
        format!("{}: the new {names} is not used before the next start", path.display())
    })
}
