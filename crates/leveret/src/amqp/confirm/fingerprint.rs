//! What a returned message is recognised by, since `basic.return` carries no delivery tag.

use std::hash::BuildHasher;

use foldhash::quality::RandomState;
use leveret_wire::Properties;

/// How much of either end of a body is hashed.
const BODY_ENDS: usize = 128;

/// A returned message is recognised by its address and its message id, which no broker alters; without an id by its body and
/// headers. Hashes, so that no body is kept in memory for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    /// Exchange and routing key.
    address: u64,
    content: u64,
}

impl Fingerprint {
    /// Whether both messages had the same exchange and routing key.
    pub(crate) fn has_address_of(self, other: Fingerprint) -> bool {
        self.address == other.address
    }
}

/// Makes fingerprints. The hash has a random key, so that nobody can make messages that look alike and are not.
#[derive(Debug, Default)]
pub(crate) struct Fingerprints {
    hasher: RandomState,
}

impl Fingerprints {
    #[inline]
    pub(crate) fn of(
        &self,
        exchange: &str,
        routing_key: &str,
        properties: &Properties<'_>,
        body: &[u8],
    ) -> Fingerprint {
        let address = self.hasher.hash_one((exchange, routing_key));
        let content = match &properties.message_id {
            Some(id) => self.hasher.hash_one(id.as_bytes()),
            None => {
                let ends = body.len().min(BODY_ENDS);
                let ends = (&body[..ends], &body[body.len() - ends..]);
                self.hasher.hash_one((body.len(), ends, self.headers(properties)))
            }
        };
        Fingerprint { address, content }
    }

    pub(crate) fn of_returned(&self, returned: &super::Returned) -> Fingerprint {
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
    use crate::amqp::{ShortStr, Table, Value};

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
    fn a_message_with_an_id_is_known_by_it_alone() {
        let prints = Fingerprints::default();
        let print = |id: &'static str, priority, body: &[u8]| {
            let message_id = Some(ShortStr::from_static(id));
            prints.of(
                "x",
                "key",
                &Properties { message_id, priority, ..Properties::default() },
                body,
            )
        };
        assert_eq!(print("1", None, b"a"), print("1", Some(5), b"b"));
        assert_ne!(print("1", None, b"a"), print("2", None, b"a"));
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
        assert!(!print("ab", "c").has_address_of(print("a", "bc")));
    }
}
