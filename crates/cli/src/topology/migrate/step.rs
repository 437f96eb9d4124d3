//! Which step is next: a function of what was seen on the broker, and of nothing else.

use crate::management::Bound;

/// What is made for as long as it takes. All of it begins with the name of the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    pub(super) queue: String,
    /// An exchange before the queue, whose alternate exchange leads to the queue `new`.
    pub(super) gate: String,
    /// A queue, and the exchange before it: what was in the queue.
    pub(super) old: String,
    /// A queue, and the exchange before it: what has come meanwhile.
    pub(super) new: String,
    /// An exchange by which both come back.
    pub(super) back: String,
    /// A queue that is there as long as somebody is at it.
    pub(super) lock: String,
    /// A queue that is declared to see whether it can be, and an exchange for bindings that are tried out.
    pub(super) trial: String,
}

impl Names {
    pub(super) fn of(queue: &str) -> Self {
        let gate = format!("{queue}.leveret-migrate");
        let beside = |what: &str| format!("{gate}.{what}");
        let (old, new, back) = (beside("old"), beside("new"), beside("back"));
        let (lock, trial) = (beside("lock"), beside("try"));
        Names { queue: queue.to_owned(), gate, old, new, back, lock, trial }
    }

    pub(super) fn is_ours(&self, exchange: &str) -> bool {
        [&self.gate, &self.old, &self.new, &self.back].contains(&&exchange.to_owned())
    }
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) queue: Declared,
    /// What leads to the queue, without what is ours.
    pub(super) bindings: Vec<Bound>,
    pub(super) has_gate: bool,
    /// Whether the gate leads to the queue. If not, everything goes to `new`.
    pub(super) is_open: bool,
    /// What leads to the gate.
    pub(super) gated: Vec<Bound>,
    pub(super) has_old: bool,
    pub(super) has_new: bool,
    /// The exchanges of ours beside the gate.
    pub(super) exchanges: Vec<String>,
}

/// How the queue is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Declared {
    #[default]
    Absent,
    /// As it was before.
    Otherwise,
    AsWanted,
}

/// What is done next. Each can be done again if it was left half done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Makes what is needed; the gate last, since it has to have somewhere to lead to.
    Prepare,
    /// Has the gate lead to the queue.
    Connect,
    /// Has all that is bound to the queue go through the gate.
    Redirect,
    /// Has what comes through the gate go to `new`.
    Divert,
    /// Empties the queue into `old`, deletes it and declares it.
    Replace,
    /// Declares the queue, which is gone.
    Declare,
    /// Brings back what was in the queue.
    ReturnOld,
    /// Brings back what has come meanwhile, and has the gate lead to the queue again.
    Reopen,
    /// Has all that goes through the gate be bound to the queue.
    Restore,
    /// Takes the gate away, through which nothing comes any more.
    RemoveGate,
    /// Brings back what had come before the gate was open.
    ReturnNew,
    /// Takes the last exchanges away.
    Clean,
}

impl Seen {
    /// Whether everything is there, and nothing of ours.
    pub(super) fn next(&self) -> Option<Step> {
        match self.queue {
            Declared::Otherwise => Some(self.forth()),
            Declared::Absent => self.is_begun().then_some(Step::Declare),
            Declared::AsWanted => self.back(),
        }
    }

    /// Whether something of ours is there.
    pub(super) fn is_begun(&self) -> bool {
        self.has_gate || self.has_old || self.has_new || !self.exchanges.is_empty()
    }

    /// Whether something that should be in the queue goes to `new`.
    pub(super) fn is_diverted(&self) -> bool {
        self.has_gate && !self.is_open && !self.gated.is_empty()
    }

    fn forth(&self) -> Step {
        // `old` and `new`; the third one is made when something comes back.
        let is_prepared =
            self.has_gate && self.has_old && self.has_new && self.exchanges.len() >= 2;
        match (self.bindings.is_empty(), self.is_open) {
            _ if !is_prepared => Step::Prepare,
            // Without it, messages would be in the queue and in `new`.
            (false, false) => Step::Connect,
            (false, true) => Step::Redirect,
            (true, true) => Step::Divert,
            (true, false) => Step::Replace,
        }
    }

    fn back(&self) -> Option<Step> {
        // Clients bind a queue again that was deleted. Until the gate is open, messages would be in the queue and in `new`.
        if self.is_diverted() && !self.bindings.is_empty() {
            return Some(Step::Redirect);
        }
        if self.has_old {
            // What was there first comes back first.
            return Some(Step::ReturnOld);
        }
        if self.has_gate {
            return Some(match (self.is_open, self.gated.is_empty()) {
                (false, false) => Step::Reopen,
                (true, false) => Step::Restore,
                (_, true) => Step::RemoveGate,
            });
        }
        match (self.has_new, self.exchanges.is_empty()) {
            (true, _) => Some(Step::ReturnNew),
            (false, false) => Some(Step::Clean),
            (false, true) => None,
        }
    }

    /// What it would be after a step, so that all steps can be told before any is taken.
    pub(super) fn after(mut self, step: Step, names: &Names) -> Seen {
        match step {
            Step::Prepare => {
                (self.has_gate, self.has_old, self.has_new) = (true, true, true);
                self.exchanges = vec![names.old.clone(), names.new.clone()];
            }
            Step::Connect | Step::Reopen => self.is_open = true,
            Step::Redirect => self.gated.append(&mut self.bindings),
            Step::Divert => self.is_open = false,
            Step::Replace | Step::Declare => self.queue = Declared::AsWanted,
            Step::ReturnOld => self.has_old = false,
            Step::Restore => self.bindings.append(&mut self.gated),
            Step::RemoveGate => self.has_gate = false,
            Step::ReturnNew => self.has_new = false,
            Step::Clean => self.exchanges.clear(),
        }
        self
    }

    /// All that is left to do.
    pub(super) fn all_steps(&self, names: &Names) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut seen = self.clone();
        while let Some(step) = seen.next() {
            steps.push(step);
            seen = seen.after(step, names);
        }
        steps
    }
}

impl Step {
    /// Its name, for programs.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Step::Prepare => "prepare",
            Step::Connect => "connect",
            Step::Redirect => "redirect",
            Step::Divert => "divert",
            Step::Replace => "replace",
            Step::Declare => "declare",
            Step::ReturnOld => "return-old",
            Step::Reopen => "reopen",
            Step::Restore => "restore",
            Step::RemoveGate => "remove-gate",
            Step::ReturnNew => "return-new",
            Step::Clean => "clean",
        }
    }

    /// What is done, for a person.
    pub(super) fn told(self, names: &Names) -> String {
        let Names { queue, gate, old, new, .. } = names;
        match self {
            Step::Prepare => format!("queues {old:?} and {new:?}, and exchanges before them"),
            Step::Connect => format!("exchange {gate:?} with {queue:?}"),
            Step::Redirect => format!("the bindings of {queue:?}: messages come by {gate:?}"),
            Step::Divert => format!("what comes by exchanges to {new:?}"),
            Step::Replace => {
                format!("{queue:?}: its messages go to {old:?}, consumers finish what they have")
            }
            Step::Declare => format!("queue {queue:?}"),
            Step::ReturnOld => format!("what is in {old:?} to {queue:?}"),
            Step::Reopen => format!("the way to {queue:?}, when what is in {new:?} has come back"),
            Step::Restore => format!("the bindings of {queue:?}"),
            Step::RemoveGate => format!("exchange {gate:?}"),
            Step::ReturnNew => format!("what is left in {new:?} to {queue:?}"),
            Step::Clean => "exchanges that are no longer needed".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        Names::of("billing")
    }

    fn bound(routing_key: &str) -> Bound {
        let bound = serde_json::json!({
            "source": "orders", "destination": "billing", "destination_type": "queue", "routing_key": routing_key,
        });
        serde_json::from_value(bound).unwrap()
    }

    fn before() -> Seen {
        let bindings = vec![bound("order.*"), bound("bill")];
        Seen { queue: Declared::Otherwise, bindings, ..Seen::default() }
    }

    #[test]
    fn all_steps_are_known_before_the_first() {
        use Step::*;
        let steps = before().all_steps(&names());
        let expected = [
            Prepare, Connect, Redirect, Divert, Replace, ReturnOld, Reopen, Restore, RemoveGate,
            ReturnNew, Clean,
        ];
        assert_eq!(steps, expected);
    }

    #[test]
    fn whoever_comes_after_a_step_goes_on_with_the_next() {
        let all = before().all_steps(&names());
        let mut seen = before();
        for (number, step) in all.iter().enumerate() {
            assert_eq!(seen.all_steps(&names()), all[number..]);
            seen = seen.after(*step, &names());
        }
        assert_eq!((seen.next(), seen.bindings.len(), seen.is_begun()), (None, 2, false));
    }

    #[test]
    fn bindings_that_are_made_meanwhile_are_redirected_before_anything_is_deleted() {
        let prepared = before().after(Step::Prepare, &names());
        let diverted = [Step::Connect, Step::Redirect, Step::Divert]
            .into_iter()
            .fold(prepared, |seen, step| seen.after(step, &names()));
        assert_eq!(diverted.next(), Some(Step::Replace));
        let bound_anew = Seen { bindings: vec![bound("order.*")], ..diverted };
        // First the way to the queue, so that no message is in two places.
        assert_eq!(
            bound_anew.all_steps(&names())[..3],
            [Step::Connect, Step::Redirect, Step::Divert]
        );
    }

    #[test]
    fn bindings_that_a_client_makes_again_wait_until_the_way_is_open() {
        let replaced = [Step::Prepare, Step::Connect, Step::Redirect, Step::Divert, Step::Replace]
            .into_iter()
            .fold(before(), |seen, step| seen.after(step, &names()));
        assert_eq!(replaced.next(), Some(Step::ReturnOld));
        let bound_anew = Seen { bindings: vec![bound("order.*")], ..replaced };
        assert_eq!(bound_anew.next(), Some(Step::Redirect));
        let open = Seen { has_old: false, is_open: true, ..bound_anew };
        assert_eq!(open.next(), Some(Step::Restore));
    }

    #[test]
    fn a_queue_that_is_gone_is_declared_if_it_was_us() {
        let nothing = Seen::default();
        assert_eq!(nothing.next(), None);
        let ours = Seen { has_gate: true, has_old: true, has_new: true, ..Seen::default() };
        assert_eq!(ours.next(), Some(Step::Declare));
    }

    #[test]
    fn who_wants_the_queue_as_it_is_gets_everything_back() {
        let diverted = Seen {
            queue: Declared::AsWanted,
            has_gate: true,
            has_old: true,
            has_new: true,
            gated: vec![bound("order.*")],
            exchanges: vec![names().old, names().new],
            ..Seen::default()
        };
        use Step::*;
        assert_eq!(
            diverted.all_steps(&names()),
            [ReturnOld, Reopen, Restore, RemoveGate, ReturnNew, Clean]
        );
    }

    #[test]
    fn a_queue_without_bindings_needs_no_gate_to_be_connected() {
        let bare = Seen { queue: Declared::Otherwise, ..Seen::default() };
        use Step::*;
        assert_eq!(
            bare.all_steps(&names()),
            [Prepare, Replace, ReturnOld, RemoveGate, ReturnNew, Clean]
        );
    }
}
