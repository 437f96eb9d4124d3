//! What a message that came back is known by, since it carries no number: how it looks.

use std::collections::VecDeque;
use std::hash::BuildHasher;

use foldhash::quality::RandomState;
use leveret_wire::{PlainProperties, Properties, ShortStr, Table};

use super::Returned;
use crate::amqp::channel::DIRECT_REPLIES;
use crate::amqp::publish::Prepared;

/// How much of either end of a body is looked at.
const BODY_ENDS: usize = 128;

/// How a message looks: hashes, so that no body is kept in memory for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    /// Exchange and routing key.
    address: u64,
    /// The message id, which no broker alters; 0 if there is none.
    id: u64,
    /// Length and both ends: two bodies that differ in their midst alone, to the same address with the same
    /// properties, are told apart by their order.
    body: u64,
    properties: u64,
}

/// Looks at messages. Quick, because every mandatory publish is looked at; with a key of its own, so that nobody can
/// make messages that look alike and are not.
#[derive(Debug)]
pub(in crate::amqp) struct Looks {
    hasher: RandomState,
}

impl Looks {
    pub(super) fn new() -> Self {
        Looks { hasher: RandomState::default() }
    }

    #[inline]
    pub(in crate::amqp) fn of(&self, publish: Prepared<'_, impl Visible>) -> Look {
        let address = (publish.exchange.as_bytes(), publish.routing_key.as_bytes());
        self.look(address, publish.properties, publish.body)
    }

    pub(super) fn of_returned(&self, returned: &Returned) -> Look {
        let address = (returned.exchange.as_bytes(), returned.routing_key.as_bytes());
        self.look(address, &returned.properties.get(), &returned.body)
    }

    #[inline]
    fn look(&self, address: (&[u8], &[u8]), properties: &impl Visible, body: &[u8]) -> Look {
        let ends = body.len().min(BODY_ENDS);
        let seen = properties.seen();
        Look {
            address: self.hasher.hash_one(address),
            id: seen.id.map_or(0, |id| self.hasher.hash_one(id)),
            body: self.hasher.hash_one((body.len(), &body[..ends], &body[body.len() - ends..])),
            properties: self.properties(seen),
        }
    }

    /// All but the id. The same whatever the order of the headers: RabbitMQ 4.3 sorts them.
    #[inline]
    fn properties(&self, Seen { text, numbers, headers, .. }: Seen<'_>) -> u64 {
        let headers = headers.map_or(0, |headers| {
            let fields = headers.encoded_fields().map(|field| self.hasher.hash_one(field));
            fields.fold(1, u64::wrapping_add)
        });
        self.hasher.hash_one((text, numbers, headers))
    }
}

/// Properties that a message may be known by.
pub(crate) trait Visible {
    fn seen(&self) -> Seen<'_>;
}

/// What is looked at of them.
#[derive(Default)]
pub(crate) struct Seen<'p> {
    id: Option<&'p ShortStr<'p>>,
    text: [Option<&'p ShortStr<'p>>; 9],
    /// Delivery mode, priority and timestamp.
    numbers: (Option<u8>, Option<u8>, Option<u64>),
    headers: Option<&'p Table<'p>>,
}

impl Visible for Properties<'_> {
    fn seen(&self) -> Seen<'_> {
        // The broker writes its address for direct replies in place of their name.
        let is_direct =
            |name: &&ShortStr<'_>| name.as_bytes().starts_with(DIRECT_REPLIES.as_bytes());
        Seen {
            id: self.message_id.as_ref(),
            text: [
                self.content_type.as_ref(),
                self.content_encoding.as_ref(),
                self.correlation_id.as_ref(),
                self.reply_to.as_ref().filter(|name| !is_direct(name)),
                self.expiration.as_ref(),
                self.kind.as_ref(),
                self.user_id.as_ref(),
                self.app_id.as_ref(),
                self.cluster_id.as_ref(),
            ],
            numbers: (self.delivery_mode, self.priority, self.timestamp),
            headers: self.headers.as_ref(),
        }
    }
}

impl Visible for PlainProperties<'_> {
    #[inline]
    fn seen(&self) -> Seen<'_> {
        Seen {
            id: Some(&self.message_id),
            numbers: (self.delivery_mode, None, self.timestamp),
            ..Seen::default()
        }
    }
}

/// The mandatory publishes that may yet come back, by number, oldest first.
#[derive(Debug, Default)]
pub(super) struct Mandatory {
    known: VecDeque<(u64, Look)>,
}

impl Mandatory {
    #[inline]
    pub(super) fn add(&mut self, number: u64, look: Look) {
        self.known.push_back((number, look));
    }

    /// Finds and takes out the publish that came back.
    ///
    /// Returns come in the order of the publishes, so it is the oldest one that looks the same and is not answered.
    /// Should the broker have altered the message (it does to some properties), id and body, or one of them, have to do; or
    /// the address alone: it is one of ours, and must not be taken for delivered.
    pub(super) fn take(&mut self, look: Look, is_answered: impl Fn(u64) -> bool) -> Option<u64> {
        let oldest = |same: &dyn Fn(&Look) -> bool| {
            self.known.iter().position(|(number, one)| {
                one.address == look.address && same(one) && !is_answered(*number)
            })
        };
        let same_id = |one: &Look| one.id == look.id;
        let same_body = |one: &Look| one.body == look.body;
        let same_properties = |one: &Look| one.properties == look.properties;
        let index = oldest(&|one| same_id(one) && same_body(one) && same_properties(one))
            .or_else(|| oldest(&|one| same_id(one) && same_body(one)))
            .or_else(|| oldest(&|one| look.id != 0 && same_id(one)))
            .or_else(|| oldest(&same_body))
            .or_else(|| oldest(&|_| true))?;
        self.known.remove(index).map(|(number, _)| number)
    }

    /// Forgets the oldest ones as far as they are answered.
    pub(super) fn forget(&mut self, is_answered: impl Fn(u64) -> bool) {
        while self.known.front().is_some_and(|(number, _)| is_answered(*number)) {
            self.known.pop_front();
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::Value;

    #[test]
    fn the_order_of_headers_does_not_matter() {
        let looks = Looks::new();
        let look = |pairs: [(&str, Value<'_>); 2]| {
            let headers = Some(Table::from_pairs(pairs).unwrap());
            looks.properties(Properties { headers, ..Properties::default() }.seen())
        };
        assert_eq!(
            look([("a", 1.into()), ("b", 2.into())]),
            look([("b", 2.into()), ("a", 1.into())])
        );
        assert_ne!(
            look([("a", 1.into()), ("b", 2.into())]),
            look([("a", 2.into()), ("b", 1.into())])
        );
    }

    #[test]
    fn the_address_of_direct_replies_may_be_written_in_full_by_the_broker() {
        let looks = Looks::new();
        let look = |reply_to: &'static str| {
            let reply_to = Some(reply_to.try_into().unwrap());
            looks.properties(Properties { reply_to, ..Properties::default() }.seen())
        };
        assert_eq!(look("amq.rabbitmq.reply-to"), look("amq.rabbitmq.reply-to.g1h2.a1=="));
        assert_ne!(look("mine"), look("yours"));
    }

    #[test]
    fn plain_properties_look_as_the_others_do() {
        let (looks, id) = (Looks::new(), ShortStr::from_static("id"));
        let (delivery_mode, timestamp) = (Some(2), Some(7));
        let plain = PlainProperties { delivery_mode, message_id: id.clone(), timestamp };
        let message_id = Some(id);
        let whole = Properties { delivery_mode, message_id, timestamp, ..Properties::default() };
        assert_eq!(plain.seen().id, whole.seen().id);
        assert_eq!(looks.properties(plain.seen()), looks.properties(whole.seen()));
    }

    #[test]
    fn a_body_is_known_by_its_length_and_both_ends() {
        let looks = Looks::new();
        let look = |body: &[u8]| looks.look((b"x", b"key"), &Properties::default(), body).body;
        let long = [b'a'; 1000];
        let (mut begins, mut ends) = (long, long);
        begins[0] = b'b';
        ends[999] = b'b';
        assert_eq!(look(&long), look(&long));
        for other in [&begins[..], &ends, &long[1..], b""] {
            assert_ne!(look(&long), look(other));
        }
    }

    #[test]
    fn neither_name_runs_into_the_other() {
        let looks = Looks::new();
        let look =
            |address: (&[u8], &[u8])| looks.look(address, &Properties::default(), b"").address;
        assert_ne!(look((b"ab", b"c")), look((b"a", b"bc")));
    }
}
