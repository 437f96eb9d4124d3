//! What RabbitMQ routes where, written as plainly as possible, and bindings and messages to try it with.
//!
//! The unit tests compare the exchanges with this, and `rabbitmq/routing.rs` compares this with a real RabbitMQ.

use leveret_wire::{Array, Table, Value};
use proptest::prelude::*;
use proptest::sample::select;

use super::Profile;

/// Whether a topic exchange routes a message with this key to a binding with this pattern.
pub(crate) fn topic_matches(pattern: &[u8], key: &[u8]) -> bool {
    words_match(&words(pattern), &words(key))
}

fn words(key: &[u8]) -> Vec<&[u8]> {
    match key {
        b"" => Vec::new(),
        key => key.split(|byte| *byte == b'.').collect(),
    }
}

fn words_match(pattern: &[&[u8]], key: &[&[u8]]) -> bool {
    match (pattern, key) {
        ([], key) => key.is_empty(),
        ([b"#", rest @ ..], key) => (0..=key.len()).any(|skip| words_match(rest, &key[skip..])),
        (_, []) => false,
        ([b"*", rest @ ..], [_, key @ ..]) => words_match(rest, key),
        ([word, rest @ ..], [first, key @ ..]) => word == first && words_match(rest, key),
    }
}

/// Names and values of a table; names may repeat.
pub(crate) type Fields = Vec<(&'static str, Value<'static>)>;

/// Whether a headers exchange routes a message with these headers to a binding with these arguments.
pub(crate) fn headers_match(arguments: &Fields, headers: &Fields, profile: Profile) -> bool {
    let old = profile == Profile::RabbitMq3_10;
    let mode = arguments.iter().find(|(name, _)| *name == "x-match");
    let mode = mode.and_then(|(_, value)| value.as_str()).unwrap_or("all");
    let counts = |name: &str| match mode.ends_with("-with-x") {
        true => name != "x-match",
        false => !name.starts_with("x-"),
    };
    let counting = (0..arguments.len()).filter(|&place| counts(arguments[place].0));
    let mut matches = counting.map(|place| {
        let (name, wanted) = &arguments[place];
        let mut same_name = headers.iter().filter(|(other, _)| other == name);
        let header = match old {
            true => same_name
                .nth(arguments[..place].iter().filter(|(earlier, _)| earlier == name).count()),
            false => same_name.next_back(),
        };
        header.is_some_and(|(_, header)| {
            let header = match header {
                Value::Timestamp(n) if !old => Term::Integer(i128::from(*n) * 1000),
                header => Term::of(header),
            };
            *wanted == Value::Void || header.equals(&Term::of(wanted), old)
        })
    });
    match mode.starts_with("any") {
        true => matches.any(|matches| matches),
        false => matches.all(|matches| matches),
    }
}

/// What a value is in Erlang.
#[derive(Debug)]
enum Term {
    Atom(&'static str),
    Integer(i128),
    Float(f64),
    Binary(Vec<u8>),
    Tuple(Vec<Term>),
    List(Vec<Term>),
}

impl Term {
    fn of(value: &Value<'_>) -> Term {
        match value {
            Value::Bool(true) => Term::Atom("true"),
            Value::Bool(false) => Term::Atom("false"),
            Value::Void => Term::Atom("undefined"),
            Value::F32(n) => Term::Float((*n).into()),
            Value::F64(n) => Term::Float(*n),
            Value::Timestamp(n) => Term::Integer((*n).into()),
            Value::Decimal { scale, value } => {
                Term::Tuple(vec![Term::Integer((*scale).into()), Term::Integer((*value).into())])
            }
            Value::Str(text) => Term::Binary(text.as_bytes().to_vec()),
            Value::Bytes(bytes) => Term::Binary(bytes.to_vec()),
            Value::Array(array) => Term::List(
                array.iter().map(|v| Term::Tuple(vec![Term::type_of(&v), Term::of(&v)])).collect(),
            ),
            Value::Table(table) => Term::List(
                table
                    .iter()
                    .map(|(name, value)| {
                        let name = Term::Binary(name.as_bytes().to_vec());
                        Term::Tuple(vec![name, Term::type_of(&value), Term::of(&value)])
                    })
                    .collect(),
            ),
            integer => Term::Integer(integer.as_i64().expect("all else are integers").into()),
        }
    }

    fn type_of(value: &Value<'_>) -> Term {
        Term::Integer(value.tag().into())
    }

    /// `==` in Erlang if `loose`, or else `=:=`.
    fn equals(&self, other: &Term, loose: bool) -> bool {
        match (self, other) {
            (Term::Atom(a), Term::Atom(b)) => a == b,
            (Term::Integer(a), Term::Integer(b)) => a == b,
            (Term::Float(a), Term::Float(b)) => a == b && (loose || a.signum() == b.signum()),
            (Term::Integer(a), Term::Float(b)) | (Term::Float(b), Term::Integer(a)) => {
                loose && *a as f64 == *b
            }
            (Term::Binary(a), Term::Binary(b)) => a == b,
            (Term::Tuple(a), Term::Tuple(b)) | (Term::List(a), Term::List(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.equals(b, loose))
            }
            _ => false,
        }
    }
}

/// A table of fields whose names may repeat.
pub(crate) fn table(fields: &Fields) -> Table<'static> {
    let mut bytes = Vec::new();
    for (name, value) in fields {
        bytes.push(name.len() as u8);
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(Array::from_values([value.clone()]).unwrap().as_bytes());
    }
    Table::decode(&bytes).unwrap().into_owned()
}

/// Keys of few different words, so that many match; wildcards are words like others in the key of a message.
pub(crate) fn keys() -> impl Strategy<Value = String> {
    let word = select(vec!["a", "b", "a", "b", "c", "", "*", "#", "ü"]);
    prop::collection::vec(word, 0..6).prop_map(|words| words.join("."))
}

/// Keys of bindings. There are at most so many `#`.
pub(crate) fn patterns(hashes: usize) -> impl Strategy<Value = String> {
    let word = select(vec!["a", "b", "a", "b", "", "*", "*", "#", "#", "#", "ü"]);
    prop::collection::vec(word, 0..6).prop_map(move |mut words| {
        let mut left = hashes;
        words.retain(|word| *word != "#" || left.checked_sub(1).map(|n| left = n).is_some());
        words.join(".")
    })
}

/// The headers of a message.
pub(crate) fn headers() -> impl Strategy<Value = Fields> {
    let name = select(vec!["a", "a", "b", "b", "c", "x-a", "x-match"]);
    prop::collection::vec((name, select(values())), 0..5)
}

/// The arguments of a binding that is valid.
pub(crate) fn arguments() -> impl Strategy<Value = Fields> {
    let modes = ["all", "any", "all-with-x", "any-with-x"];
    let mode = prop::option::weighted(0.9, select(modes.to_vec()));
    let name = select(vec!["a", "a", "b", "b", "c", "x-a"]);
    let fields = prop::collection::vec((name, select(values())), 0..4);
    (fields, mode).prop_map(|(mut fields, mode)| {
        if let Some(mode) = mode {
            fields.insert(fields.len() / 2, ("x-match", mode.into()));
        }
        fields
    })
}

/// Values of all types, of which many are nearly the same.
fn values() -> Vec<Value<'static>> {
    let array = |values: &[Value<'static>]| {
        Value::Array(Array::from_values(values.iter().cloned()).unwrap())
    };
    let nested = |value| Value::Table(table(&vec![("k", value)]));
    vec![
        Value::Void,
        true.into(),
        false.into(),
        1i8.into(),
        1u8.into(),
        1i16.into(),
        1u16.into(),
        1i32.into(),
        1u32.into(),
        1i64.into(),
        1f32.into(),
        1f64.into(),
        0i32.into(),
        0f64.into(),
        (-0f64).into(),
        1.5f32.into(),
        1.5f64.into(),
        1000i32.into(),
        1000i64.into(),
        Value::Timestamp(1),
        Value::Timestamp(1000),
        Value::Decimal { scale: 0, value: 1 },
        Value::Decimal { scale: 1, value: 10 },
        "1".into(),
        "true".into(),
        "".into(),
        Value::Bytes((&b"1"[..]).into()),
        Value::Bytes((&b""[..]).into()),
        array(&[]),
        array(&[1i32.into()]),
        array(&[1i64.into()]),
        array(&[0f64.into()]),
        array(&[(-0f64).into()]),
        array(&["1".into()]),
        Value::Table(Table::new()),
        nested(1i32.into()),
        nested(1i64.into()),
        nested("1".into()),
    ]
}
