//! Message ids: made once per message, and the same however often it is sent.

use std::io::Write as _;

use crate::amqp::ShortStr;
use crate::random;

/// What precedes the count: 16 digits and a dash.
const PREFIX: usize = 17;

/// Room for an id: more digits than anyone can count.
const ROOM: usize = 40;

/// Makes ids that nobody else has: 16 hexadecimal digits by chance, and a count.
#[derive(Debug)]
pub(super) struct Ids {
    /// The last one.
    text: [u8; ROOM],
    len: usize,
}

impl Ids {
    pub(super) fn new() -> Self {
        let mut text = [0; ROOM];
        // It fits.
        let _ = write!(&mut text[..], "{:016x}-0", random::number());
        Ids { text, len: PREFIX + 1 }
    }

    /// The next id: counts up in the text itself, as one does on paper.
    #[inline]
    pub(super) fn next(&mut self) -> ShortStr<'_> {
        let mut end = self.len;
        // The dash, at the latest, is no nine.
        while self.text[end - 1] == b'9' {
            end -= 1;
            self.text[end] = b'0';
        }
        if end == PREFIX {
            // One digit more.
            self.text[PREFIX] = b'1';
            self.text[self.len] = b'0';
            self.len += 1;
        } else {
            self.text[end - 1] += 1;
        }
        ShortStr::from_bytes(&self.text[..self.len]).unwrap_or_default()
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
        ids.text[PREFIX..][..last.len()].copy_from_slice(last);
        ids.len = PREFIX + last.len();
        assert!(ids.next().to_string().ends_with("-18446744073709551615"));
    }
}
