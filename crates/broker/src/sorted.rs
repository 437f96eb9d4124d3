//! Lists in the order of a number, into which elements come back.

use std::collections::VecDeque;

/// How many come before a number.
fn before<T>(list: &VecDeque<T>, last: u64, number: impl Fn(&T) -> u64) -> usize {
    // None, as a rule: those in front went out first.
    match list.front() {
        Some(front) if number(front) < last => list.partition_point(|one| number(one) < last),
        _ => 0,
    }
}

/// Puts an element where its number belongs.
pub(crate) fn insert<T>(list: &mut VecDeque<T>, element: T, number: impl Fn(&T) -> u64) {
    let at = before(list, number(&element), number);
    list.insert(at, element);
}

/// Puts elements where their numbers belong. Costs what is in front of the last of them, and not that for each.
pub(crate) fn put_back<T>(
    list: &mut VecDeque<T>,
    mut elements: Vec<T>,
    number: impl Fn(&T) -> u64,
) {
    let Some(last) = elements.iter().map(&number).max() else { return };
    let before = before(list, last, &number);
    elements.extend(list.drain(..before));
    elements.sort_by_key(number);
    elements.into_iter().rev().for_each(|element| list.push_front(element));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_goes_where_its_number_belongs() {
        for (list, elements) in [
            (vec![], vec![2, 1]),
            (vec![3, 4], vec![2, 1]),
            (vec![1, 4, 9], vec![3]),
            (vec![1, 4, 6, 9], vec![7, 0, 5]),
            (vec![1, 2], vec![8, 3]),
        ] {
            let mut expected = [list.clone(), elements.clone()].concat();
            expected.sort_unstable();
            let mut together = VecDeque::from(list);
            let mut singly = together.clone();
            elements.iter().for_each(|element| insert(&mut singly, *element, |number| *number));
            put_back(&mut together, elements, |number| *number);
            assert_eq!((together, singly), (expected.clone().into(), expected.into()));
        }
    }
}
