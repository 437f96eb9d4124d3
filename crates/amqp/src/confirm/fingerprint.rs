//! What a returned message is recognised by, since `basic.return` carries no delivery tag.

use std::hash::BuildHasher;

use foldhash::quality::RandomState;
use leveret_wire::Properties;

/// How much of either end of a body is hashed.
const BODY_ENDS: usize = 128;

/// What a returned message is recognised by. Hashes, so that no body is kept in memory for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Fingerprint {
    /// Exchange and routing key.
    address: u64,
    /// The message id, which no broker alters; 0 if there is none.
    id: u64,
    /// Length and both ends of the body.
    body: u64,
    /// Correlation id and headers.
    rest: u64,
}

/// How much a returned message has in common with a publish. Returns come in the order of the publishes: it is the oldest
/// unconfirmed one of which most is the same.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub enum Likeness {
    All,
    /// Exchange, routing key and message id: the broker, or something on the way, has altered the rest.
    Id,
    /// Exchange, routing key and body: the same of a message without an id. RabbitMQ takes a header `BCC` away.
    Body,
    /// Exchange and routing key: it is one of ours, and not to be taken for delivered.
    Address,
}

impl Likeness {
    /// In the order in which to try.
    #[doc(hidden)]
    pub const ALL: [Likeness; 4] = [Likeness::All, Likeness::Id, Likeness::Body, Likeness::Address];
}

impl Fingerprint {
    #[doc(hidden)]
    pub fn is_like(self, other: Fingerprint, likeness: Likeness) -> bool {
        match likeness {
            Likeness::All => self == other,
            Likeness::Id => self.id != 0 && (self.address, self.id) == (other.address, other.id),
            Likeness::Body => (self.address, self.body) == (other.address, other.body),
            Likeness::Address => self.address == other.address,
        }
    }
}

/// Makes fingerprints. The hash has a random key, so that nobody can make messages that look alike and are not.
#[derive(Debug, Default)]
#[doc(hidden)]
pub struct Fingerprints {
    hasher: RandomState,
}

impl Fingerprints {
    #[inline]
    #[doc(hidden)]
    pub fn of(
        &self,
        exchange: &str,
        routing_key: &str,
        properties: &Properties<'_>,
        body: &[u8],
    ) -> Fingerprint {
        let address = self.hasher.hash_one((exchange, routing_key));
        let id = properties.message_id.as_ref();
        let id = id.map_or(0, |id| self.hasher.hash_one(id.as_bytes()));
        let ends = body.len().min(BODY_ENDS);
        let ends = (&body[..ends], &body[body.len() - ends..]);
        let body = self.hasher.hash_one((body.len(), ends));
        let correlation_id = properties.correlation_id.as_ref().map(|id| id.as_bytes());
        let rest = self.hasher.hash_one((correlation_id, self.headers(properties)));
        Fingerprint { address, id, body, rest }
    }

    #[doc(hidden)]
    pub fn of_returned(&self, returned: &super::Returned) -> Fingerprint {
        let properties = returned.properties.get();
        self.of(&returned.exchange, &returned.routing_key, &properties, &returned.body)
    }

    /// The same whatever the order of the headers: RabbitMQ 4.3 sorts them.
    fn headers(&self, properties: &Properties<'_>) -> u64 {
        properties.headers.as_ref().map_or(0, |headers| {
            let fields = headers.encoded_fields().map(|field| self.hasher.hash_one(field));
            fields.fold(1, u64::wrapping_add)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ShortStr, Table, Value};

    fn with_headers(pairs: [(&'static str, Value<'static>); 2]) -> Properties<'static> {
        let headers = Some(Table::from_pairs(pairs).unwrap().into_owned());
        Properties { headers, ..Properties::default() }
    }

    #[test]
    fn the_order_of_headers_does_not_matter() {
        let prints = Fingerprints::default();
        let print = |pairs| prints.of("x", "key", &with_headers(pairs), b"body");
        let (one, two) = ([("a", 1.into()), ("b", 2.into())], [("b", 2.into()), ("a", 1.into())]);
        assert_eq!(print(one.clone()), print(two));
        assert_ne!(print(one), print([("a", 2.into()), ("b", 1.into())]));
    }

    #[test]
    fn an_altered_message_is_like_the_one_with_its_id() {
        let prints = Fingerprints::default();
        let print = |id: &'static str, body: &[u8]| {
            let message_id = Some(ShortStr::from_static(id));
            prints.of("x", "key", &Properties { message_id, ..Properties::default() }, body)
        };
        let (sent, altered, other) = (print("1", b"a"), print("1", b"b"), print("2", b"a"));
        assert!(!altered.is_like(sent, Likeness::All) && altered.is_like(sent, Likeness::Id));
        assert!(!other.is_like(sent, Likeness::Id) && other.is_like(sent, Likeness::Address));
        let nameless = prints.of("x", "key", &Properties::default(), b"a");
        assert!(!nameless.is_like(nameless, Likeness::Id));
        let with_headers = with_headers([("BCC", 1.into()), ("a", 2.into())]);
        let altered = prints.of("x", "key", &with_headers, b"a");
        assert!(!altered.is_like(nameless, Likeness::All));
        assert!(altered.is_like(nameless, Likeness::Body) && !altered.is_like(sent, Likeness::All));
    }

    #[test]
    fn a_body_is_known_by_its_length_and_both_ends() {
        let prints = Fingerprints::default();
        let print = |body: &[u8]| prints.of("x", "key", &Properties::default(), body);
        let long = [b'a'; 1000];
        let (mut begins, mut ends) = (long, long);
        begins[0] = b'b';
        ends[999] = b'b';
        assert_eq!(print(&long), print(&long));
        for other in [&begins[..], &ends, &long[1..], b""] {
            assert_ne!(print(&long), print(other));
        }
    }

    #[test]
    fn neither_name_runs_into_the_other() {
        let prints = Fingerprints::default();
        let print = |exchange, key| prints.of(exchange, key, &Properties::default(), b"");
        assert!(!print("ab", "c").is_like(print("a", "bc"), Likeness::Address));
    }
}
