//! Fanout exchanges: every message goes to all.

use super::take_out;

#[derive(Debug)]
pub(super) struct Fanout<D> {
    /// Once per binding: one that is bound with two keys is here twice.
    destinations: Vec<D>,
}

impl<D: Copy + Eq> Fanout<D> {
    pub(super) fn new() -> Self {
        Fanout { destinations: Vec::new() }
    }

    pub(super) fn add(&mut self, destination: D) {
        self.destinations.push(destination);
    }

    pub(super) fn remove(&mut self, destination: D) {
        take_out(&mut self.destinations, destination);
    }

    #[inline]
    pub(super) fn route(&self, found: &mut Vec<D>) {
        found.extend_from_slice(&self.destinations);
    }
}
