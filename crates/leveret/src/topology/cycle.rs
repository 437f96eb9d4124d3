//! Circles of dead-letter exchanges in which the broker drops messages.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::{Binding, Destination, Exchange, ExchangeKind, Queue, Topology};

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
        let cycle = DeadLetters::of(self).cycle()?;
        Some(cycle.into_iter().map(|number| self.queues[number].name()).collect())
    }

    /// The queues of this topology that a message reaches from an exchange under a key, in order of their names.
    ///
    /// ```
    /// use leveret::{Exchange, Queue, Topology};
    ///
    /// let topology = Topology::new()
    ///     .exchange(Exchange::topic("orders"))
    ///     .queue(Queue::quorum("billing").bind("orders", "order.*"))
    ///     .queue(Queue::quorum("audit").bind("orders", "#"));
    /// assert!(topology.queues_for("orders", "order.paid").iter().eq(&["audit", "billing"]));
    /// ```
    ///
    /// What is true of [`dropping_cycle`](Self::dropping_cycle) is true of this: an exchange that is not part of the topology, or
    /// that looks at headers, may take any of its bindings.
    pub fn queues_for(&self, exchange: &str, key: &str) -> BTreeSet<&str> {
        let queues = DeadLetters::of(self).route(exchange, Some(key));
        queues.into_iter().map(|number| self.queues[number].name()).collect()
    }
}

/// Where dead letters go, by name. Users decide how long a chain is, so nothing here recurses.
struct DeadLetters<'t> {
    queues: &'t [Queue],
    numbers: HashMap<&'t str, usize>,
    exchanges: HashMap<&'t str, &'t Exchange>,
    bindings: HashMap<&'t str, Vec<&'t Binding>>,
}

/// How far the search for a cycle is with a queue.
#[derive(Clone, Copy, PartialEq)]
enum Visit {
    New,
    /// The search is at what follows it.
    OnPath,
    /// It leads to no cycle.
    Done,
}

impl<'t> DeadLetters<'t> {
    fn of(topology: &'t Topology) -> Self {
        let numbers = topology.queues.iter().enumerate();
        let mut bindings = HashMap::<&str, Vec<&Binding>>::new();
        for binding in &topology.bindings {
            bindings.entry(&binding.source).or_default().push(binding);
        }
        DeadLetters {
            queues: &topology.queues,
            numbers: numbers.map(|(number, queue)| (queue.name(), number)).collect(),
            exchanges: topology.exchanges.iter().map(|known| (&*known.name, known)).collect(),
            bindings,
        }
    }

    /// Searches depth first, and visits each queue once. The cycle begins with the queue that was given first.
    fn cycle(&self) -> Option<Vec<usize>> {
        let mut visits = vec![Visit::New; self.queues.len()];
        for start in 0..self.queues.len() {
            let mut path = Vec::new();
            let mut next = Some(start);
            loop {
                match next.map(|number| (number, visits[number])) {
                    Some((number, Visit::New)) => {
                        visits[number] = Visit::OnPath;
                        path.push((number, self.after(number).into_iter()));
                    }
                    Some((number, Visit::OnPath)) => {
                        let from = path.iter().position(|(on_path, _)| *on_path == number)?;
                        let mut cycle: Vec<_> = path[from..].iter().map(|(on, _)| *on).collect();
                        let first = cycle.iter().enumerate().min_by_key(|(_, number)| **number);
                        let first = first.map_or(0, |(at, _)| at);
                        cycle.rotate_left(first);
                        return Some(cycle);
                    }
                    Some((_, Visit::Done)) => {}
                    None => {
                        let Some((number, _)) = path.pop() else { break };
                        visits[number] = Visit::Done;
                    }
                }
                let Some((_, following)) = path.last_mut() else { break };
                next = following.next();
            }
        }
        None
    }

    /// Where messages go that leave a queue by themselves.
    fn after(&self, number: usize) -> BTreeSet<usize> {
        let queue = &self.queues[number];
        let text = |name| queue.arguments.get(name).and_then(|value| value.as_str());
        let Some(exchange) = text("x-dead-letter-exchange") else { return BTreeSet::new() };
        if !lets_go(queue) {
            return BTreeSet::new();
        }
        let key = text("x-dead-letter-routing-key");
        if exchange.is_empty() {
            // Without a key of its own it is that with which it came by the same exchange.
            return self.numbers.get(key.unwrap_or(&queue.name)).copied().into_iter().collect();
        }
        self.route(exchange, key)
    }

    fn route(&self, exchange: &str, key: Option<&str>) -> BTreeSet<usize> {
        let (mut queues, mut seen) = (BTreeSet::new(), HashSet::new());
        let mut open = vec![exchange];
        while let Some(exchange) = open.pop() {
            if !seen.insert(exchange) {
                continue;
            }
            let known = self.exchanges.get(exchange);
            let mut is_routed = false;
            for binding in self.bindings.get(exchange).into_iter().flatten() {
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
                    Destination::Queue(queue) => queues.extend(self.numbers.get(&**queue)),
                    Destination::Exchange(next) => open.push(next),
                }
            }
            let alternate = known.and_then(|known| known.arguments.get("alternate-exchange"));
            if let Some(alternate) = alternate.and_then(|name| name.as_str())
                && !is_routed
            {
                open.push(alternate);
            }
        }
        queues
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

/// Whether the pattern of a topic exchange fits a key. What a `#` takes is extended word by word where the rest does not fit;
/// an earlier `#` need not be tried again, because the later one can take as much.
fn fits(pattern: &str, key: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('.').collect();
    let key: Vec<&str> = key.split('.').collect();
    let (mut at, mut word) = (0, 0);
    // What follows the last `#`, and the first word that it has not taken.
    let mut last = None;
    while word < key.len() {
        match (pattern.get(at), last) {
            (Some(&"#"), _) => {
                at += 1;
                last = Some((at, word));
            }
            (Some(wanted), _) if *wanted == "*" || *wanted == key[word] => {
                at += 1;
                word += 1;
            }
            (_, Some((after, taken))) => {
                (at, word) = (after, taken + 1);
                last = Some((at, word));
            }
            (_, None) => return false,
        }
    }
    pattern[at..].iter().all(|rest| *rest == "#")
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
        for (pattern, key) in [("#.a.#.b.#", "x.a.a.y.b"), ("#.#", "a"), ("#.a.*.#", "a.a.b")] {
            assert!(fits(pattern, key), "{pattern} {key}");
        }
        for (pattern, key) in [("#.a.#.b", "a.b.c"), ("#.*.*.#", "a"), ("#.b.#.a", "a.b")] {
            assert!(!fits(pattern, key), "{pattern} {key}");
        }
    }

    #[test]
    fn many_wildcards_take_no_more_than_a_moment() {
        let pattern = "#.a.".repeat(40) + "b";
        assert!(!fits(&pattern, &["a"; 200].join(".")));
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

    /// Its name is its number. Dead letters go to the queue of that name, by the default exchange.
    fn link(number: usize, next: usize) -> Queue {
        Queue::classic(number.to_string())
            .message_ttl(SECOND)
            .dead_letter_to("")
            .dead_letter_key(next.to_string())
    }

    #[test]
    fn a_chain_may_be_as_long_as_it_likes() {
        const LENGTH: usize = 100_000;
        let mut topology = Topology::new();
        topology.queues = (0..LENGTH).map(|number| link(number, number + 1)).collect();
        assert_eq!(topology.dropping_cycle(), None);
        topology.queues[LENGTH - 1] = link(LENGTH - 1, 0);
        assert_eq!(topology.dropping_cycle().map(|cycle| cycle.len()), Some(LENGTH));
        // And so may one of exchanges.
        let mut topology = Topology::new();
        topology.bindings = (0..LENGTH)
            .map(|number| Binding::to_exchange((number + 1).to_string(), number.to_string(), ""))
            .collect();
        let queue = Queue::classic("q").message_ttl(SECOND).dead_letter_to("0");
        let topology = topology.queue(queue);
        assert_eq!(topology.dropping_cycle(), None);
        let closing = topology.binding(Binding::to_queue("q", LENGTH.to_string(), ""));
        assert_eq!(closing.dropping_cycle(), Some(vec!["q"]));
    }

    #[test]
    fn layers_in_which_many_ways_meet_again_are_searched_once() {
        const LAYERS: usize = 40;
        let name = |layer: usize, place: usize| format!("{layer:02}.{place}");
        let mut topology = Topology::new();
        for (layer, place) in (0..LAYERS).flat_map(|layer| (0..3).map(move |place| (layer, place)))
        {
            let next = format!("to {}", layer + 1);
            let queue = Queue::classic(name(layer, place)).message_ttl(SECOND).dead_letter_to(next);
            topology = topology.queue(queue.bind(format!("to {layer}"), ""));
        }
        assert_eq!(topology.dropping_cycle(), None);
        let back = Binding::to_queue(name(LAYERS - 2, 1), format!("to {LAYERS}"), "");
        let cycle = topology.binding(back);
        let expected = [name(LAYERS - 2, 1), name(LAYERS - 1, 0)];
        assert_eq!(cycle.dropping_cycle(), Some(expected.iter().map(String::as_str).collect()));
    }

    #[test]
    fn a_way_into_a_circle_is_no_part_of_it() {
        let mut topology = Topology::new();
        topology.queues = vec![link(0, 2), link(1, 2), link(2, 1)];
        assert_eq!(topology.dropping_cycle(), Some(vec!["1", "2"]));
    }
}
