//! Counters for whoever collects them, by the facade `metrics`. The names and their labels are part of the API; they are
//! listed in the documentation of the crate.
//!
//! Counters are looked up once, when a publisher or consumer is made: to count costs an addition, or nothing if nobody
//! collects. Install the collector first.

#[cfg(feature = "metrics")]
mod counted {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::time::Duration;

    use metrics::{Counter, Gauge, Histogram, IntoF64, counter, gauge, histogram};
    use tokio::time::Instant;

    use crate::amqp::Outcome;
    use crate::error::ErrorKind;

    /// How long things take. The clock is not looked at unless somebody collects that.
    #[derive(Clone)]
    struct Times {
        seconds: Histogram,
        collected: bool,
    }

    impl Times {
        fn new(seconds: Histogram) -> Self {
            let collected = is_collected(&seconds);
            Times { seconds, collected }
        }

        #[inline]
        fn begin(&self) -> Began {
            Began(self.collected.then(Instant::now))
        }

        #[inline]
        fn end(&self, began: Began) {
            if let Began(Some(began)) = began {
                self.seconds.record(began.elapsed());
            }
        }
    }

    /// When something began that is timed, if it is.
    #[derive(Clone, Copy)]
    pub(crate) struct Began(Option<Instant>);

    /// Only a histogram that somebody collects asks what is to be recorded, here not once.
    fn is_collected(histogram: &Histogram) -> bool {
        struct Asked<'a>(&'a Cell<bool>);

        impl IntoF64 for Asked<'_> {
            fn into_f64(self) -> f64 {
                self.0.set(true);
                0.0
            }
        }

        let asked = Cell::new(false);
        histogram.record_many(Asked(&asked), 0);
        asked.get()
    }

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
    pub(crate) struct Consumed {
        handled: Counter,
        failed: Counter,
        retried: Counter,
        parked: Counter,
        in_flight: Gauge,
        times: Times,
    }

    impl Consumed {
        pub(crate) fn new(queue: &str) -> Arc<Self> {
            let count = |name: &'static str| counter!(name, "queue" => queue.to_owned());
            Arc::new(Consumed {
                handled: count("leveret_acked_total"),
                failed: count("leveret_failed_total"),
                retried: count("leveret_retried_total"),
                parked: count("leveret_parked_total"),
                in_flight: gauge!("leveret_in_flight", "queue" => queue.to_owned()),
                times: Times::new(
                    histogram!("leveret_handler_seconds", "queue" => queue.to_owned()),
                ),
            })
        }

        /// A handler starts to work on so many messages, for [`leave`](Self::leave) to follow.
        #[inline]
        pub(crate) fn enter(&self, messages: usize) -> Began {
            self.in_flight.increment(messages as f64);
            self.times.begin()
        }

        /// The handler has ended: so many messages were handled, so many not.
        #[inline]
        pub(crate) fn end(&self, began: Began, handled: u64, failed: u64) {
            self.times.end(began);
            self.handled.increment(handled);
            self.failed.increment(failed);
        }

        /// No handler works on so many messages any longer.
        #[inline]
        pub(crate) fn leave(&self, messages: usize) {
            self.in_flight.decrement(messages as f64);
        }

        /// The same as a guard, for a handler that may be dropped.
        pub(crate) fn begin(self: &Arc<Self>, messages: usize) -> InFlight {
            self.keep(self.enter(messages), messages)
        }

        /// A guard for a handler that has [started](Self::enter).
        pub(crate) fn keep(self: &Arc<Self>, began: Began, messages: usize) -> InFlight {
            InFlight { counts: Arc::clone(self), messages, began }
        }

        pub(crate) fn retried(&self) {
            self.retried.increment(1);
        }

        pub(crate) fn parked(&self) {
            self.parked.increment(1);
        }
    }

    pub(crate) struct InFlight {
        counts: Arc<Consumed>,
        messages: usize,
        began: Began,
    }

    impl InFlight {
        pub(crate) fn end(&self, handled: u64, failed: u64) {
            self.counts.end(self.began, handled, failed);
        }
    }

    impl Drop for InFlight {
        fn drop(&mut self) {
            self.counts.leave(self.messages);
        }
    }

    /// What is counted of a client of a service.
    #[derive(Clone)]
    pub(crate) struct Called {
        answered: Counter,
        failed: Counter,
        timed_out: Counter,
        unroutable: Counter,
        lost: Counter,
        other: Counter,
        times: Times,
    }

    impl Called {
        pub(crate) fn new(service: &str) -> Self {
            let outcome = |outcome: &'static str| {
                let service = service.to_owned();
                counter!("leveret_calls_total", "service" => service, "outcome" => outcome)
            };
            Called {
                answered: outcome("reply"),
                failed: outcome("remote"),
                timed_out: outcome("timed-out"),
                unroutable: outcome("unroutable"),
                lost: outcome("lost"),
                other: outcome("other"),
                times: Times::new(
                    histogram!("leveret_call_seconds", "service" => service.to_owned()),
                ),
            }
        }

        #[inline]
        pub(crate) fn begin(&self) -> Began {
            self.times.begin()
        }

        #[inline]
        pub(crate) fn end(&self, began: Began, failed: Option<ErrorKind>) {
            self.times.end(began);
            let counter = match failed {
                None => &self.answered,
                Some(ErrorKind::Remote) => &self.failed,
                Some(ErrorKind::TimedOut) => &self.timed_out,
                Some(ErrorKind::Unroutable) => &self.unroutable,
                Some(ErrorKind::Lost) => &self.lost,
                Some(_) => &self.other,
            };
            counter.increment(1);
        }
    }

    /// Replies that matched no pending call.
    #[derive(Clone)]
    pub(crate) struct UnmatchedReplies(Counter);

    impl UnmatchedReplies {
        pub(crate) fn new(service: &str) -> Self {
            UnmatchedReplies(
                counter!("leveret_stray_replies_total", "service" => service.to_owned()),
            )
        }

        pub(crate) fn add(&self, replies: u64) {
            self.0.increment(replies);
        }
    }

    /// What is counted of a service.
    #[derive(Clone)]
    pub(crate) struct Replied {
        values: Counter,
        errors: Counter,
        undeliverable: Counter,
    }

    impl Replied {
        pub(crate) fn new(service: &str) -> Self {
            let kind = |kind: &'static str| {
                let service = service.to_owned();
                counter!("leveret_replies_total", "service" => service, "kind" => kind)
            };
            Replied {
                values: kind("value"),
                errors: kind("error"),
                undeliverable: kind("undeliverable"),
            }
        }

        #[inline]
        pub(crate) fn value(&self) {
            self.values.increment(1);
        }

        pub(crate) fn error(&self) {
            self.errors.increment(1);
        }

        pub(crate) fn undeliverable(&self) {
            self.undeliverable.increment(1);
        }
    }

    /// What is counted of an inbox.
    #[derive(Clone)]
    pub(crate) struct Remembered {
        duplicates: Counter,
        given_up: Counter,
    }

    impl Remembered {
        pub(crate) fn new(queue: &str) -> Self {
            let count = |name: &'static str| counter!(name, "queue" => queue.to_owned());
            Remembered {
                duplicates: count("leveret_duplicates_total"),
                given_up: count("leveret_given_up_total"),
            }
        }

        pub(crate) fn duplicate(&self) {
            self.duplicates.increment(1);
        }

        pub(crate) fn given_up(&self, messages: u64) {
            self.given_up.increment(messages);
        }
    }

    pub(crate) fn waited_for_channel(seconds: Duration) {
        histogram!("leveret_pool_wait_seconds").record(seconds);
    }

    #[cfg(test)]
    mod tests {
        use metrics::with_local_recorder;
        use metrics_util::debugging::{DebugValue, DebuggingRecorder};

        use super::*;

        #[test]
        fn nobody_looks_at_the_clock_if_nobody_collects() {
            let counts = Consumed::new("queue");
            let in_flight = counts.begin(1);
            assert!(in_flight.began.0.is_none());
            in_flight.end(1, 0);
        }

        #[test]
        fn each_handling_is_timed_once_if_somebody_collects() {
            let recorder = DebuggingRecorder::new();
            let counts = with_local_recorder(&recorder, || Consumed::new("queue"));
            counts.begin(3).end(2, 1);
            drop(counts.begin(1));
            let times =
                recorder.snapshotter().snapshot().into_vec().into_iter().find_map(
                    |one| match one.3 {
                        DebugValue::Histogram(times) => Some(times),
                        _ => None,
                    },
                );
            assert_eq!(times.unwrap().len(), 1);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod counted {
    use std::sync::Arc;
    use std::time::Duration;

    use crate::amqp::Outcome;
    use crate::error::ErrorKind;

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

    pub(crate) struct Consumed;

    impl Consumed {
        pub(crate) fn new(_queue: &str) -> Arc<Self> {
            Arc::new(Consumed)
        }

        pub(crate) fn enter(&self, _messages: usize) -> Began {
            Began
        }

        pub(crate) fn end(&self, _began: Began, _handled: u64, _failed: u64) {}

        pub(crate) fn leave(&self, _messages: usize) {}

        pub(crate) fn begin(self: &Arc<Self>, _messages: usize) -> InFlight {
            InFlight
        }

        pub(crate) fn keep(self: &Arc<Self>, _began: Began, _messages: usize) -> InFlight {
            InFlight
        }

        pub(crate) fn retried(&self) {}

        pub(crate) fn parked(&self) {}
    }

    pub(crate) struct InFlight;

    impl InFlight {
        pub(crate) fn end(&self, _handled: u64, _failed: u64) {}
    }

    /// It ends by being dropped, as the one that counts does.
    impl Drop for InFlight {
        fn drop(&mut self) {}
    }

    #[derive(Clone)]
    pub(crate) struct Delivered;

    impl Delivered {
        pub(crate) fn new(_queue: &str) -> Self {
            Delivered
        }

        pub(crate) fn delivered(&self) {}
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Began;

    #[derive(Clone)]
    pub(crate) struct Called;

    impl Called {
        pub(crate) fn new(_service: &str) -> Self {
            Called
        }

        pub(crate) fn begin(&self) -> Began {
            Began
        }

        pub(crate) fn end(&self, _began: Began, _failed: Option<ErrorKind>) {}
    }

    #[derive(Clone)]
    pub(crate) struct UnmatchedReplies;

    impl UnmatchedReplies {
        pub(crate) fn new(_service: &str) -> Self {
            UnmatchedReplies
        }

        pub(crate) fn add(&self, _replies: u64) {}
    }

    #[derive(Clone)]
    pub(crate) struct Replied;

    impl Replied {
        pub(crate) fn new(_service: &str) -> Self {
            Replied
        }

        pub(crate) fn value(&self) {}

        pub(crate) fn error(&self) {}

        pub(crate) fn undeliverable(&self) {}
    }

    #[derive(Clone)]
    pub(crate) struct Remembered;

    impl Remembered {
        pub(crate) fn new(_queue: &str) -> Self {
            Remembered
        }

        pub(crate) fn duplicate(&self) {}

        pub(crate) fn given_up(&self, _messages: u64) {}
    }

    pub(crate) fn waited_for_channel(_seconds: Duration) {}
}

pub(crate) use counted::{
    Called, Consumed, Delivered, InFlight, Published, Remembered, Replied, UnmatchedReplies,
    waited_for_channel,
};

macro_rules! debug {
    ($($counted:ident)*) => {$(
        impl std::fmt::Debug for $counted {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($counted))
            }
        }
    )*};
}

debug! { Called Consumed Delivered Published Remembered Replied UnmatchedReplies }
