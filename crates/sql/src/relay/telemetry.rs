//! Counters of a relay, for whoever collects them. Their names are listed in the documentation of the crate.

#[cfg(feature = "metrics")]
mod counted {
    use std::time::Duration;

    use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

    use super::super::RelaySummary;
    use super::super::health::Side;
    use crate::outbox::Backlog;

    pub(in super::super) struct Counted {
        sent: Counter,
        refused: Counter,
        set_aside: Counter,
        database: Counter,
        broker: Counter,
        lag: Histogram,
        batch: Histogram,
        waiting: Gauge,
        aside: Gauge,
    }

    impl Counted {
        pub(in super::super) fn new(schema: &str) -> Self {
            let count = |name: &'static str| counter!(name, "schema" => schema.to_owned());
            let time = |name: &'static str| histogram!(name, "schema" => schema.to_owned());
            let level = |name: &'static str| gauge!(name, "schema" => schema.to_owned());
            let failed = |side: Side| {
                let (schema, side) = (schema.to_owned(), side.name());
                counter!("leveret_outbox_failures_total", "schema" => schema, "side" => side)
            };
            Counted {
                sent: count("leveret_outbox_sent_total"),
                refused: count("leveret_outbox_refused_total"),
                set_aside: count("leveret_outbox_set_aside_total"),
                database: failed(Side::Database),
                broker: failed(Side::Broker),
                lag: time("leveret_outbox_lag_seconds"),
                batch: time("leveret_outbox_batch_seconds"),
                waiting: level("leveret_outbox_waiting"),
                aside: level("leveret_outbox_set_aside"),
            }
        }

        pub(in super::super) fn settled(&self, done: &RelaySummary, ages: &[f64], took: Duration) {
            self.sent.increment(done.sent);
            self.refused.increment(done.refused);
            self.set_aside.increment(done.set_aside);
            self.batch.record(took.as_secs_f64());
            for age in ages {
                self.lag.record(age + took.as_secs_f64());
            }
        }

        pub(in super::super) fn failed(&self, side: Side) {
            match side {
                Side::Database => self.database.increment(1),
                Side::Broker => self.broker.increment(1),
            }
        }

        pub(in super::super) fn is_counted(&self) -> bool {
            true
        }

        pub(in super::super) fn backlog(&self, backlog: Backlog) {
            self.waiting.set(backlog.waiting as f64);
            self.aside.set(backlog.set_aside as f64);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod counted {
    use std::time::Duration;

    use super::super::RelaySummary;
    use super::super::health::Side;
    use crate::outbox::Backlog;

    pub(in super::super) struct Counted;

    impl Counted {
        pub(in super::super) fn new(_schema: &str) -> Self {
            Counted
        }

        pub(in super::super) fn settled(&self, _: &RelaySummary, _: &[f64], _: Duration) {}

        pub(in super::super) fn failed(&self, _side: Side) {}

        pub(in super::super) fn is_counted(&self) -> bool {
            false
        }

        pub(in super::super) fn backlog(&self, _backlog: Backlog) {}
    }
}

pub(super) use counted::Counted;

impl std::fmt::Debug for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Counted")
    }
}
