//! Keys of events, and patterns of them: what cannot work is refused before it is sent.

use crate::amqp::ShortStr;
use crate::error::{Error, ErrorKind};
use crate::topology::ExchangeKind;

/// The key of an event is one that somebody can subscribe to.
pub(super) fn check_key(kind: &ExchangeKind, key: &str) -> Result<(), Error> {
    check_length("key", key)?;
    if looks_at_keys(kind) && key.split('.').any(is_wildcard) {
        let text = format!(
            "the key {key:?} is a pattern: `*` and `#` stand for words when subscribing, and an event has the words themselves"
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

/// A pattern fits some key.
pub(super) fn check_pattern(kind: &ExchangeKind, pattern: &str) -> Result<(), Error> {
    check_length("pattern", pattern)?;
    let has_wildcards = pattern.contains(['*', '#']);
    let text = match kind {
        ExchangeKind::Topic if pattern.split('.').any(is_half_wildcard) => format!(
            "the pattern {pattern:?} has `*` or `#` as a part of a word, where it stands for nothing but itself: only a whole \
             word can be one"
        ),
        ExchangeKind::Direct if has_wildcards => format!(
            "{pattern:?} is a pattern, and a direct exchange compares whole keys: subscribe to each key, or use a topic exchange"
        ),
        _ => return Ok(()),
    };
    Err(Error::new(ErrorKind::Invalid, text))
}

fn check_length(what: &str, text: &str) -> Result<(), Error> {
    let short = ShortStr::try_from(text);
    short.map(drop).map_err(|error| {
        Error::caused(ErrorKind::Invalid, format!("the {what} of an event cannot be sent"), error)
    })
}

fn looks_at_keys(kind: &ExchangeKind) -> bool {
    matches!(kind, ExchangeKind::Topic | ExchangeKind::Direct)
}

fn is_wildcard(word: &str) -> bool {
    matches!(word, "*" | "#")
}

fn is_half_wildcard(word: &str) -> bool {
    word.contains(['*', '#']) && !is_wildcard(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(result: Result<(), Error>) -> bool {
        result.is_err_and(|error| {
            assert_eq!(error.kind(), ErrorKind::Invalid);
            true
        })
    }

    #[test]
    fn keys_are_words_and_patterns_may_have_wildcards_as_words() {
        use ExchangeKind::{Direct, Fanout, Topic};
        let long = "k".repeat(256);
        for (kind, text, is_key, is_pattern) in [
            (Topic, "STOCK.IBM.NYSE", true, true),
            (Topic, "STOCK.#", false, true),
            (Topic, "*.IBM.*", false, true),
            (Topic, "#", false, true),
            (Topic, "STOCK.I*", true, false),
            (Topic, "STOCK#", true, false),
            (Topic, "a..b", true, true),
            (Topic, "", true, true),
            (Topic, &long[1..], true, true),
            (Topic, &long, false, false),
            (Direct, "STOCK.IBM", true, true),
            (Direct, "STOCK.#", false, false),
            (Direct, "STOCK.I*", true, false),
            (Fanout, "#", true, true),
            (Fanout, &long, false, false),
        ] {
            assert_eq!(!refused(check_key(&kind, text)), is_key, "key {text} of {kind:?}");
            let allowed = !refused(check_pattern(&kind, text));
            assert_eq!(allowed, is_pattern, "pattern {text} of {kind:?}");
        }
    }
}
