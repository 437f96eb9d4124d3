//! All types of exchange: against the plain reference, and what they have in common.

use std::time::{Duration, Instant};

use leveret_wire::{ReplyCode, Table, Value};
use proptest::prelude::*;

use super::reference::{
    Fields, arguments, headers, headers_match, keys, patterns, table, topic_matches,
};
use super::*;

const NONE: Table<'static> = Table::new();

fn new(kind: Kind) -> Bindings<usize> {
    Bindings::new(kind, Profile::default())
}

/// Each destination once, in order.
fn routed(bindings: &Bindings<usize>, key: impl AsRef<[u8]>) -> Vec<usize> {
    routed_with(bindings, key.as_ref(), None)
}

fn routed_with(bindings: &Bindings<usize>, key: &[u8], headers: Option<&Table<'_>>) -> Vec<usize> {
    let mut found = Vec::new();
    bindings.route(key, headers, &mut found);
    found.sort_unstable();
    found.dedup();
    found
}

fn profiles() -> impl Strategy<Value = Profile> {
    prop_oneof![Just(Profile::RabbitMq3_10), Just(Profile::RabbitMq4_3)]
}

proptest! {
    #[test]
    fn a_topic_exchange_routes_as_the_reference_does(
        bound in prop::collection::vec((patterns(usize::MAX), any::<bool>()), 0..40),
        keys in prop::collection::vec(keys(), 1..20),
    ) {
        let mut topic = new(Kind::Topic);
        for (n, (pattern, _)) in bound.iter().enumerate() {
            topic.bind(pattern.as_bytes(), &NONE, n);
        }
        let expected = |key: &str, stays: fn(bool) -> bool| -> Vec<usize> {
            let matches = |n: &usize| {
                let (pattern, taken) = &bound[*n];
                stays(*taken) && topic_matches(pattern.as_bytes(), key.as_bytes())
            };
            (0..bound.len()).filter(matches).collect()
        };
        for key in &keys {
            prop_assert_eq!(routed(&topic, key), expected(key, |_| true), "key {:?}", key);
        }
        // Some are unbound again, and the others stay as they were.
        for (n, (pattern, _)) in bound.iter().enumerate().filter(|(_, (_, taken))| *taken) {
            prop_assert!(topic.unbind(pattern.as_bytes(), &NONE, n));
        }
        for key in &keys {
            prop_assert_eq!(routed(&topic, key), expected(key, |taken| !taken), "key {:?}", key);
        }
        for n in 0..bound.len() {
            topic.remove_destination(n);
        }
        let Routes::Topic(tree) = &topic.routes else { unreachable!() };
        prop_assert!(tree.is_bare());
    }

    #[test]
    fn a_headers_exchange_routes_as_the_reference_does(
        profile in profiles(),
        bound in prop::collection::vec((arguments(), any::<bool>()), 0..20),
        messages in prop::collection::vec(headers(), 1..20),
    ) {
        let mut exchange = Bindings::new(Kind::Headers, profile);
        for (n, (arguments, _)) in bound.iter().enumerate() {
            exchange.bind(b"", &table(arguments), n);
        }
        let expected = |headers: &Fields, stays: fn(bool) -> bool| -> Vec<usize> {
            let matches = |n: &usize| {
                let (arguments, taken) = &bound[*n];
                stays(*taken) && headers_match(arguments, headers, profile)
            };
            (0..bound.len()).filter(matches).collect()
        };
        for headers in &messages {
            let found = routed_with(&exchange, b"", Some(&table(headers)));
            prop_assert_eq!(found, expected(headers, |_| true), "headers {:?}", headers);
        }
        for (n, (arguments, _)) in bound.iter().enumerate().filter(|(_, (_, taken))| *taken) {
            prop_assert!(exchange.unbind(b"", &table(arguments), n));
        }
        for headers in &messages {
            let found = routed_with(&exchange, b"", Some(&table(headers)));
            prop_assert_eq!(found, expected(headers, |taken| !taken), "headers {:?}", headers);
        }
    }
}

#[test]
fn a_direct_exchange_routes_by_the_whole_key() {
    let mut direct = new(Kind::Direct);
    direct.bind(b"a.b", &NONE, 1);
    direct.bind(b"a.b", &NONE, 2);
    direct.bind(b"", &NONE, 3);
    direct.bind(b"\xff", &NONE, 4);
    assert_eq!(routed(&direct, "a.b"), [1, 2]);
    assert_eq!(routed(&direct, ""), [3]);
    assert_eq!(routed(&direct, b"\xff"), [4]);
    assert!(routed(&direct, "a").is_empty());
}

#[test]
fn a_fanout_exchange_routes_to_all() {
    let mut fanout = new(Kind::Fanout);
    fanout.bind(b"a", &NONE, 1);
    fanout.bind(b"b", &NONE, 1);
    fanout.bind(b"", &NONE, 2);
    assert_eq!(routed(&fanout, "anything"), [1, 2]);
    assert!(fanout.unbind(b"a", &NONE, 1));
    assert_eq!(routed(&fanout, ""), [1, 2]);
    assert!(fanout.unbind(b"b", &NONE, 1));
    assert_eq!(routed(&fanout, ""), [2]);
}

#[test]
fn words_are_bytes_and_empty_words_are_words() {
    let mut topic = new(Kind::Topic);
    for (n, pattern) in [&b""[..], b"*", b"*.*", b"a..b", b"\xff.*", b".#"].into_iter().enumerate()
    {
        topic.bind(pattern, &NONE, n);
    }
    assert_eq!(routed(&topic, ""), [0]);
    assert_eq!(routed(&topic, "."), [2, 5]);
    assert_eq!(routed(&topic, "a."), [2]);
    assert_eq!(routed(&topic, "a..b"), [3]);
    assert_eq!(routed(&topic, b"\xff.\x00"), [2, 4]);
}

#[test]
fn many_wildcards_and_words_do_not_multiply() {
    let mut topic = new(Kind::Topic);
    // Patterns that share nothing but their nature, up to the longest key there is.
    for n in 1..=60 {
        topic.bind("#.a.".repeat(n).as_bytes(), &NONE, n);
        topic.bind("#.*.".repeat(n).as_bytes(), &NONE, 100 + n);
        topic.bind(format!("{}b", "#.a.*.".repeat(n.min(40))).as_bytes(), &NONE, 200 + n);
    }
    let key = ["a"; 128].join(".");
    let start = Instant::now();
    for _ in 0..100 {
        assert!(routed(&topic, &key).is_empty());
    }
    assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
}

#[test]
fn bindings_are_told_apart_by_key_destination_and_arguments() {
    for kind in Kind::ALL {
        let mut bindings = new(kind);
        let one = Table::from_pairs([("a", 1i32.into()), ("b", 2i32.into())]).unwrap();
        let reordered = Table::from_pairs([("b", 2i32.into()), ("a", 1i32.into())]).unwrap();
        let wider = Table::from_pairs([("a", 1i64.into()), ("b", 2i32.into())]).unwrap();
        assert_eq!(bindings.bind(b"k", &one, 1), Bound::Made);
        assert_eq!(bindings.bind(b"k", &reordered, 1), Bound::Existed);
        assert_eq!(bindings.bind(b"k", &wider, 1), Bound::Made);
        assert_eq!(bindings.bind(b"k", &NONE, 1), Bound::Made);
        assert_eq!(bindings.bind(b"", &one, 1), Bound::Made);
        assert_eq!(bindings.bind(b"k", &one, 2), Bound::Made);
        assert_eq!(bindings.iter().count(), 5);

        assert!(!bindings.unbind(b"k", &wider, 2));
        assert!(bindings.unbind(b"k", &reordered, 1));
        assert!(!bindings.unbind(b"k", &one, 1));
        assert!(routed_with(&bindings, b"k", Some(&one)).contains(&1), "{kind:?}");
        assert_eq!(bindings.iter().count(), 4);
        assert_eq!(bindings.remove_destination(1), 3);
        assert_eq!(bindings.remove_destination(1), 0);
        assert_eq!(routed_with(&bindings, b"k", Some(&one)), [2]);
        let last = bindings.iter().next().unwrap();
        assert_eq!((last.key, last.arguments, last.destination), (&b"k"[..], &one, 2));
        assert!(bindings.unbind(b"k", &one, 2) && bindings.is_empty());
    }
}

#[test]
fn one_argument_spelled_in_two_ways_is_the_same() {
    // As RabbitMQ reads them, `L` is `l`, and whatever is not 0 is true.
    let spelled = |long: &[u8], truth: u8| {
        let inner = [b"\x01k", long, &7u64.to_be_bytes()].concat();
        let length = (inner.len() as u32).to_be_bytes();
        let bytes = [b"\x01aF", &length[..], &inner, b"\x01bt", &[truth]].concat();
        Table::decode(&bytes).unwrap().into_owned()
    };
    let mut direct = new(Kind::Direct);
    assert_eq!(direct.bind(b"", &spelled(b"l", 1), 1), Bound::Made);
    assert_eq!(direct.bind(b"", &spelled(b"L", 2), 1), Bound::Existed);
}

#[test]
fn types_have_names() {
    for kind in Kind::ALL {
        assert_eq!(Kind::parse(kind.name().as_bytes()), Some(kind));
    }
    assert_eq!(Kind::parse(b"x-random"), None);
}

#[test]
fn an_unknown_x_match_is_refused() {
    let refused = |value: Value<'static>| {
        let arguments = Table::from_pairs([("x-match", value)]).unwrap();
        for kind in [Kind::Direct, Kind::Fanout, Kind::Topic] {
            assert_eq!(validate(kind, Profile::RabbitMq4_3, b"", &arguments), Ok(()));
        }
        validate(Kind::Headers, Profile::RabbitMq4_3, b"", &arguments).err()
    };
    for mode in ["all", "any", "all-with-x", "any-with-x"] {
        assert_eq!(refused(mode.into()), None);
    }
    let refusal = refused("none".into()).unwrap();
    assert_eq!(refusal.code, ReplyCode::PRECONDITION_FAILED);
    assert_eq!(
        refusal.text,
        "PRECONDITION_FAILED - Invalid x-match field value <<\"none\">>; \
         expected all, any, all-with-x, or any-with-x"
    );
    assert_eq!(
        refused(1.into()).unwrap().text,
        "PRECONDITION_FAILED - Invalid x-match field type signedint (value 1); expected longstr"
    );
}

#[test]
fn a_third_hash_is_refused_by_4_3_alone() {
    let check = |profile, key: &str| validate(Kind::Topic, profile, key.as_bytes(), &NONE);
    assert_eq!(check(Profile::RabbitMq4_3, "#.a.#.b#.##"), Ok(()));
    assert_eq!(check(Profile::RabbitMq3_10, "#.#.#"), Ok(()));
    assert_eq!(
        check(Profile::RabbitMq4_3, "#.a.#.#").unwrap_err().text,
        "PRECONDITION_FAILED - Topic binding key '#.a.#.#' uses 3 '#' wildcards, at most 2 are allowed"
    );
}
