//! Message ids: made once per message, and the same however often it is sent.

use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::amqp::ShortStr;
use crate::random;

/// Room for an id.
pub(super) const ROOM: usize = 40;

/// Makes ids that nobody else has: 16 hexadecimal digits by chance, and a count.
#[derive(Debug)]
pub(super) struct Ids {
    prefix: [u8; 17],
    count: AtomicU64,
}

impl Ids {
    pub(super) fn new() -> Self {
        let mut prefix = [0; 17];
        // It fits: 16 digits and a dash.
        let _ = write!(&mut prefix[..], "{:016x}-", random::number());
        Ids { prefix, count: AtomicU64::new(1) }
    }

    /// The next id, written into the buffer.
    pub(super) fn next<'b>(&self, buffer: &'b mut [u8; ROOM]) -> ShortStr<'b> {
        let mut number = self.count.fetch_add(1, Ordering::Relaxed);
        let mut start = buffer.len();
        loop {
            start -= 1;
            buffer[start] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                break;
            }
        }
        start -= self.prefix.len();
        buffer[start..start + self.prefix.len()].copy_from_slice(&self.prefix);
        ShortStr::from_bytes(&buffer[start..]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_count_up_and_differ_between_publishers() {
        let (one, other) = (Ids::new(), Ids::new());
        let id = |ids: &Ids| ids.next(&mut [0; ROOM]).to_string();
        let (first, second) = (id(&one), id(&one));
        assert_eq!(first.split_once('-').unwrap().1, "1");
        assert_eq!(second.split_once('-').unwrap().1, "2");
        assert_eq!(first.len(), 18);
        assert_ne!(first, id(&other));
    }

    #[test]
    fn the_last_id_fits() {
        let ids = Ids::new();
        ids.count.store(u64::MAX, Ordering::Relaxed);
        assert!(ids.next(&mut [0; ROOM]).to_string().ends_with("-18446744073709551615"));
    }
}
