//! Counters for whoever collects them, by the facade `metrics`. The names and their labels are part of the API; they are
//! listed in the documentation of the crate.
//!
//! Counters are looked up once, when a publisher or consumer is made: to count costs an addition, or nothing if nobody
//! collects. Install the collector first.

#[cfg(feature = "metrics")]
mod counted {
    use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

    use std::time::Duration;

    use crate::amqp::Outcome;

    /// What is counted of a publisher.
    #[derive(Clone)]
    pub(crate) struct Published {
        published: Counter,
        confirmed: Counter,
        nacked: Counter,
        returned: Counter,
        lost: Counter,
        replayed: Counter,
    }

    impl Published {
        pub(crate) fn new(exchange: &str) -> Self {
            let count = |name: &'static str| counter!(name, "exchange" => exchange.to_owned());
            Published {
                published: count("leveret_published_total"),
                confirmed: count("leveret_confirmed_total"),
                nacked: count("leveret_nacked_total"),
                returned: count("leveret_returned_total"),
                lost: count("leveret_lost_total"),
                replayed: count("leveret_replayed_total"),
            }
        }

        #[inline]
        pub(crate) fn published(&self) {
            self.published.increment(1);
        }

        #[inline]
        pub(crate) fn outcome(&self, outcome: &Outcome) {
            match outcome {
                Outcome::Acked => self.confirmed.increment(1),
                Outcome::Nacked => self.nacked.increment(1),
                Outcome::Returned(_) => self.returned.increment(1),
                Outcome::Lost(_) => self.lost.increment(1),
            }
        }

        pub(crate) fn replayed(&self) {
            self.replayed.increment(1);
        }
    }

    /// What is counted of a stream of deliveries.
    #[derive(Clone)]
    pub(crate) struct Delivered(Counter);

    impl Delivered {
        pub(crate) fn new(queue: &str) -> Self {
            Delivered(counter!("leveret_consumed_total", "queue" => queue.to_owned()))
        }

        #[inline]
        pub(crate) fn delivered(&self) {
            self.0.increment(1);
        }
    }

    /// What is counted of handlers.
    #[derive(Clone)]
    pub(crate) struct Consumed {
        handled: Counter,
        failed: Counter,
        retried: Counter,
        parked: Counter,
        in_flight: Gauge,
        seconds: Histogram,
    }

    impl Consumed {
        pub(crate) fn new(queue: &str) -> Self {
            let count = |name: &'static str| counter!(name, "queue" => queue.to_owned());
            Consumed {
                handled: count("leveret_acked_total"),
                failed: count("leveret_failed_total"),
                retried: count("leveret_retried_total"),
                parked: count("leveret_parked_total"),
                in_flight: gauge!("leveret_in_flight", "queue" => queue.to_owned()),
                seconds: histogram!("leveret_handler_seconds", "queue" => queue.to_owned()),
            }
        }

        /// A handler is at work on so many messages, until what this gives is dropped: a handler may be, too.
        #[inline]
        pub(crate) fn begin(&self, messages: usize) -> InFlight<'_> {
            let messages = messages as f64;
            self.in_flight.increment(messages);
            InFlight { gauge: &self.in_flight, messages }
        }

        /// It has ended: so many messages were handled, so many not.
        #[inline]
        pub(crate) fn end(&self, took: Duration, handled: u64, failed: u64) {
            self.seconds.record(took.as_secs_f64());
            self.handled.increment(handled);
            self.failed.increment(failed);
        }

        pub(crate) fn retried(&self) {
            self.retried.increment(1);
        }

        pub(crate) fn parked(&self) {
            self.parked.increment(1);
        }
    }

    pub(crate) struct InFlight<'a> {
        gauge: &'a Gauge,
        messages: f64,
    }

    impl Drop for InFlight<'_> {
        fn drop(&mut self) {
            self.gauge.decrement(self.messages);
        }
    }

    pub(crate) fn waited_for_channel(seconds: Duration) {
        histogram!("leveret_pool_wait_seconds").record(seconds.as_secs_f64());
    }
}

#[cfg(not(feature = "metrics"))]
mod counted {
    use std::time::Duration;

    use crate::amqp::Outcome;

    #[derive(Clone)]
    pub(crate) struct Published;

    impl Published {
        pub(crate) fn new(_exchange: &str) -> Self {
            Published
        }

        pub(crate) fn published(&self) {}

        pub(crate) fn outcome(&self, _outcome: &Outcome) {}

        pub(crate) fn replayed(&self) {}
    }

    #[derive(Clone)]
    pub(crate) struct Consumed;

    impl Consumed {
        pub(crate) fn new(_queue: &str) -> Self {
            Consumed
        }

        pub(crate) fn begin(&self, _messages: usize) -> InFlight {
            InFlight
        }

        pub(crate) fn end(&self, _took: Duration, _handled: u64, _failed: u64) {}

        pub(crate) fn retried(&self) {}

        pub(crate) fn parked(&self) {}
    }

    pub(crate) struct InFlight;

    #[derive(Clone)]
    pub(crate) struct Delivered;

    impl Delivered {
        pub(crate) fn new(_queue: &str) -> Self {
            Delivered
        }

        pub(crate) fn delivered(&self) {}
    }

    pub(crate) fn waited_for_channel(_seconds: Duration) {}
}

pub(crate) use counted::{Consumed, Delivered, Published, waited_for_channel};

impl std::fmt::Debug for Published {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Published")
    }
}

impl std::fmt::Debug for Delivered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Delivered")
    }
}

impl std::fmt::Debug for Consumed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Consumed")
    }
}
