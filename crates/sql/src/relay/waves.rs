//! Which messages of a batch may be under way at the same time.

use std::collections::{HashMap, VecDeque};

use super::Order;
use crate::dialect::Row;

/// The rows of a batch, in waves: when the messages of one have their outcome, the next is sent. No wave has two messages of
/// the same key.
#[derive(Debug)]
pub(super) struct Waves {
    first: Vec<Row>,
    /// What follows the first of each key.
    keys: HashMap<String, VecDeque<Row>>,
}

impl Waves {
    pub(super) fn new(rows: Vec<Row>, order: Order) -> Self {
        let mut waves = Waves { first: Vec::with_capacity(rows.len()), keys: HashMap::new() };
        for row in rows {
            match &row.ordering_key {
                Some(key) if order == Order::Strict => match waves.keys.get_mut(key) {
                    Some(later) => later.push_back(row),
                    None => {
                        waves.keys.insert(key.clone(), VecDeque::new());
                        waves.first.push(row);
                    }
                },
                _ => waves.first.push(row),
            }
        }
        waves
    }

    /// The next wave, empty if there is none.
    pub(super) fn next(&mut self) -> Vec<Row> {
        if !self.first.is_empty() {
            return std::mem::take(&mut self.first);
        }
        let mut wave: Vec<Row> = self.keys.values_mut().filter_map(VecDeque::pop_front).collect();
        self.keys.retain(|_, later| !later.is_empty());
        wave.sort_by_key(|row| row.id);
        wave
    }

    /// What follows of this key is not sent now.
    pub(super) fn hold(&mut self, key: Option<&str>) {
        if let Some(key) = key {
            self.keys.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: i64, key: &str) -> Row {
        Row {
            id,
            ordering_key: Some(key.to_owned()).filter(|key| !key.is_empty()),
            exchange: String::new(),
            routing_key: String::new(),
            mandatory: true,
            properties: Vec::new(),
            body: Vec::new(),
            attempts: 0,
            age: 0.0,
        }
    }

    fn rows() -> Vec<Row> {
        let keys = ["a", "b", "", "a", "", "c", "a", "b"];
        keys.iter().enumerate().map(|(id, key)| row(id as i64, key)).collect()
    }

    fn ids(wave: Vec<Row>) -> Vec<i64> {
        wave.into_iter().map(|row| row.id).collect()
    }

    #[test]
    fn no_wave_has_two_of_a_key() {
        let mut waves = Waves::new(rows(), Order::Strict);
        let all: Vec<Vec<i64>> = (0..4).map(|_| ids(waves.next())).collect();
        assert_eq!(all, [vec![0, 1, 2, 4, 5], vec![3, 7], vec![6], vec![]]);
    }

    #[test]
    fn what_is_pipelined_is_one_wave() {
        let mut waves = Waves::new(rows(), Order::Pipelined);
        assert_eq!(ids(waves.next()), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(waves.next().is_empty());
    }

    #[test]
    fn a_key_that_is_held_goes_no_further() {
        let mut waves = Waves::new(rows(), Order::Strict);
        waves.next();
        waves.hold(Some("a"));
        waves.hold(None);
        assert_eq!(ids(waves.next()), [7]);
        assert!(waves.next().is_empty());
    }
}
