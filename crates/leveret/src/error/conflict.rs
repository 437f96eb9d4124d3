//! Where the broker has something else than was declared.

use std::fmt;

/// An object that the broker has with another parameter. The broker never changes an existing object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// Which: `queue "billing"`.
    pub object: String,
    /// The parameter that differs: `x-message-ttl`, `durable`, `type`.
    pub argument: String,
    /// What was declared; `none` if the parameter was not given.
    pub wanted: String,
    /// What the broker has; `none` if it has none.
    pub found: String,
}

impl Conflict {
    /// Reads RabbitMQ's refusal: `inequivalent arg 'durable' for queue 'q' in vhost '/': received 'true' but current is
    /// 'false'`, and with types: `received the value '1' of type 'long' but current is none`.
    pub(crate) fn read(object: &str, text: &str) -> Option<Conflict> {
        let (_, rest) = text.split_once("inequivalent arg '")?;
        let (argument, rest) = rest.split_once('\'')?;
        // A name may hold anything, so the values are looked for from the end.
        let (rest, found) = rest.rsplit_once(" but current is ")?;
        let (_, wanted) = rest.rsplit_once(": received ")?;
        Some(Conflict {
            object: object.to_owned(),
            argument: argument.to_owned(),
            wanted: value(wanted),
            found: value(found),
        })
    }
}

/// `the value '1' of type 'long'` is 1, `'true'` is true, and `none` is none.
fn value(text: &str) -> String {
    let text = text.trim().trim_start_matches("the value ");
    let text = text.rsplit_once(" of type ").map_or(text, |(value, _type)| value);
    text.strip_prefix('\'').and_then(|text| text.strip_suffix('\'')).unwrap_or(text).to_owned()
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = |value: &str| match value {
            "none" => format!("no {}", self.argument),
            value => format!("{} = {value}", self.argument),
        };
        let (found, wanted) = (has(&self.found), has(&self.wanted));
        write!(f, "{}: the broker has it with {found}, this topology wants {wanted}", self.object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (String, String, String) {
        let conflict = Conflict::read("queue \"q\"", text).expect("a refusal that can be read");
        (conflict.argument, conflict.wanted, conflict.found)
    }

    fn of(argument: &str, wanted: &str, found: &str) -> (String, String, String) {
        (argument.to_owned(), wanted.to_owned(), found.to_owned())
    }

    #[test]
    fn every_form_of_rabbitmqs_refusal_is_read() {
        let prefix = "406 PRECONDITION_FAILED in queue.declare: inequivalent arg";
        assert_eq!(
            read(&format!(
                "{prefix} 'durable' for queue 'q' in vhost '/': received 'true' but current is 'false'"
            )),
            of("durable", "true", "false")
        );
        assert_eq!(
            read(&format!(
                "{prefix} 'x-message-ttl' for queue 'q' in vhost '/': received the value '30000' of type 'signedint' but \
                 current is the value '60000' of type 'long'"
            )),
            of("x-message-ttl", "30000", "60000")
        );
        assert_eq!(
            read(&format!(
                "{prefix} 'x-dead-letter-exchange' for queue 'q' in vhost '/': received none but current is the value \
                 'it's' of type 'longstr'"
            )),
            of("x-dead-letter-exchange", "none", "it's")
        );
    }

    #[test]
    fn another_refusal_is_no_conflict() {
        assert_eq!(Conflict::read("queue \"q\"", "invalid arg 'x-max-length'"), None);
    }

    #[test]
    fn it_says_what_is_there_and_what_was_wanted() {
        let conflict = Conflict {
            object: "queue \"billing\"".to_owned(),
            argument: "x-message-ttl".to_owned(),
            wanted: "30000".to_owned(),
            found: "none".to_owned(),
        };
        assert_eq!(
            conflict.to_string(),
            "queue \"billing\": the broker has it with no x-message-ttl, this topology wants x-message-ttl = 30000"
        );
    }
}
