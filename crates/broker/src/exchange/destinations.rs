//! Where the bindings of one key lead.

use std::collections::hash_map::Entry;
use std::hash::Hash;

use foldhash::{HashMap, HashMapExt};

/// From here on an index says where each destination is: clients decide how many there are, and in which order they unbind
/// them. Most keys have one.
const FEW: usize = 32;

/// The destinations of some bindings, in no particular order.
#[derive(Debug)]
pub(super) struct Destinations<D> {
    /// While there are few, one for each binding; each once as soon as there is an index.
    list: Vec<D>,
    index: Option<Box<HashMap<D, Place>>>,
}

#[derive(Debug)]
struct Place {
    at: usize,
    /// How many bindings lead there.
    bindings: usize,
}

impl<D> Destinations<D> {
    pub(super) fn new() -> Self {
        Destinations { list: Vec::new(), index: None }
    }

    #[inline]
    pub(super) fn as_slice(&self) -> &[D] {
        &self.list
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

impl<D: Copy + Eq + Hash> Destinations<D> {
    pub(super) fn add(&mut self, destination: D) {
        if self.index.is_none() && self.list.len() < FEW {
            return self.list.push(destination);
        }
        if self.index.is_none() {
            self.index = Some(Box::new(HashMap::new()));
            std::mem::take(&mut self.list).into_iter().for_each(|one| self.add(one));
        }
        let Some(index) = &mut self.index else { return };
        match index.entry(destination) {
            Entry::Occupied(mut place) => place.get_mut().bindings += 1,
            Entry::Vacant(place) => {
                place.insert(Place { at: self.list.len(), bindings: 1 });
                self.list.push(destination);
            }
        }
    }

    /// Takes out what one `add` brought in.
    pub(super) fn remove(&mut self, destination: D) {
        let at = match &mut self.index {
            None => self.list.iter().position(|one| *one == destination),
            Some(index) => match index.entry(destination) {
                Entry::Vacant(_) => None,
                Entry::Occupied(mut place) => {
                    place.get_mut().bindings -= 1;
                    (place.get().bindings == 0).then(|| place.remove().at)
                }
            },
        };
        let Some(at) = at else { return };
        self.list.swap_remove(at);
        if let Some(index) = &mut self.index
            && let Some(place) = self.list.get(at).and_then(|moved| index.get_mut(moved))
        {
            place.at = at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_there_until_its_last_binding_is_removed() {
        for count in [FEW / 2, 10 * FEW] {
            let mut destinations = Destinations::new();
            for number in 0..count {
                destinations.add(number);
                destinations.add(number);
            }
            let there = |destinations: &Destinations<usize>| {
                let mut list = destinations.as_slice().to_vec();
                list.sort_unstable();
                list.dedup();
                list
            };
            (0..count).for_each(|number| destinations.remove(number));
            assert_eq!(there(&destinations), (0..count).collect::<Vec<_>>());
            (0..count).step_by(2).for_each(|number| destinations.remove(number));
            assert_eq!(there(&destinations), (1..count).step_by(2).collect::<Vec<_>>());
            (1..count).step_by(2).for_each(|number| destinations.remove(number));
            destinations.remove(0);
            assert!(destinations.is_empty());
        }
    }

    #[test]
    fn many_bindings_to_one_destination_are_one_place() {
        let mut destinations = Destinations::new();
        (0..10_000).for_each(|_| destinations.add("q"));
        assert_eq!(destinations.as_slice(), ["q"]);
    }
}
