//! The examples do what they say, with nothing but the broker in memory.

use crate::examples::example;

#[test]
fn a_retry_design_of_its_own() {
    let said = example("own_retry", &[]);
    assert!(said.contains("torn failed at attempt 3, and was parked"), "{said}");
}

#[test]
fn the_patterns_of_the_net_guide() {
    let said = example("patterns", &[]);
    assert_eq!(said.matches("deposited 50: the balance is 50").count(), 3, "{said}");
    assert!(said.contains("heard: STOCK.KO.NYSE, STOCK.IBM.NYSE, STOCK.IBM.NYSE"), "{said}");
}

#[test]
fn letters_prices_and_events() {
    assert!(example("prices", &[]).lines().count() > 1);
    // It ends with the alert, which may be heard before the last event.
    assert!(example("events", &[]).contains("events were handled"));
}
