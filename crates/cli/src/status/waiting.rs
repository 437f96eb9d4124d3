//! Messages that wait elsewhere to come into a queue: for a retry, mostly.

use serde_json::Value;

use crate::failure::Failure;
use crate::management::{Bound, Management, QueueFacts, To};

/// How many wait for each of these queues. AMQP does not tell: it takes the names of the queues and their settings.
pub(super) async fn count(
    management: &Management,
    cluster: Option<&str>,
    names: impl Iterator<Item = &str>,
) -> Result<Vec<u64>, Failure> {
    management.overview().await?.check(cluster, false)?;
    let queues = management.queues().await?;
    let mut counts = Vec::new();
    for name in names {
        let bound = management.bindings_to(To::Queue(name)).await?;
        let waiting = queues.iter().filter(|(other, facts)| is_before(other, facts, name, &bound));
        counts.push(waiting.filter_map(|(_, facts)| facts.messages).sum());
    }
    Ok(counts)
}

/// Whether messages of the other queue come into this one when their time is over: dead letters go there, and they do have a time,
/// or the queue is one of this one's.
fn is_before(other: &str, facts: &QueueFacts, name: &str, bound: &[Bound]) -> bool {
    let setting = |name| facts.setting(name).and_then(Value::as_str);
    let leads_here = match setting("dead-letter-exchange") {
        None => false,
        Some("") => setting("dead-letter-routing-key") == Some(name),
        Some(exchange) => bound.iter().any(|bound| bound.source == exchange),
    };
    let is_own = other.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
    leads_here && (is_own || facts.setting("message-ttl").is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn facts(arguments: Value) -> QueueFacts {
        serde_json::from_value(json!({ "arguments": arguments, "messages": 1 })).unwrap()
    }

    #[test]
    fn a_wait_queue_is_told_from_a_queue_with_a_parking_lot() {
        let bound: Vec<Bound> = serde_json::from_value(json!([{
            "source": "jobs.return", "destination": "jobs", "destination_type": "queue", "routing_key": ""
        }]))
        .unwrap();
        let wait = json!({ "x-dead-letter-exchange": "jobs.return", "x-message-ttl": 1000 });
        assert!(is_before("jobs.wait.1s", &facts(wait.clone()), "jobs", &bound));
        assert!(is_before("else", &facts(wait), "jobs", &bound));
        let straight = json!({ "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "jobs" });
        assert!(is_before("jobs.wait", &facts(straight.clone()), "jobs", &[]));
        // Its messages are there to be consumed, and come here only if they fail.
        assert!(!is_before("else", &facts(straight), "jobs", &bound));
        assert!(!is_before("jobs.wait", &facts(json!({})), "jobs", &bound));
    }
}
