//! Which numbers of 1, 2, 3… were answered, alone or as "all up to".

use std::collections::BTreeSet;

/// Exact bookkeeping of acks: each number counts once.
#[derive(Debug, Default)]
pub(crate) struct Tags {
    /// All up to this one were.
    through: u64,
    /// And these beyond it.
    ahead: BTreeSet<u64>,
}

impl Tags {
    /// How many were answered.
    pub(crate) fn count(&self) -> u64 {
        self.through + self.ahead.len() as u64
    }

    /// One was, or all up to it. False if it had been before.
    pub(crate) fn mark(&mut self, tag: u64, multiple: bool) -> bool {
        if tag <= self.through || self.ahead.contains(&tag) {
            return false;
        }
        if multiple {
            self.through = tag;
            self.ahead = self.ahead.split_off(&tag);
        } else if tag == self.through + 1 {
            self.through = tag;
        } else {
            self.ahead.insert(tag);
        }
        while self.ahead.remove(&(self.through + 1)) {
            self.through += 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_counts_once() {
        let mut tags = Tags::default();
        assert!(tags.mark(3, false));
        assert!(tags.mark(5, false));
        assert!(!tags.mark(3, false));
        assert_eq!(tags.count(), 2);
        assert!(tags.mark(4, true));
        assert_eq!(tags.count(), 5);
        assert!(!tags.mark(5, false));
        assert!(tags.mark(6, false));
        assert_eq!(tags.count(), 6);
    }
}
