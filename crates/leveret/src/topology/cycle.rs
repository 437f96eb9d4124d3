//! Circles of dead-letter exchanges in which the broker drops messages.

use std::collections::BTreeSet;

use super::{Destination, ExchangeKind, Queue, Topology};

impl Topology {
    /// Queues that pass messages on to each other in a circle by themselves: because their time is over, because there
    /// is no room, or because they were delivered too often. RabbitMQ drops a message, without a word, that would come
    /// back to a queue this way and was not rejected by a consumer in between.
    ///
    /// Such a circle loses whatever goes round in it, so a topology should have none:
    ///
    /// ```
    /// use std::time::Duration;
    /// use leveret::{Exchange, Queue, Topology};
    ///
    /// let minute = Duration::from_secs(60);
    /// let topology = |jobs| Topology::new()
    ///     .exchange(Exchange::fanout("again"))
    ///     .queue(Queue::classic("wait").message_ttl(minute).dead_letter_to("again"))
    ///     .queue(Queue::bind(jobs, "again", "").dead_letter_to("").dead_letter_key("wait"));
    /// // Messages leave the work queue only if somebody rejects them.
    /// assert_eq!(topology(Queue::classic("jobs")).dropping_cycle(), None);
    /// // Here they also leave when nobody is there to work.
    /// let passing = topology(Queue::classic("jobs").message_ttl(minute));
    /// assert_eq!(passing.dropping_cycle(), Some(vec!["wait", "jobs"]));
    /// ```
    ///
    /// It knows what is in this topology. Which routing keys messages have it does not know: where a dead letter keeps its
    /// own, it may take any binding of an exchange. What publishers do (`expiration`) and policies of the broker are not
    /// part of a topology.
    pub fn dropping_cycle(&self) -> Option<Vec<&str>> {
        self.queues.iter().find_map(|start| {
            let mut path = vec![start.name()];
            self.leads_back(start, start.name(), &mut path).then_some(path)
        })
    }

    fn leads_back<'t>(&'t self, from: &'t Queue, start: &str, path: &mut Vec<&'t str>) -> bool {
        for name in self.after(from) {
            if name == start {
                return true;
            }
            let Some(next) = self.queues.iter().find(|queue| queue.name == name) else { continue };
            if path.contains(&next.name()) {
                continue;
            }
            path.push(next.name());
            if self.leads_back(next, start, path) {
                return true;
            }
            path.pop();
        }
        false
    }

    /// Where messages go that leave a queue by themselves.
    fn after(&self, queue: &Queue) -> BTreeSet<String> {
        let mut queues = BTreeSet::new();
        let text = |name| queue.arguments.get(name).and_then(|value| value.as_str());
        let Some(exchange) = text("x-dead-letter-exchange") else { return queues };
        if lets_go(queue) {
            let key = text("x-dead-letter-routing-key");
            if exchange.is_empty() {
                // Without a key of its own it is that with which it came by the same exchange.
                queues.insert(key.unwrap_or(&queue.name).to_owned());
            } else {
                self.route(exchange, key, &mut BTreeSet::new(), &mut queues);
            }
        }
        queues
    }

    /// The queues that a message reaches from an exchange under a key, by this topology.
    pub(crate) fn queues_for(&self, exchange: &str, key: &str) -> BTreeSet<String> {
        let mut queues = BTreeSet::new();
        self.route(exchange, Some(key), &mut BTreeSet::new(), &mut queues);
        queues
    }

    fn route<'t>(
        &'t self,
        exchange: &'t str,
        key: Option<&str>,
        seen: &mut BTreeSet<&'t str>,
        queues: &mut BTreeSet<String>,
    ) {
        if !seen.insert(exchange) {
            return;
        }
        let known = self.exchanges.iter().find(|known| known.name == exchange);
        let mut is_routed = false;
        for binding in self.bindings.iter().filter(|binding| binding.source == exchange) {
            let fits = match (known.map(|known| &known.kind), key) {
                (Some(ExchangeKind::Direct), Some(key)) => binding.routing_key == key,
                (Some(ExchangeKind::Topic), Some(key)) => fits(&binding.routing_key, key),
                _ => true,
            };
            if !fits {
                continue;
            }
            is_routed = true;
            match &binding.destination {
                Destination::Queue(queue) => {
                    queues.insert(queue.clone());
                }
                Destination::Exchange(next) => self.route(next, key, seen, queues),
            }
        }
        let alternate = known.and_then(|known| known.arguments.get("alternate-exchange"));
        if let Some(alternate) = alternate.and_then(|name| name.as_str())
            && !is_routed
        {
            self.route(alternate, key, seen, queues);
        }
    }
}

/// Whether messages leave a queue without anybody rejecting them.
fn lets_go(queue: &Queue) -> bool {
    let has = |name| queue.arguments.get(name).is_some();
    let number = |name| queue.arguments.get(name).and_then(|value| value.as_i64());
    let overflow = queue.arguments.get("x-overflow").and_then(|value| value.as_str());
    let is_bounded = has("x-max-length") || has("x-max-length-bytes");
    has("x-message-ttl")
        || (is_bounded && overflow != Some("reject-publish"))
        || number("x-delivery-limit").is_some_and(|limit| (0..UNLIMITED).contains(&limit))
}

/// A delivery limit from here on is none.
pub(crate) const UNLIMITED: i64 = 1_000_000;

/// Whether the pattern of a topic exchange fits a key.
fn fits(pattern: &str, key: &str) -> bool {
    fn words_fit(pattern: &[&str], key: &[&str]) -> bool {
        match (pattern.split_first(), key.split_first()) {
            (None, None) => true,
            (Some((&"#", rest)), _) => {
                (0..=key.len()).any(|skipped| words_fit(rest, &key[skipped..]))
            }
            (Some((word, rest)), Some((first, others))) => {
                (*word == "*" || word == first) && words_fit(rest, others)
            }
            _ => false,
        }
    }
    let pattern: Vec<&str> = pattern.split('.').collect();
    let key: Vec<&str> = key.split('.').collect();
    words_fit(&pattern, &key)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::topology::{Exchange, Overflow};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn patterns_of_topic_exchanges_fit_as_the_broker_has_it() {
        for (pattern, key) in [("#", "a.b"), ("retry.#", "retry"), ("retry.#", "retry.a.b")] {
            assert!(fits(pattern, key), "{pattern} {key}");
        }
        for (pattern, key) in [("a.*.c", "a.b.c"), ("#.c", "a.b.c"), ("#.b.#", "a.b.c")] {
            assert!(fits(pattern, key), "{pattern} {key}");
        }
        for (pattern, key) in [("retry.#", "parking_lot"), ("*", "a.b"), ("a.*", "a"), ("", "a")] {
            assert!(!fits(pattern, key), "{pattern} {key}");
        }
    }

    /// Two queues that dead-letter to each other; the second one lets go after a second.
    fn pair(first: Queue) -> Topology {
        Topology::new()
            .exchange(Exchange::topic("x"))
            .queue(first.dead_letter_to("x").dead_letter_key("b.1").bind("x", "a.#"))
            .queue(
                Queue::classic("b")
                    .message_ttl(SECOND)
                    .dead_letter_to("x")
                    .dead_letter_key("a")
                    .bind("x", "b.*"),
            )
    }

    #[test]
    fn whatever_lets_go_of_messages_by_itself_closes_the_circle() {
        let first = || Queue::quorum("a");
        let limited = [
            first().message_ttl(SECOND),
            first().max_length(5),
            first().max_length(5).overflow(Overflow::RejectPublishDlx),
            first().delivery_limit(5),
        ];
        for queue in limited {
            let topology = pair(queue);
            assert_eq!(topology.dropping_cycle(), Some(vec!["a", "b"]), "{topology:?}");
        }
        let harmless = [
            first(),
            first().max_length(5).overflow(Overflow::RejectPublish),
            first().argument("x-delivery-limit", -1),
            first().expires(SECOND),
        ];
        for queue in harmless {
            let topology = pair(queue);
            assert_eq!(topology.dropping_cycle(), None, "{topology:?}");
        }
    }

    #[test]
    fn only_where_the_keys_lead() {
        let ending = Topology::new()
            .exchange(Exchange::direct("x"))
            .queue(Queue::classic("a").message_ttl(SECOND).dead_letter_to("x").dead_letter_key("k"))
            .binding(super::super::Binding::to_queue("a", "x", "other"));
        assert_eq!(ending.dropping_cycle(), None);
        let keeping_its_key = Topology::new()
            .exchange(Exchange::direct("x"))
            .queue(Queue::classic("a").message_ttl(SECOND).dead_letter_to("x").bind("x", "other"));
        assert_eq!(keeping_its_key.dropping_cycle(), Some(vec!["a"]));
        let by_the_default_exchange =
            Topology::new().queue(Queue::classic("a").message_ttl(SECOND).dead_letter_to(""));
        assert_eq!(by_the_default_exchange.dropping_cycle(), Some(vec!["a"]));
    }

    #[test]
    fn through_other_exchanges_and_alternates() {
        let topology = Topology::new()
            .exchange(Exchange::fanout("x"))
            .exchange(Exchange::direct("y").bind("x", "").alternate("z"))
            .exchange(Exchange::fanout("z").bind("z", ""))
            .queue(Queue::classic("a").message_ttl(SECOND).dead_letter_to("x").bind("z", ""));
        assert_eq!(topology.dropping_cycle(), Some(vec!["a"]));
    }
}
