//! What RabbitMQ does that would lose a message that is tried again: found before the first one is.

use crate::topology::Queue;

use super::policy::RetryPolicy;

/// Why a queue and a policy do not go together, if they do not.
pub(crate) fn of(queue: &Queue, policy: &RetryPolicy) -> Option<String> {
    let argument = |name: &str| queue.arguments().find(|(known, _)| *known == name);
    let limit = argument("x-delivery-limit").and_then(|(_, limit)| limit.as_i64())?;
    let has_exit = argument("x-dead-letter-exchange").is_some();
    let retries = policy.retries().map_or(i64::MAX, i64::from);
    (limit >= 0 && limit < retries && !has_exit).then(|| {
        let retries = policy.retries().map_or("unlimited".to_owned(), |n| n.to_string());
        format!(
            "its delivery limit is {limit}, below the {retries} retries, and it has no dead-letter exchange: the broker drops \
             what was delivered more often. Raise the limit, or give the queue a dead-letter exchange"
        )
    })
}
