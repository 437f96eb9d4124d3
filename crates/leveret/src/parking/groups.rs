//! Parked messages that failed alike, counted together.

use std::collections::HashMap;
use std::time::SystemTime;

use super::ParkedMessage;

/// More groups than this are not told apart: a person looks at them.
const MAX_GROUPS: usize = 1000;

/// How much of an error tells one group from another.
const MAX_ERROR: usize = 200;

/// Messages of one queue whose last errors were of one kind and said the same, but for numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// The queue whose consumer failed.
    pub queue: Option<String>,
    /// Of what kind the error was.
    pub kind: Option<String>,
    /// What the error said, `#` in place of all that has digits in it. `None` if nobody knows, or if it is one of too many
    /// to be told apart.
    pub error: Option<String>,
    /// How many messages.
    pub count: u64,
    /// When the first of them failed last.
    pub first: Option<SystemTime>,
    /// When the latest of them failed last.
    pub last: Option<SystemTime>,
    /// One of them, by its place.
    pub example: u64,
    /// The same, by its id.
    pub example_id: Option<String>,
    /// What its error said.
    pub example_error: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Key {
    queue: Option<String>,
    kind: Option<String>,
    error: Option<String>,
}

/// The groups so far.
#[derive(Debug, Default)]
pub(super) struct Groups(HashMap<Key, Group>);

impl Groups {
    pub(super) fn add(&mut self, message: &ParkedMessage) {
        let story = message.story();
        let mut key = Key {
            queue: story.queue.clone(),
            kind: story.kind.clone(),
            error: story.error.as_deref().map(normalised),
        };
        if self.0.len() >= MAX_GROUPS && !self.0.contains_key(&key) {
            key = Key::default();
        }
        let group = self.0.entry(key).or_insert_with_key(|key| Group {
            queue: key.queue.clone(),
            kind: key.kind.clone(),
            error: key.error.clone(),
            count: 0,
            first: None,
            last: None,
            example: message.position(),
            example_id: message.message_id(),
            example_error: story.error.clone(),
        });
        group.count += 1;
        if let Some(at) = story.last_failure {
            group.first = Some(group.first.map_or(at, |first| first.min(at)));
            group.last = Some(group.last.map_or(at, |last| last.max(at)));
        }
    }

    /// All of them, the largest first.
    pub(super) fn finish(self) -> Vec<Group> {
        let mut groups: Vec<Group> = self.0.into_values().collect();
        groups.sort_by_key(|group| (std::cmp::Reverse(group.count), group.example));
        groups
    }
}

/// The text without what differs from message to message: every word with a digit in it is a `#`.
fn normalised(error: &str) -> String {
    let mut text = String::new();
    let is_of_word = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    let mut rest = error.trim();
    while !rest.is_empty() && text.len() < MAX_ERROR {
        let end = rest.find(|c| !is_of_word(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        match word.chars().any(|c| c.is_ascii_digit()) {
            true => text.push('#'),
            false => text.push_str(word),
        }
        let mut others = after.chars();
        text.extend(others.next());
        rest = others.as_str();
    }
    text
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::amqp::{Properties, RawProperties, Table};

    #[test]
    fn what_differs_from_message_to_message_is_left_out() {
        let table = [
            ("order 17 not found", "order # not found"),
            ("order 9 not found", "order # not found"),
            ("no user 6f1c7a3e-0b1d-4c55-9a55-0123456789ab!", "no user #!"),
            ("connect to 10.0.0.1:5432: refused", "connect to #.#.#.#:#: refused"),
            ("grün, 3 mal", "grün, # mal"),
            ("", ""),
        ];
        for (error, expected) in table {
            assert_eq!(normalised(error), expected);
        }
        assert!(normalised(&"word ".repeat(1000)).len() < 2 * MAX_ERROR);
    }

    fn message(position: u64, error: &str) -> ParkedMessage {
        let headers = [("x-leveret-error", error.into()), ("x-leveret-queue", "q".into())];
        let headers = Some(Table::from_pairs(headers).unwrap());
        let raw = RawProperties::from(&Properties { headers, ..Properties::default() });
        ParkedMessage::new(position, "", "", &raw, &Bytes::new())
    }

    #[test]
    fn the_largest_group_is_the_first() {
        let mut groups = Groups::default();
        for (position, error) in ["rare", "order 1", "order 2"].iter().enumerate() {
            groups.add(&message(position as u64 + 1, error));
        }
        let groups = groups.finish();
        let told: Vec<_> =
            groups.iter().map(|g| (g.error.as_deref(), g.count, g.example)).collect();
        assert_eq!(told, [(Some("order #"), 2, 2), (Some("rare"), 1, 1)]);
        assert_eq!(groups[0].example_error.as_deref(), Some("order 1"));
    }

    #[test]
    fn ever_other_errors_take_bounded_room() {
        let mut groups = Groups::default();
        for position in 0..3000 {
            let name: String =
                format!("{position}").chars().map(|c| (c as u8 + 50) as char).collect();
            groups.add(&message(position, &name));
        }
        let groups = groups.finish();
        assert_eq!(groups.len(), MAX_GROUPS + 1);
        assert_eq!((groups[0].error.as_deref(), groups[0].count), (None, 2000));
    }
}
