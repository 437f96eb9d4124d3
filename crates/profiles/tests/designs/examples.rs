//! The examples do what they say, with nothing but the broker in memory.

use crate::examples::example;

#[test]
fn the_indexer_of_the_cover_art_archive() {
    let said = example("cover_art", &[]);
    assert!(
        said.contains("2 indexed, 2 tried again, 1 failed for good\ntorn.jpg: not a picture"),
        "{said}"
    );
}

#[test]
fn the_conventions_of_acapi() {
    let said = example("acapi", &[]);
    for line in
        ["heard: Ada was added, at attempt 2", "policy 17: the policy 17", "there is no policy 18"]
    {
        assert!(said.contains(line), "{said}");
    }
}

#[test]
fn the_redelivery_of_orb() {
    let said = example("orb", &[]);
    assert!(said.contains("50 anchors witnessed, 10 tries had failed"), "{said}");
}

#[test]
fn the_batches_of_chandra() {
    let said = example("chandra", &[]);
    assert!(
        said.contains("99 billed, 1 failed for good\norder 42 free: there is no price"),
        "{said}"
    );
}
