//! Names that can be set on their own, and the builder methods that several designs have.

use std::collections::BTreeMap;

/// Names and keys that were set, by the builder method that sets them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names(BTreeMap<&'static str, String>);

impl Names {
    pub(crate) fn set(&mut self, what: &'static str, name: String) {
        self.0.insert(what, name);
    }

    pub(crate) fn get(&self, what: &str) -> Option<&str> {
        self.0.get(what).map(String::as_str)
    }

    pub(crate) fn or(&self, what: &str, default: impl Into<String>) -> String {
        self.0.get(what).cloned().unwrap_or_else(|| default.into())
    }
}

/// A builder method for each of the names.
macro_rules! name_setters {
    ($($(#[$doc:meta])+ $name:ident;)+) => {$(
        $(#[$doc])+
        pub fn $name(mut self, name: impl Into<String>) -> Self {
            self.names.set(stringify!($name), name.into());
            self
        }
    )+};
}

/// The builder methods of designs with one wait queue.
macro_rules! wait_setters {
    () => {
        /// How long messages wait. In whole milliseconds.
        pub fn interval(mut self, interval: std::time::Duration) -> Self {
            self.wait.set_interval(interval);
            self
        }

        /// How many times a message is tried again. `n` means `n + 1` deliveries.
        pub fn max_retries(mut self, retries: u32) -> Self {
            self.wait.set_max_retries(retries);
            self
        }

        /// A policy for what interval and number do not say. It has to wait the same each time: there is one wait queue.
        pub fn policy(mut self, policy: leveret::RetryPolicy) -> Self {
            self.wait.set_policy(policy);
            self
        }

        /// Queues get no arguments beyond those that the design names: neither `x-dead-letter-strategy` with its `x-overflow`
        /// nor `x-delivery-limit`. For queues that other programs have declared without them. The broker may then lose a message
        /// that it moves, and drops one that comes back too often.
        pub fn plain_arguments(mut self) -> Self {
            self.wait.plain_arguments = true;
            self
        }

        /// The queues beside the work queue are of this type. Without it, they are of the type of the work queue, if the client
        /// has declared that, and else of the broker's default type.
        pub fn queue_type(mut self, queue_type: leveret::QueueType) -> Self {
            self.wait.queue_type = Some(queue_type);
            self
        }
    };
}
