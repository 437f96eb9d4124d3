//! Message ids: made once per message, and the same however often it is sent.

use std::io::Write as _;

use crate::amqp::ShortStr;
use crate::random;

/// What precedes the count: 16 digits and a dash.
const PREFIX: usize = 17;

/// Room for an id: more digits than anyone can count.
const ROOM: usize = 40;

/// Makes ids that nobody else has: 16 hexadecimal digits by chance, and a count.
///
/// Each is made while the one before it is given out, in the other of two places: text that was just written in parts takes
/// several times as long to read.
#[derive(Debug)]
pub(super) struct Ids {
    texts: [Text; 2],
    /// The one that is given out next.
    next: usize,
}

#[derive(Clone, Copy, Debug)]
struct Text {
    bytes: [u8; ROOM],
    len: usize,
}

impl Ids {
    pub(super) fn new() -> Self {
        let mut bytes = [0; ROOM];
        // It fits.
        let _ = write!(&mut bytes[..], "{:016x}-1", random::number());
        let first = Text { bytes, len: PREFIX + 1 };
        Ids { texts: [first, first], next: 0 }
    }

    /// The next id.
    #[inline]
    pub(super) fn next(&mut self) -> ShortStr<'_> {
        let [even, odd] = &mut self.texts;
        let (given, after) = if self.next == 0 { (even, odd) } else { (odd, even) };
        self.next ^= 1;
        given.count_up(after);
        ShortStr::from_bytes(&given.bytes[..given.len]).unwrap_or_default()
    }
}

impl Text {
    /// Writes the next one: counts up in the text itself, as one does on paper.
    #[inline]
    fn count_up(&self, next: &mut Text) {
        *next = *self;
        let mut end = self.len;
        // The dash, at the latest, is no nine.
        while self.bytes[end - 1] == b'9' {
            end -= 1;
            next.bytes[end] = b'0';
        }
        if end == PREFIX {
            // One digit more.
            next.bytes[PREFIX] = b'1';
            next.bytes[self.len] = b'0';
            next.len += 1;
        } else {
            next.bytes[end - 1] = self.bytes[end - 1] + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_count_up_and_differ_between_publishers() {
        let mut ids = Ids::new();
        let first = ids.next().to_string();
        let (prefix, one) = first.split_once('-').unwrap();
        assert_eq!((prefix.len(), one), (16, "1"));
        for number in 2..=10_001 {
            assert_eq!(ids.next().to_string(), format!("{prefix}-{number}"));
        }
        assert_ne!(first, Ids::new().next().to_string());
    }

    #[test]
    fn the_last_id_fits() {
        let mut ids = Ids::new();
        let last = b"18446744073709551614";
        let text = &mut ids.texts[0];
        text.bytes[PREFIX..][..last.len()].copy_from_slice(last);
        text.len = PREFIX + last.len();
        assert!(ids.next().to_string().ends_with("-18446744073709551614"));
        assert!(ids.next().to_string().ends_with("-18446744073709551615"));
    }
}
