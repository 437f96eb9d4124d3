//! What a client is told when it asked for what it cannot have.

use std::fmt;

use leveret_wire::{ReplyCode, Scope, ShortStr};

/// A reply code and RabbitMQ's words for it. It costs the client its channel or its connection, as the code has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: ReplyCode,
    /// With the code's name in front: `NOT_FOUND - no queue 'q' in vhost '/'`.
    pub(crate) text: String,
}

impl Refusal {
    /// The text without the code's name, which is put in front of it.
    pub(crate) fn new(code: ReplyCode, text: impl fmt::Display) -> Self {
        let name = code.name().unwrap_or("INTERNAL_ERROR");
        Refusal { code, text: format!("{name} - {text}") }
    }

    pub(crate) fn not_found(text: impl fmt::Display) -> Self {
        Refusal::new(ReplyCode::NOT_FOUND, text)
    }

    pub(crate) fn precondition_failed(text: impl fmt::Display) -> Self {
        Refusal::new(ReplyCode::PRECONDITION_FAILED, text)
    }

    /// The text as a reply can hold it: cut where it is too long, with dots for the rest, wherever in a letter that is.
    pub(crate) fn reply_text(&self) -> ShortStr<'_> {
        const REST: &[u8] = b"...";
        let text = self.text.as_bytes();
        let fitting = match text.len() {
            0..=ShortStr::MAX => ShortStr::from_bytes(text),
            _ => ShortStr::from_bytes([&text[..ShortStr::MAX - REST.len()], REST].concat()),
        };
        fitting.unwrap_or_default()
    }

    /// What it costs: the channel, or the whole connection.
    pub(crate) fn scope(&self) -> Scope {
        self.code.scope().unwrap_or(Scope::Connection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_says_what_it_costs() {
        assert_eq!(Refusal::not_found("no queue 'q'").scope(), Scope::Channel);
        let immediate = Refusal::new(ReplyCode::NOT_IMPLEMENTED, "immediate=true");
        assert_eq!(immediate.scope(), Scope::Connection);
        assert_eq!(immediate.text, "NOT_IMPLEMENTED - immediate=true");
    }

    #[test]
    fn a_text_that_is_too_long_ends_in_dots() {
        let said = |length| {
            let refusal = Refusal { code: ReplyCode::NOT_FOUND, text: "x".repeat(length) };
            refusal.reply_text().to_string()
        };
        assert_eq!(said(255), "x".repeat(255));
        assert_eq!(said(256), format!("{}...", "x".repeat(252)));
    }
}
