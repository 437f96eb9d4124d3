//! What of the ladder is known to be on the broker, so that it is not declared for every message.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::sync::MutexGuard;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::amqp::lock;
use crate::connection::Client;
use crate::connection::core::Core;
use crate::error::Error;
use crate::topology::{Failed, QueueType, Topology};

use super::ladder::{self, Target};
use super::relay;
use super::steps::LEVELS;

/// A target is bound again after this long. Somebody may have deleted it and made it anew, and that takes its binding away.
const REBIND_AFTER: Duration = Duration::from_secs(60);

/// How many targets are remembered as bound; beyond that the one is forgotten that was bound first.
const MAX_TARGETS: usize = 10_000;

/// What a client knows of the ladder.
#[derive(Debug, Default)]
pub(crate) struct Ready {
    known: Mutex<Known>,
    /// Held while declaring, so that the ladder is declared once for all that wait for it.
    declaring: tokio::sync::Mutex<()>,
    /// Sends on what is due to exchanges, from the first such message until the client is closed.
    relay: OnceLock<JoinHandle<()>>,
}

#[derive(Debug)]
struct Known {
    /// The type of the queues. A quorum queue keeps a message until the next queue has confirmed it; a classic queue
    /// does not, and a node that is killed loses messages that are moving.
    queue_type: QueueType,
    /// Whether the log has the warning about queues with other arguments.
    has_warned: bool,
    /// How many levels there are, from the lowest: it grows with the longest delay so far.
    levels: u8,
    /// The targets of delayed messages, and when each was bound. `None`: the binding is gone with its queue or exchange.
    targets: HashMap<Target, Option<Instant>>,
}

impl Default for Known {
    fn default() -> Self {
        let queue_type = QueueType::Quorum;
        Known { queue_type, has_warned: false, levels: 0, targets: HashMap::new() }
    }
}

impl Known {
    fn has(&self, top: u8, target: Option<&Target>) -> bool {
        let bound_at = |target| self.targets.get(target).copied().flatten();
        let is_bound = |target| bound_at(target).is_some_and(|at| at.elapsed() < REBIND_AFTER);
        top < self.levels && target.is_none_or(is_bound)
    }

    /// What has to be declared.
    fn missing(&self, top: u8, target: Option<&Target>) -> Topology {
        let levels = self.levels..self.levels.max(top + 1);
        let levels = ladder::topology(levels, self.queue_type);
        match target {
            Some(target) => levels.binding(target.binding()),
            None => levels,
        }
    }

    fn learn(&mut self, top: u8, target: Option<Target>) {
        self.levels = self.levels.max(top + 1);
        let Some(target) = target else { return };
        if self.targets.len() >= MAX_TARGETS && !self.targets.contains_key(&target) {
            // A round trip has bound the new one: to look through all for it is no matter.
            let oldest = self.targets.iter().min_by_key(|(_, bound_at)| **bound_at);
            if let Some(oldest) = oldest.map(|(oldest, _)| oldest.clone()) {
                self.targets.remove(&oldest);
            }
        }
        self.targets.insert(target, Some(Instant::now()));
    }
}

impl Ready {
    pub(crate) fn of(core: &Core) -> Arc<Self> {
        core.extensions.get()
    }

    /// Whether messages may have to wait in quorum queues.
    pub(crate) fn has_quorum(&self) -> bool {
        lock(&self.known).queue_type == QueueType::Quorum
    }

    /// Sees to it that a message can enter at this level, and leave to this target if it is a new one.
    pub(crate) async fn ensure(
        &self,
        client: &Client,
        top: u8,
        target: Option<Target>,
    ) -> Result<(), Error> {
        if lock(&self.known).has(top, target.as_ref()) {
            return Ok(());
        }
        let _alone = self.turn(client).await?;
        let missing = {
            let known = lock(&self.known);
            if known.has(top, target.as_ref()) {
                return Ok(());
            }
            known.missing(top, target.as_ref())
        };
        let (_, failed) = client.apply_each(&missing).await?;
        if let Some((_, error)) = failed.iter().find(|(_, error)| !error.is_of_other_type()) {
            return Err(error.clone());
        }
        let mut known = lock(&self.known);
        if !failed.is_empty() && !std::mem::replace(&mut known.has_warned, true) {
            warn_of_others(&failed);
        }
        known.learn(top, target);
        Ok(())
    }

    /// Each declaring has its deadline, but many may be before this one.
    async fn turn(&self, client: &Client) -> Result<MutexGuard<'_, ()>, Error> {
        let patience = client.core().options.timeout;
        let late = |_| Error::timed_out("declaring the queues for delayed messages", patience);
        timeout(patience, self.declaring.lock()).await.map_err(late)
    }

    /// The bindings of known targets that the topology declares: they went with the target if it was deleted before.
    pub(crate) fn bindings_for(&self, topology: &Topology) -> Topology {
        let known = lock(&self.known);
        let declared = known.targets.keys().filter(|target| target.is_declared_by(topology));
        declared.fold(Topology::new(), |bindings, target| bindings.binding(target.binding()))
    }

    /// Sees to it that somebody is there to take messages to exchanges.
    pub(crate) fn relay(&self, client: &Client) {
        self.relay.get_or_init(|| client.core().spawn(relay::run(client.unowned())));
    }

    /// Declares all levels, of this type.
    pub(crate) async fn declare(
        &self,
        client: &Client,
        queue_type: QueueType,
    ) -> Result<(), Error> {
        let _alone = self.turn(client).await?;
        client.apply(&ladder::topology(0..LEVELS, queue_type)).await?;
        let mut known = lock(&self.known);
        known.queue_type = queue_type;
        known.levels = LEVELS;
        Ok(())
    }

    /// A queue or an exchange was deleted, and its bindings with it.
    pub(crate) fn was_deleted(&self, name: &str) {
        let mut known = lock(&self.known);
        let is_ladder = name.starts_with(ladder::ENTRY);
        for (target, bound_at) in &mut known.targets {
            if is_ladder || target.header().1 == name {
                *bound_at = None;
            }
        }
        if is_ladder {
            known.levels = 0;
        }
    }
}

/// Queues that exist with other arguments are used as they are: the broker never changes a queue, and deleting one would
/// delete its messages.
fn warn_of_others(failed: &[Failed]) {
    let names: Vec<&str> = failed.iter().map(|(name, _)| name.as_str()).collect();
    let names = names.join(", ");
    tracing::warn!(
        "delayed messages wait in queues that exist with other arguments: {names}. A classic queue, or a quorum queue without \
         at-least-once dead-lettering, loses messages that are moving when a node is killed. Once no message waits, delete \
         these queues; the next delayed message declares them as quorum queues"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_limit_only_the_target_is_forgotten_that_was_bound_first() {
        let mut known = Known::default();
        let target = |number: usize| Target::Queue(number.to_string());
        for number in 0..=MAX_TARGETS {
            known.learn(0, Some(target(number)));
        }
        known.learn(0, Some(target(MAX_TARGETS)));
        assert_eq!(known.targets.len(), MAX_TARGETS);
        assert!(known.targets.contains_key(&target(MAX_TARGETS / 2)));
        assert!(known.has(0, Some(&target(MAX_TARGETS))));
    }
}
