//! Heads: what is kept of a message besides its body, until it is confirmed.

use crate::amqp::{EncodeProperties, EncodedProperties, Properties};

/// How much memory for heads stays when there are none.
const KEEP: usize = 256 * 1024;

/// The heads of the messages of a book, in the order of publishing: for each its properties as they go on the wire, and
/// then its routing key.
///
/// They are in one piece of memory, which is used again and again: no message costs an allocation.
#[derive(Debug, Default)]
pub(super) struct Heads {
    bytes: Vec<u8>,
    /// How many bytes there were before these.
    before: u64,
}

/// Where a head is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    start: u64,
    routing_key: u64,
    end: u64,
}

impl Heads {
    /// Adds a head after the others.
    #[inline]
    pub(super) fn add(&mut self, properties: &impl EncodeProperties, routing_key: &str) -> Place {
        let start = self.end();
        properties.encode(&mut self.bytes);
        self.add_key(start, routing_key)
    }

    /// Adds one that was taken out.
    pub(super) fn add_again(&mut self, head: &Head) -> Place {
        let start = self.end();
        self.bytes.extend_from_slice(&head.properties);
        self.add_key(start, &head.routing_key)
    }

    #[inline]
    fn add_key(&mut self, start: u64, routing_key: &str) -> Place {
        let properties_end = self.end();
        self.bytes.extend_from_slice(routing_key.as_bytes());
        Place { start, routing_key: properties_end, end: self.end() }
    }

    fn end(&self) -> u64 {
        self.before + self.bytes.len() as u64
    }

    /// Takes out the one that was added last.
    pub(super) fn take_last(&mut self, place: Place) -> Head {
        let head = self.copy(place);
        self.bytes.truncate(self.index(place.start));
        head
    }

    pub(super) fn copy(&self, place: Place) -> Head {
        Head {
            properties: self.properties_bytes(place).to_vec(),
            routing_key: self.routing_key(place).to_owned(),
        }
    }

    fn index(&self, at: u64) -> usize {
        (at - self.before) as usize
    }

    #[inline]
    fn properties_bytes(&self, place: Place) -> &[u8] {
        &self.bytes[self.index(place.start)..self.index(place.routing_key)]
    }

    #[inline]
    pub(super) fn properties(&self, place: Place) -> EncodedProperties<'_> {
        EncodedProperties::new(self.properties_bytes(place))
    }

    pub(super) fn decoded(&self, place: Place) -> Properties<'_> {
        // They were encoded here.
        Properties::decode(self.properties_bytes(place)).unwrap_or_default()
    }

    pub(super) fn routing_key(&self, place: Place) -> &str {
        let key = &self.bytes[self.index(place.routing_key)..self.index(place.end)];
        // It was a `str`.
        std::str::from_utf8(key).unwrap_or_default()
    }

    /// Forgets all before this one; if there is none, all.
    #[inline]
    pub(super) fn forget_before(&mut self, first: Option<Place>) {
        let spent = first.map_or(self.bytes.len(), |first| self.index(first.start));
        // What is moved then is no more than what is forgotten.
        if 2 * spent >= self.bytes.len() {
            self.bytes.drain(..spent);
            self.before += spent as u64;
        }
        if self.bytes.is_empty() && self.bytes.capacity() > KEEP {
            self.bytes = Vec::new();
        }
    }
}

/// One head, on its own.
#[derive(Clone, Debug)]
pub(super) struct Head {
    properties: Vec<u8>,
    pub(super) routing_key: String,
}

#[cfg(test)]
impl Head {
    fn properties(&self) -> Properties<'_> {
        Properties::decode(&self.properties).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties(id: &str) -> Properties<'_> {
        Properties { message_id: Some(id.try_into().unwrap()), ..Properties::default() }
    }

    #[test]
    fn heads_stay_readable_while_older_ones_are_forgotten() {
        let mut heads = Heads::default();
        let mut places = std::collections::VecDeque::new();
        for number in 0..1000u32 {
            let (id, key) = (format!("id {number}"), format!("key {number}"));
            places.push_back((id.clone(), key.clone(), heads.add(&properties(&id), &key)));
            if places.len() > (number % 7) as usize {
                places.pop_front();
                heads.forget_before(places.front().map(|(_, _, place)| *place));
            }
            for (id, key, place) in &places {
                let head = heads.copy(*place);
                assert_eq!(head.properties(), properties(id));
                assert_eq!((&head.routing_key, heads.routing_key(*place)), (key, key.as_str()));
            }
            assert!(heads.bytes.len() < 500, "{} bytes for 7 heads", heads.bytes.len());
        }
    }

    #[test]
    fn what_is_taken_out_can_be_added_again() {
        let mut heads = Heads::default();
        let first = heads.add(&properties("1"), "one");
        let second = heads.add(&properties("2"), "two");
        let head = heads.take_last(second);
        let third = heads.add(&properties("3"), "three");
        let second = heads.add_again(&head);
        let keys = [first, third, second].map(|place| heads.routing_key(place).to_owned());
        assert_eq!(keys, ["one", "three", "two"]);
        assert_eq!(heads.copy(second).properties(), properties("2"));
    }

    #[test]
    fn the_memory_of_very_large_heads_is_given_back() {
        let mut heads = Heads::default();
        heads.add(&Properties::default(), &"k".repeat(2 * KEEP));
        heads.forget_before(None);
        assert_eq!(heads.bytes.capacity(), 0);
    }
}
