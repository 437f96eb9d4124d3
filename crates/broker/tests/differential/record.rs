//! What was observed, in an order that does not depend on which process of the broker was faster.

use std::collections::BTreeMap;

use leveret_wire::Method;

use super::link::Event;
use super::names::Names;
use super::show::bare;

/// What one step did: lines that another broker's must equal.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Record {
    pub(super) step: String,
    pub(super) lines: Vec<String>,
}

/// What came on one channel in one step, as lines.
pub(super) fn in_order(events: Vec<Event>, names: &Names) -> Vec<String> {
    let mut lines = Vec::new();
    let mut cancelled = Vec::new();
    let mut deliveries: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut tags = Vec::new();
    let mut confirms = BTreeMap::new();
    let mut contents = 0;
    for event in events {
        match event {
            Event::Reply(Method::BasicCancel(cancel)) => {
                cancelled.push(format!(
                    "cancelled {}",
                    names.clean(&cancel.consumer_tag.to_str_lossy())
                ));
            }
            Event::Reply(method) => lines.push(bare(&method)),
            Event::Content(text) => {
                // All publishes of a step share their fate, and each comes back before it is confirmed.
                contents += 1;
                let late = if confirms.len() >= contents { "after its confirm: " } else { "" };
                lines.push(format!("{late}{text}"));
            }
            Event::Delivery { consumer, tag, text } => {
                tags.push(tag);
                deliveries.entry(names.clean(&consumer)).or_default().push(text);
            }
            Event::Confirm { tag, outcome } => {
                confirms.insert(tag, outcome);
            }
            Event::Odd(text) => lines.push(text),
        }
    }
    cancelled.sort();
    lines.extend(cancelled);
    for (consumer, texts) in deliveries {
        lines.extend(texts.into_iter().map(|text| format!("to {consumer}: {text}")));
    }
    tags.sort_unstable();
    if !tags.is_empty() {
        lines.push(format!("delivery tags {tags:?}"));
    }
    lines.extend(confirms.into_iter().map(|(tag, outcome)| format!("publish {tag}: {outcome}")));
    lines
}
