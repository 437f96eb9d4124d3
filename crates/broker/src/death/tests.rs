//! What real nodes of both versions did; `tests/rabbitmq/dead_letters.rs` asks them again.

use leveret_wire::{Array, Properties, Value};

use super::*;

const BOTH: [Profile; 2] = [Profile::RabbitMq3_10, Profile::RabbitMq4_3];
const NOON: u64 = 1_000;

fn short(text: &str) -> ShortStr<'_> {
    text.try_into().unwrap()
}

fn with_headers<'a>(
    headers: impl IntoIterator<Item = (&'a str, Value<'a>)>,
) -> Properties<'static> {
    Properties { headers: Some(Table::from_pairs(headers).unwrap()), ..Properties::default() }
}

fn entry<'a>(fields: impl IntoIterator<Item = (&'a str, Value<'a>)>) -> Value<'static> {
    Table::from_pairs(fields).unwrap().into()
}

fn list<'a>(values: impl IntoIterator<Item = Value<'a>>) -> Value<'static> {
    Array::from_values(values).unwrap().into()
}

/// A message that dies again and again, by the default exchange unless said otherwise.
#[derive(Clone, Debug)]
struct Life {
    profile: Profile,
    /// As consumers get them.
    properties: RawProperties,
    /// Without its deaths.
    published: RawProperties,
    deaths: Deaths,
    exchange: &'static str,
    keys: Vec<ShortStr<'static>>,
    bcc: Vec<ShortStr<'static>>,
    time: u64,
    cycles: Vec<String>,
}

impl Life {
    fn new(profile: Profile, properties: &Properties<'_>, keys: &[&'static str]) -> Self {
        Life {
            profile,
            properties: RawProperties::from(properties),
            published: RawProperties::from(properties),
            deaths: Deaths::default(),
            exchange: "",
            keys: keys.iter().map(|key| short(key)).collect(),
            bcc: Vec::new(),
            time: NOON,
            cycles: Vec::new(),
        }
    }

    fn plain(profile: Profile) -> Self {
        Life::new(profile, &Properties::default(), &["k"])
    }

    fn dies(self, queue: &'static str, reason: Reason) -> Self {
        self.dies_with_key(queue, reason, None)
    }

    fn dies_with_key(
        mut self,
        queue: &'static str,
        reason: Reason,
        key: Option<&'static str>,
    ) -> Self {
        let key = key.map(short);
        let letter = dead_letter(
            self.profile,
            &Dying {
                properties: &self.published,
                deaths: &self.deaths,
                exchange: short(self.exchange),
                routing_keys: &self.keys,
                bcc: &self.bcc,
                failures: 1,
            },
            &Death { queue: short(queue), reason, time: self.time, routing_key: key.as_ref() },
        );
        let cycles = ["a", "b", "c", "d"].into_iter().filter(|name| letter.is_cycle(&short(name)));
        self.cycles = cycles.map(str::to_owned).collect();
        let keys = letter.routing_keys.iter().map(|key| key.clone().into_owned()).collect();
        let DeadLetter { properties: published, deaths, .. } = letter;
        let properties = deaths.told().unwrap().clone();
        Life { properties, published, deaths, keys, time: self.time + 1, ..self }
    }

    fn header(&self, name: &str) -> String {
        self.properties.header(name).map_or("none".to_owned(), |value| format!("{value:?}"))
    }

    fn x_death(&self) -> String {
        self.header("x-death")
    }

    /// Queue and count of each entry.
    fn entries(&self) -> String {
        let deaths = self.properties.header("x-death").unwrap();
        let entry = |death: Value<'_>| {
            let death = death.as_table().unwrap();
            let count = death.get("count").unwrap().as_i64().unwrap();
            format!("{}:{count}", death.get("queue").unwrap().as_str().unwrap())
        };
        deaths.as_array().unwrap().iter().map(entry).collect::<Vec<_>>().join(" ")
    }
}

/// The bytes that the nodes sent for a message with the headers `b` = 5 (written as `L`), `b` again, and `a`.
#[test]
fn headers_are_written_byte_for_byte_as_the_nodes_do() {
    const PUBLISHED: &[u8] = b"\x01bL\0\0\0\0\0\0\0\x05\x01bt\x07\x01ab\x03";
    const OF_3_10: &[u8] = b"\x01ab\x03\x01bl\x00\x00\x00\x00\x00\x00\x00\x05\x01bt\x01\x07x-deathA\x00\x00\x00lF\x00\
        \x00\x00g\x05countl\x00\x00\x00\x00\x00\x00\x00\x01\x06reasonS\x00\x00\x00\x08rejected\x05queueS\x00\x00\x00\
        \x03src\x04timeT\x00\x00\x00\x00j\xf9^\'\x08exchangeS\x00\x00\x00\x00\x0crouting-keysA\x00\x00\x00\x08S\x00\
        \x00\x00\x03src\x16x-first-death-exchangeS\x00\x00\x00\x00\x13x-first-death-queueS\x00\x00\x00\x03src\x14\
        x-first-death-reasonS\x00\x00\x00\x08rejected";
    const OF_4_3: &[u8] = b"\x01ab\x03\x01bl\x00\x00\x00\x00\x00\x00\x00\x05\x07x-deathA\x00\x00\x00lF\x00\x00\x00g\
        \x05countl\x00\x00\x00\x00\x00\x00\x00\x01\x06reasonS\x00\x00\x00\x08rejected\x05queueS\x00\x00\x00\x03src\
        \x04timeT\x00\x00\x00\x00j\xf9^\'\x08exchangeS\x00\x00\x00\x00\x0crouting-keysA\x00\x00\x00\x08S\x00\x00\x00\
        \x03src\x16x-first-death-exchangeS\x00\x00\x00\x00\x13x-first-death-queueS\x00\x00\x00\x03src\x14\
        x-first-death-reasonS\x00\x00\x00\x08rejected\x15x-last-death-exchangeS\x00\x00\x00\x00\x12x-last-death-queue\
        S\x00\x00\x00\x03src\x13x-last-death-reasonS\x00\x00\x00\x08rejected";

    for (profile, expected) in BOTH.into_iter().zip([OF_3_10, OF_4_3]) {
        let headers = Some(Table::decode(PUBLISHED).unwrap());
        let published = Properties { headers, ..Properties::default() };
        let mut life = Life::new(profile, &published, &["src"]);
        life.time = 0x6af9_5e27;
        let life = life.dies("src", Reason::Rejected);
        let headers = life.properties.get().headers.unwrap();
        assert_eq!(
            headers.as_bytes().escape_ascii().to_string(),
            expected.escape_ascii().to_string()
        );
    }
}

#[test]
fn what_lies_deeper_in_the_headers_is_respelled_too() {
    // {"t": {"a": [L:1, true as 7]}}
    const INNER: &[u8] = b"\x01tF\0\0\0\x12\x01aA\0\0\0\x0bL\0\0\0\0\0\0\0\x01t\x07";
    const RESPELLED: &[u8] = b"\x01tF\0\0\0\x12\x01aA\0\0\0\x0bl\0\0\0\0\0\0\0\x01t\x01";
    for profile in BOTH {
        let headers = Some(Table::decode(INNER).unwrap());
        let published = Properties { headers, ..Properties::default() };
        let life = Life::new(profile, &published, &["k"]).dies("a", Reason::Expired);
        let headers = life.properties.get().headers.unwrap();
        assert_eq!(&headers.as_bytes()[..RESPELLED.len()], RESPELLED);
    }
}

#[test]
fn an_expiration_is_recorded_and_taken_away_whatever_the_reason() {
    let reasons = [Reason::Rejected, Reason::Expired, Reason::MaxLen, Reason::DeliveryLimit];
    let names = ["rejected", "expired", "maxlen", "delivery_limit"];
    for (reason, name) in reasons.into_iter().zip(names) {
        let [old, new] = BOTH.map(|profile| {
            let properties = Properties {
                expiration: Some(short("+0060")),
                message_id: Some(short("id")),
                priority: Some(3),
                ..Properties::default()
            };
            let life = Life::new(profile, &properties, &["k"]).dies("a", reason);
            let left = life.properties.get();
            assert_eq!((left.expiration, left.priority), (None, Some(3)));
            assert_eq!(left.message_id, properties.message_id);
            life
        });
        assert_eq!(
            old.x_death(),
            format!(
                r#"[{{"count": 1, "reason": "{name}", "queue": "a", "time": timestamp 1000, "exchange": "", "routing-keys": ["k"], "original-expiration": "+0060"}}]"#
            )
        );
        assert_eq!(
            new.x_death(),
            format!(
                r#"[{{"original-expiration": "60", "count": 1, "reason": "{name}", "queue": "a", "time": timestamp 1000, "exchange": "", "routing-keys": ["k"]}}]"#
            )
        );
    }
}

#[test]
fn the_first_death_is_told_by_both_and_the_last_by_4_3() {
    for profile in BOTH {
        let mut life = Life::plain(profile);
        life.exchange = "x";
        let mut life = life.dies("a", Reason::Rejected);
        life.exchange = "y";
        let life = life.dies("b", Reason::Expired);
        let told = ["exchange", "queue", "reason"].map(|what| {
            let header = |which| life.header(&format!("x-{which}-death-{what}"));
            [header("first"), header("last")]
        });
        let first = [r#""x""#, r#""a""#, r#""rejected""#];
        let last = match profile {
            Profile::RabbitMq3_10 => ["none"; 3],
            Profile::RabbitMq4_3 => [r#""y""#, r#""b""#, r#""expired""#],
        };
        assert_eq!(told.clone().map(|[first, _]| first), first);
        assert_eq!(told.map(|[_, last]| last), last);
    }
}

#[test]
fn a_second_death_in_the_same_queue_for_the_same_reason_only_counts() {
    let [old, new] = BOTH.map(|profile| {
        let properties = Properties { expiration: Some(short("60")), ..Properties::default() };
        let mut life = Life::new(profile, &properties, &["k"]).dies("a", Reason::Rejected);
        life.exchange = "x";
        life.dies_with_key("a", Reason::Rejected, Some("other"))
    });
    assert_eq!(
        old.x_death(),
        r#"[{"count": 2, "exchange": "", "original-expiration": "60", "queue": "a", "reason": "rejected", "routing-keys": ["k"], "time": timestamp 1000}]"#
    );
    assert_eq!(
        new.x_death(),
        r#"[{"original-expiration": "60", "count": 2, "reason": "rejected", "queue": "a", "time": timestamp 1000, "exchange": "", "routing-keys": ["k"]}]"#
    );
    assert_eq!(new.header("x-last-death-exchange"), r#""x""#);
}

#[test]
fn the_newest_comes_first_and_3_10_turns_the_others_round() {
    let [mut old, mut new] = BOTH.map(Life::plain);
    for (queue, expected_old, expected_new) in [
        ("c1", "c1:1", "c1:1"),
        ("c2", "c2:1 c1:1", "c2:1 c1:1"),
        ("c3", "c3:1 c1:1 c2:1", "c3:1 c2:1 c1:1"),
        ("c4", "c4:1 c2:1 c1:1 c3:1", "c4:1 c3:1 c2:1 c1:1"),
        ("c5", "c5:1 c3:1 c1:1 c2:1 c4:1", "c5:1 c4:1 c3:1 c2:1 c1:1"),
        ("c2", "c2:2 c4:1 c1:1 c3:1 c5:1", "c2:2 c5:1 c4:1 c3:1 c1:1"),
        ("c3", "c3:2 c5:1 c1:1 c4:1 c2:2", "c3:2 c2:2 c5:1 c4:1 c1:1"),
    ] {
        old = old.dies(queue, Reason::Rejected);
        new = new.dies(queue, Reason::Rejected);
        assert_eq!((old.entries().as_str(), new.entries().as_str()), (expected_old, expected_new));
    }
}

#[test]
fn an_entry_beside_others_has_its_fields_sorted_in_3_10() {
    let life = Life::plain(Profile::RabbitMq3_10);
    let life = life.dies("a", Reason::Rejected).dies("b", Reason::Expired);
    assert_eq!(
        life.x_death(),
        r#"[{"count": 1, "exchange": "", "queue": "b", "reason": "expired", "routing-keys": ["k"], "time": timestamp 1001}, {"count": 1, "reason": "rejected", "queue": "a", "time": timestamp 1000, "exchange": "", "routing-keys": ["k"]}]"#
    );
}

#[test]
fn keys_of_cc_are_told_and_those_of_bcc_are_only_used() {
    for profile in BOTH {
        let cc = list(["c1".into(), 7.into(), "c2".into()]);
        let mut life =
            Life::new(profile, &with_headers([("CC", cc.clone())]), &["k", "c1", "c2", "b1"]);
        life.bcc = vec![short("b1")];
        let life = life.dies("a", Reason::Rejected);
        assert!(life.x_death().contains(r#""routing-keys": ["k", "c1", "c2"]"#));
        assert_eq!(life.keys, ["k", "c1", "c2", "b1"]);
        assert_eq!(life.header("CC"), format!("{cc:?}"));

        let keyed = life.dies_with_key("b", Reason::Rejected, Some("b1"));
        assert_eq!(keyed.keys, ["b1"]);
        let (cc, keys) = match profile {
            Profile::RabbitMq3_10 => ("none".to_owned(), r#"["b1"]"#),
            // Its key was secret once.
            Profile::RabbitMq4_3 => (format!("{cc:?}"), "[]"),
        };
        assert_eq!(keyed.header("CC"), cc);
        let last = keyed.dies("c", Reason::Rejected).x_death();
        assert_eq!(last.matches(&format!(r#""routing-keys": {keys}"#)).count(), 1, "{last}");
    }
}

#[test]
fn an_empty_dead_letter_routing_key_is_one() {
    for profile in BOTH {
        let life = Life::plain(profile).dies_with_key("a", Reason::Rejected, Some(""));
        assert_eq!(life.keys, [""]);
    }
}

#[test]
fn in_3_10_a_client_may_have_written_the_first_chapters() {
    const NEW: &str = r#"{"count": 1, "exchange": "", "queue": "a", "reason": "rejected", "routing-keys": ["k"], "time": timestamp 1000}"#;
    let ours = |more: &[(&'static str, Value<'static>)]| {
        let fields = [("queue", "a".into()), ("reason", "rejected".into())];
        entry(fields.into_iter().chain(more.iter().cloned()))
    };
    let other =
        |queue: &'static str| entry([("queue", queue.into()), ("reason", "expired".into())]);
    let counted = |count: Value<'static>| list([ours(&[("count", count)])]);
    for (claimed, expected) in [
        (list([]), format!("[{NEW}]")),
        (list([entry([])]), format!("[{NEW}, {{}}]")),
        (list([entry([]), entry([])]), format!(r#"[{NEW}, {{"count": 2}}]"#)),
        (list([other("o")]), format!(r#"[{NEW}, {{"queue": "o", "reason": "expired"}}]"#)),
        (
            list([other("o"), other("p"), other("o"), other("q")]),
            format!(
                r#"[{NEW}, {{"count": 1, "queue": "q", "reason": "expired"}}, {{"count": 1, "queue": "p", "reason": "expired"}}, {{"count": 2, "queue": "o", "reason": "expired"}}]"#
            ),
        ),
        (
            list([ours(&[("z", 1.into()), ("b", 2.into())])]),
            r#"[{"b": 2, "count": 1, "queue": "a", "reason": "rejected", "z": 1}]"#.to_owned(),
        ),
        (
            list([other("o"), ours(&[("count", 2.into())]), other("p")]),
            r#"[{"count": 3, "queue": "a", "reason": "rejected"}, {"count": 1, "queue": "p", "reason": "expired"}, {"count": 1, "queue": "o", "reason": "expired"}]"#
                .to_owned(),
        ),
        (
            list([ours(&[("n", 1.into())]), ours(&[("n", 2.into())])]),
            r#"[{"count": 3, "n": 1, "queue": "a", "reason": "rejected"}]"#.to_owned(),
        ),
        (
            list([ours(&[("count", 3.into())]), ours(&[("count", 9.into())])]),
            r#"[{"count": 4, "queue": "a", "reason": "rejected"}]"#.to_owned(),
        ),
        (counted(5u8.into()), r#"[{"count": 6, "queue": "a", "reason": "rejected"}]"#.to_owned()),
        (
            counted(i64::MAX.into()),
            format!(r#"[{{"count": {}, "queue": "a", "reason": "rejected"}}]"#, i64::MIN),
        ),
        (
            counted(Value::Void),
            r#"[{"count": 1, "count": void, "queue": "a", "reason": "rejected"}]"#.to_owned(),
        ),
        (
            list([entry([
                ("queue", Value::Bytes(b"a".as_slice().into())),
                ("reason", "rejected".into()),
                ("count", 2.into()),
            ])]),
            r#"[{"count": 3, "queue": b"a", "reason": "rejected"}]"#.to_owned(),
        ),
    ] {
        let properties = with_headers([("x-death", claimed)]);
        let life = Life::new(Profile::RabbitMq3_10, &properties, &["k"]);
        let life = life.dies("a", Reason::Rejected);
        assert_eq!(life.x_death(), expected);
        assert_eq!(life.header("x-first-death-queue"), "none");
    }
}

#[test]
fn in_3_10_an_x_death_that_is_none_is_written_anew() {
    let strange = list([entry([
        ("queue", "a".into()),
        ("reason", "rejected".into()),
        ("count", "5".into()),
    ])]);
    for claimed in [
        "mine".into(),
        Value::Void,
        entry([]),
        list(["mine".into()]),
        list([entry([]), "mine".into()]),
        strange,
    ] {
        let properties = with_headers([("x-death", claimed)]);
        let life = Life::new(Profile::RabbitMq3_10, &properties, &["k"]);
        let life = life.dies("a", Reason::Rejected);
        assert_eq!(
            life.x_death(),
            r#"[{"count": 1, "reason": "rejected", "queue": "a", "time": timestamp 1000, "exchange": "", "routing-keys": ["k"]}]"#
        );
        assert_eq!(life.header("x-first-death-queue"), "none");
    }
}

#[test]
fn in_3_10_only_the_first_of_several_headers_is_changed() {
    const TWICE: &[u8] = b"\x07x-deathV\x01bV\x07x-deathS\0\0\0\x01b";
    let headers = Some(Table::decode(TWICE).unwrap());
    let properties = Properties { headers, ..Properties::default() };
    let life = Life::new(Profile::RabbitMq3_10, &properties, &["k"]).dies("a", Reason::Rejected);
    let headers = life.properties.get().headers.unwrap();
    let names: Vec<_> = headers.iter().map(|(name, value)| (name, value.tag())).collect();
    assert_eq!(names, [(short("b"), b'V'), (short("x-death"), b'A'), (short("x-death"), b'S')]);
}

#[test]
fn in_4_3_what_clients_say_about_deaths_is_overwritten() {
    let claimed =
        list([entry([("queue", "c".into()), ("reason", "expired".into()), ("count", 7.into())])]);
    let properties = with_headers([
        ("x-last-death-queue", 5.into()),
        ("x-death", claimed),
        ("x-first-death-queue", "mine".into()),
        ("x-first-death-other", 6.into()),
    ]);
    let life = Life::new(Profile::RabbitMq4_3, &properties, &["k"]).dies("a", Reason::Expired);
    assert_eq!(life.entries(), "a:1");
    assert_eq!(life.cycles, ["a"]);
    assert_eq!(
        format!("{:?}", life.properties.get().headers.unwrap()),
        r#"{"x-death": [{"count": 1, "reason": "expired", "queue": "a", "time": timestamp 1000, "exchange": "", "routing-keys": ["k"]}], "x-first-death-exchange": "", "x-first-death-other": 6, "x-first-death-queue": "a", "x-first-death-reason": "expired", "x-last-death-exchange": "", "x-last-death-queue": "a", "x-last-death-reason": "expired"}"#
    );
}

#[test]
fn a_message_does_not_come_back_by_itself() {
    use Reason::{DeliveryLimit, Expired, MaxLen, Rejected};
    // Where it died, and where it may not go then.
    for (deaths, expected) in [
        (vec![("a", Expired)], vec!["a"]),
        (vec![("a", MaxLen)], vec!["a"]),
        (vec![("a", DeliveryLimit)], vec!["a"]),
        (vec![("a", Rejected)], vec![]),
        (vec![("a", Expired), ("b", Expired)], vec!["a", "b"]),
        (vec![("a", Rejected), ("b", Expired)], vec!["b"]),
        (vec![("a", Expired), ("b", Rejected)], vec![]),
        (vec![("a", Rejected), ("b", Expired), ("a", Rejected), ("b", Expired)], vec!["b"]),
        (vec![("a", Rejected), ("a", Expired)], vec!["a"]),
    ] {
        for profile in BOTH {
            let life = deaths
                .iter()
                .fold(Life::plain(profile), |life, (queue, reason)| life.dies(queue, *reason));
            assert_eq!(life.cycles, expected, "{profile:?} {deaths:?}");
        }
    }
}

/// Three are enough. It loses messages that somebody has dealt with, and keeps others going round for ever.
#[test]
fn in_3_10_the_disorder_of_entries_makes_and_hides_cycles() {
    use Reason::{Expired, Rejected};
    for (deaths, order, of_3_10, of_4_3) in [
        ([Expired, Rejected, Expired], "c:1 a:1 b:1", vec!["a", "c"], vec!["c"]),
        ([Rejected, Expired, Expired], "c:1 a:1 b:1", vec!["c"], vec!["b", "c"]),
    ] {
        let [old, new] = BOTH.map(|profile| {
            let [a, b, c] = deaths;
            Life::plain(profile).dies("a", a).dies("b", b).dies("c", c)
        });
        assert_eq!((old.entries().as_str(), new.entries().as_str()), (order, "c:1 b:1 a:1"));
        assert_eq!((old.cycles, new.cycles), (to_owned(of_3_10), to_owned(of_4_3)));
    }
}

fn to_owned(names: Vec<&str>) -> Vec<String> {
    names.into_iter().map(str::to_owned).collect()
}

#[test]
fn in_3_10_a_cycle_may_be_a_clients_invention() {
    for (reason, expected) in [
        (Value::from("expired"), vec!["a", "b"]),
        ("rejected".into(), vec!["a"]),
        ("something".into(), vec!["a", "b"]),
        // Not text, so it is not known to be a rejection.
        (Value::Bytes(b"rejected".as_slice().into()), vec!["a", "b"]),
    ] {
        let claimed = list([entry([("queue", "b".into()), ("reason", reason)])]);
        let properties = with_headers([("x-death", claimed)]);
        let life = Life::new(Profile::RabbitMq3_10, &properties, &["k"]);
        assert_eq!(life.dies("a", Reason::Expired).cycles, expected);
    }
}

#[test]
fn a_headers_exchange_sees_the_story_as_it_is_kept() {
    let [old, new] = BOTH.map(|profile| {
        let life = Life::new(profile, &with_headers([("n", 1.into())]), &["k"]);
        let dying = Dying {
            properties: &life.published,
            deaths: &life.deaths,
            exchange: short(""),
            routing_keys: &life.keys,
            bcc: &life.bcc,
            failures: 2,
        };
        let reason = Reason::Rejected;
        let death = Death { queue: short("a"), reason, time: NOON, routing_key: None };
        let letter = dead_letter(profile, &dying, &death);
        let headers = letter.routing_headers();
        let names: Vec<_> = headers.iter().map(|(name, _)| name.to_string()).collect();
        (names.join(" "), letter.failures)
    });
    let firsts = "x-first-death-exchange x-first-death-queue x-first-death-reason";
    let lasts = "x-last-death-exchange x-last-death-queue x-last-death-reason";
    assert_eq!(old, (format!("n x-death {firsts}"), 0));
    assert_eq!(new, (format!("n {firsts} {lasts}"), 2));
}

#[test]
fn unreadable_properties_go_on_as_they_are_and_still_meet_the_cycle_rule() {
    for profile in BOTH {
        let mut life = Life::plain(profile);
        life.published = RawProperties::new(bytes::Bytes::from_static(b"\x80\x00\x05ab"));
        assert!(life.published.fault().is_some());
        let unreadable = life.published.clone();
        let life = life.dies("a", Reason::Expired).dies("b", Reason::Expired);
        assert_eq!((&life.properties, life.cycles), (&unreadable, vec!["a".into(), "b".into()]));
    }
}
