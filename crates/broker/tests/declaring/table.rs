//! What RabbitMQ answered: recorded from real nodes, for whatever is to behave like them.
//!
//! `answers.txt` has each case, and below it the answer; or two, where 3.10 and 4.3 differ.
//!
//! ```text
//! queue q durable x-max-priority=256i32
//!     channel 406 PRECONDITION_FAILED - invalid arg 'x-max-priority' for queue 'q' in vhost '/': {max_value_exceeded,256}
//! exchange e nonsense
//!     3.10: connection 503 COMMAND_INVALID - unknown exchange type 'nonsense'
//!     4.3: channel 406 PRECONDITION_FAILED - unknown exchange type 'nonsense'
//! ```

use std::fmt;

use leveret_wire::{ReplyCode, Scope};

use super::requests::unescaped;

const RECORDED: &str = include_str!("answers.txt");

/// The longest text of a reply, and what stands in place of the rest.
const LONGEST_TEXT: usize = 255;
const REST: &[u8] = b"...";

/// What a broker answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It does it; and the queue has this name, if it is not the one that was asked for.
    Ok(Option<String>),
    /// It closes the channel or the connection.
    Refused { scope: Scope, code: ReplyCode, text: Vec<u8> },
}

impl Answer {
    /// A refusal as it is sent: cut where it is too long.
    pub(crate) fn refused(scope: Scope, code: ReplyCode, text: impl Into<Vec<u8>>) -> Answer {
        let mut text = text.into();
        if text.len() > LONGEST_TEXT {
            text.truncate(LONGEST_TEXT - REST.len());
            text.extend_from_slice(REST);
        }
        Answer::Refused { scope, code, text }
    }

    fn parse(line: &str) -> Option<Answer> {
        let mut words = line.splitn(3, ' ');
        let scope = match words.next()? {
            "ok" => return Some(Answer::Ok(words.next().map(str::to_owned))),
            "channel" => Scope::Channel,
            "connection" => Scope::Connection,
            _ => return None,
        };
        let code = ReplyCode(words.next()?.parse().ok()?);
        Some(Answer::Refused { scope, code, text: unescaped(words.next()?) })
    }

    /// The same answer in another virtual host than `/`.
    pub(crate) fn in_virtual_host(self, name: &str) -> Answer {
        match self {
            Answer::Refused { scope, code, text } => {
                // What is not text names no virtual host.
                let Ok(words) = String::from_utf8(text.clone()) else {
                    return Answer::Refused { scope, code, text };
                };
                let there = words.replace("in vhost '/'", &format!("in vhost '{name}'"));
                Answer::refused(scope, code, there)
            }
            done => done,
        }
    }
}

/// As in the table.
impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scope, code, text) = match self {
            Answer::Ok(None) => return f.write_str("ok"),
            Answer::Ok(Some(name)) => return write!(f, "ok {name}"),
            Answer::Refused { scope, code, text } => (scope, code, text),
        };
        let scope = match scope {
            Scope::Channel => "channel",
            Scope::Connection => "connection",
        };
        write!(f, "{scope} {} ", code.0)?;
        String::from_utf8_lossy(text).chars().try_for_each(|c| match c {
            '\n' => f.write_str("\\n"),
            '\r' => f.write_str("\\r"),
            c if c.is_control() => write!(f, "\\x{:02x}", u32::from(c)),
            c => write!(f, "{c}"),
        })
    }
}

/// The cases, and what RabbitMQ of this version (`3.10` or `4.3`) answers.
///
/// # Panics
/// If the table is not one.
pub(crate) fn recorded(version: &str) -> Vec<(&'static str, Answer)> {
    let mut case = "";
    let mut answers = Vec::new();
    for line in RECORDED.lines() {
        let Some(answer) = line.strip_prefix("    ") else {
            case = line;
            continue;
        };
        let answer = match answer.split_once(": ") {
            Some((of, answer)) if of == version => answer,
            Some(("3.10" | "4.3", _)) => continue,
            _ => answer,
        };
        let answer = Answer::parse(answer).unwrap_or_else(|| panic!("no answer: {line:?}"));
        answers.push((case, answer));
    }
    answers
}
