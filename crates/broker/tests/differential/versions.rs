//! What is known to differ between RabbitMQ 3.10 and 4.3, so that a comparison of the two shows what is not.
//!
//! Each line here is a case of the broker's `Profile`.

/// Texts that only one of the two says, or says otherwise: what is left of a line that has one of them.
const TEXTS: [&str; 8] = [
    // 3.10 refuses (406) any delivery mode but 1 and 2; 4.3 takes it.
    "delivery_mode_unknown",
    // 3.10: the connection, 503; 4.3: the channel, 406.
    "unknown exchange type",
    // An x-queue-master-locator that is nonsense. 4.3 says why.
    "INTERNAL_ERROR",
    // 3.10: the connection, 540; 4.3 has no global qos to speak of.
    "does not support global qos",
    // 4.3 says <<"quorum">>.
    "queues with single active consumer",
    // "received none but current is the value 'quorum' of type 'longstr'"; "received 'classic' but current is 'quorum'".
    "inequivalent arg 'x-queue-type'",
    // "of queue type rabbit_classic_queue"; "invalid_queue_locator_arg".
    "x-queue-leader-locator",
    "queue_master_locator",
];

/// Makes lines of 3.10 and 4.3 alike.
pub(crate) fn forgive(mut line: String) -> String {
    if let Some(known) = TEXTS.iter().find(|known| line.contains(**known)) {
        return (*known).to_owned();
    }
    // 4.3 says what a message died of last, too.
    for name in ["x-last-death-exchange", "x-last-death-queue", "x-last-death-reason"] {
        line = without(&line, &format!(", \"{name}\": \""), "\"");
    }
    // 4.3 puts it first, 3.10 last.
    line = without(&line, ", \"original-expiration\": \"", "\"");
    line = without(&line, "\"original-expiration\": \"", "\", ");
    // 3.10 counts deliveries, from 0; 4.3 counts deliveries and failures, each once there was one.
    for name in ["x-acquired-count", "x-delivery-count"] {
        line = without(&line, &format!(", \"{name}\": l("), ")");
        line = without(&line, &format!("\"{name}\": l("), "), ");
        line = without(&line, &format!("\"{name}\": l("), ")");
    }
    line = line.replace(" headers: {}", "");
    // 4.3 remembers across queues that a message was delivered.
    line.replace("redelivered: true, ", "").replace("redelivery", "delivery")
}

/// The text without all that is between these, and without these.
fn without(text: &str, begin: &str, end: &str) -> String {
    let mut text = text.to_owned();
    while let Some(at) = text.find(begin)
        && let Some(length) = text[at + begin.len()..].find(end)
    {
        text.replace_range(at..at + begin.len() + length + end.len(), "");
    }
    text
}
