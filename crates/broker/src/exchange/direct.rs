//! Direct exchanges: the key of the message is the key of the binding.

use std::hash::Hash;

use foldhash::{HashMap, HashMapExt};

use super::destinations::Destinations;

#[derive(Debug)]
pub(super) struct Direct<D> {
    by_key: HashMap<Box<[u8]>, Destinations<D>>,
}

impl<D: Copy + Eq + Hash> Direct<D> {
    pub(super) fn new() -> Self {
        Direct { by_key: HashMap::new() }
    }

    pub(super) fn add(&mut self, key: &[u8], destination: D) {
        self.by_key.entry(key.into()).or_insert_with(Destinations::new).add(destination);
    }

    pub(super) fn remove(&mut self, key: &[u8], destination: D) {
        let Some(destinations) = self.by_key.get_mut(key) else { return };
        destinations.remove(destination);
        if destinations.is_empty() {
            self.by_key.remove(key);
        }
    }

    #[inline]
    pub(super) fn route(&self, key: &[u8], found: &mut Vec<D>) {
        if let Some(destinations) = self.by_key.get(key) {
            found.extend_from_slice(destinations.as_slice());
        }
    }
}
