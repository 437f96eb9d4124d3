//! Fanout exchanges: every message goes to all.

use std::hash::Hash;

use super::destinations::Destinations;

#[derive(Debug)]
pub(super) struct Fanout<D> {
    destinations: Destinations<D>,
}

impl<D: Copy + Eq + Hash> Fanout<D> {
    pub(super) fn new() -> Self {
        Fanout { destinations: Destinations::new() }
    }

    pub(super) fn add(&mut self, destination: D) {
        self.destinations.add(destination);
    }

    pub(super) fn remove(&mut self, destination: D) {
        self.destinations.remove(destination);
    }

    #[inline]
    pub(super) fn route(&self, found: &mut Vec<D>) {
        found.extend_from_slice(self.destinations.as_slice());
    }
}
