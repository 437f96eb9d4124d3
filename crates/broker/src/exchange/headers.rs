//! Headers exchanges: the headers of the message are compared with the arguments of the binding.
//!
//! As in RabbitMQ, values are compared as Erlang would, and not their types: a string equals the same bytes, a timestamp
//! a number. Where the two profiles differ:
//!
//! |                                | 3.10                            | 4.3                             |
//! |--------------------------------|---------------------------------|---------------------------------|
//! | 1 and 1.0, 0.0 and -0.0        | equal                           | not equal                       |
//! | a timestamp in the message     | seconds                         | milliseconds (in the binding: seconds) |
//! | a name twice in the message    | the nth meets the nth of the binding | the last counts            |

use std::cmp::Ordering;
use std::hash::Hash;

use foldhash::{HashMap, HashMapExt};
use leveret_wire::{ShortStr, Table, Value};

use crate::Profile;
use crate::erlang;
use crate::refusal::Refusal;

const MATCH: &str = "x-match";

pub(super) fn validate(profile: Profile, arguments: &Table<'_>) -> Result<(), Refusal> {
    match arguments.get(MATCH) {
        None => Ok(()),
        Some(Value::Str(mode)) if Mode::parse(mode.as_bytes()).is_some() => Ok(()),
        Some(other @ Value::Str(_)) => Err(Refusal::precondition_failed(format_args!(
            "Invalid x-match field value {}; expected all, any, all-with-x, or any-with-x",
            erlang::Term(&other, profile),
        ))),
        Some(other) => Err(Refusal::precondition_failed(format_args!(
            "Invalid x-match field type {} (value {}); expected longstr",
            erlang::type_name(&other),
            erlang::Term(&other, profile),
        ))),
    }
}

/// How many of a binding's arguments the message must have.
#[derive(Clone, Copy, Debug)]
enum Quantity {
    All,
    Any,
}

/// What `x-match` says.
#[derive(Clone, Copy, Debug)]
struct Mode {
    quantity: Quantity,
    /// Arguments that begin with `x-` count too.
    with_x: bool,
}

impl Mode {
    fn parse(name: &[u8]) -> Option<Mode> {
        let (quantity, with_x) = match name {
            b"all" => (Quantity::All, false),
            b"any" => (Quantity::Any, false),
            b"all-with-x" => (Quantity::All, true),
            b"any-with-x" => (Quantity::Any, true),
            _ => return None,
        };
        Some(Mode { quantity, with_x })
    }

    fn of(arguments: &Table<'_>) -> Mode {
        let named = match arguments.get(MATCH) {
            Some(Value::Str(name)) => Mode::parse(name.as_bytes()),
            _ => None,
        };
        named.unwrap_or(Mode { quantity: Quantity::All, with_x: false })
    }

    fn counts(self, name: &[u8]) -> bool {
        match self.with_x {
            true => name != MATCH.as_bytes(),
            false => !name.starts_with(b"x-"),
        }
    }
}

#[derive(Debug)]
pub(super) struct Headers<D> {
    profile: Profile,
    /// By destination and arguments.
    conditions: HashMap<(D, Table<'static>), Condition>,
}

#[derive(Debug)]
struct Condition {
    quantity: Quantity,
    wanted: Box<[Wanted]>,
    /// How many bindings have it: their keys differ.
    bindings: usize,
}

/// An argument that counts.
#[derive(Debug)]
struct Wanted {
    name: ShortStr<'static>,
    /// How many before it have the same name.
    nth: usize,
    value: Value<'static>,
}

impl<D: Copy + Eq + Hash> Headers<D> {
    pub(super) fn new(profile: Profile) -> Self {
        Headers { profile, conditions: HashMap::new() }
    }

    /// The arguments are sorted by name.
    pub(super) fn add(&mut self, arguments: Table<'static>, destination: D) {
        let key = (destination, arguments);
        if let Some(condition) = self.conditions.get_mut(&key) {
            condition.bindings += 1;
            return;
        }
        let (_, arguments) = &key;
        let mode = Mode::of(arguments);
        let mut wanted: Vec<Wanted> = Vec::new();
        for (name, value) in arguments.iter().filter(|(name, _)| mode.counts(name.as_bytes())) {
            let before = wanted.last().filter(|before| before.name == name);
            let nth = before.map_or(0, |before| before.nth + 1);
            wanted.push(Wanted { name: name.into_owned(), nth, value: value.into_owned() });
        }
        let condition = Condition { quantity: mode.quantity, wanted: wanted.into(), bindings: 1 };
        self.conditions.insert(key, condition);
    }

    pub(super) fn remove(&mut self, arguments: &Table<'static>, destination: D) {
        let key = (destination, arguments.clone());
        let Some(condition) = self.conditions.get_mut(&key) else { return };
        condition.bindings -= 1;
        if condition.bindings == 0 {
            self.conditions.remove(&key);
        }
    }

    pub(super) fn route(&self, headers: Option<&Table<'_>>, found: &mut Vec<D>) {
        let mut headers: Vec<_> = headers.into_iter().flat_map(Table::iter).collect();
        // Several of one name stay in their order.
        headers.sort_by(|(one, _), (other, _)| one.cmp(other));
        let is_met = |wanted: &Wanted| wanted.is_met(&headers, self.profile);
        let matching = self.conditions.iter().filter(|(_, condition)| match condition.quantity {
            Quantity::All => condition.wanted.iter().all(is_met),
            Quantity::Any => condition.wanted.iter().any(is_met),
        });
        found.extend(matching.map(|((destination, _), _)| *destination));
    }
}

impl Wanted {
    /// The headers are sorted by name.
    fn is_met(&self, headers: &[(ShortStr<'_>, Value<'_>)], profile: Profile) -> bool {
        let up_to = |is: fn(Ordering) -> bool| {
            headers.partition_point(|(name, _)| is(name.cmp(&self.name)))
        };
        let header = match profile {
            Profile::RabbitMq3_10 => headers.get(up_to(Ordering::is_lt) + self.nth),
            Profile::RabbitMq4_3 => headers[..up_to(Ordering::is_le)].last(),
        };
        let header = header.filter(|(name, _)| *name == self.name);
        header.is_some_and(|(_, header)| meets(header, &self.value, profile))
    }
}

/// Whether a header of the message is what an argument of the binding wants.
fn meets(header: &Value<'_>, wanted: &Value<'_>, profile: Profile) -> bool {
    match (header, wanted) {
        // Its mere presence.
        (_, Value::Void) => true,
        // Taken to milliseconds, as no other timestamp is.
        (Value::Timestamp(seconds), _) if profile >= Profile::RabbitMq4_3 => {
            let milliseconds = i128::from(*seconds) * 1000;
            matches!(Number::of(wanted), Some(Number::Integer(n)) if n == milliseconds)
        }
        _ => equal(header, wanted, profile),
    }
}

/// Whether two values are equal to RabbitMQ, which has forgotten their types: to 4.3 by `=:=`, to 3.10 by `==`.
fn equal(a: &Value<'_>, b: &Value<'_>, profile: Profile) -> bool {
    match (a, b) {
        (Value::Str(a), Value::Str(b)) => a == b,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::Void, Value::Void) => true,
        (Value::Decimal { .. }, Value::Decimal { .. }) => a == b,
        (Value::Array(a), Value::Array(b)) => {
            equal_lists(a.iter(), b.iter(), |a, b| equal_typed(a, b, profile))
        }
        (Value::Table(a), Value::Table(b)) => {
            equal_lists(a.iter(), b.iter(), |a, b| a.0 == b.0 && equal_typed(&a.1, &b.1, profile))
        }
        // Lists without elements, which look alike.
        (Value::Array(array), Value::Table(table)) | (Value::Table(table), Value::Array(array)) => {
            array.is_empty() && table.is_empty()
        }
        _ => match (a.as_bytes(), b.as_bytes(), Number::of(a), Number::of(b)) {
            (Some(a), Some(b), ..) => a == b,
            (.., Some(a), Some(b)) => a.equals(b, profile),
            _ => false,
        },
    }
}

/// Inside of arrays and tables RabbitMQ still knows the types.
fn equal_typed(a: &Value<'_>, b: &Value<'_>, profile: Profile) -> bool {
    a.tag() == b.tag() && equal(a, b, profile)
}

fn equal_lists<T>(
    mut a: impl Iterator<Item = T>,
    mut b: impl Iterator<Item = T>,
    equal: impl Fn(&T, &T) -> bool,
) -> bool {
    loop {
        match (a.next(), b.next()) {
            (None, None) => return true,
            (Some(a), Some(b)) if equal(&a, &b) => {}
            _ => return false,
        }
    }
}

/// A value that is a number in Erlang.
#[derive(Clone, Copy)]
enum Number {
    Integer(i128),
    Float(f64),
}

impl Number {
    fn of(value: &Value<'_>) -> Option<Number> {
        match *value {
            Value::F32(n) => Some(Number::Float(n.into())),
            Value::F64(n) => Some(Number::Float(n)),
            Value::Timestamp(n) => Some(Number::Integer(n.into())),
            ref value => value.as_i64().map(|n| Number::Integer(n.into())),
        }
    }

    fn equals(self, other: Number, profile: Profile) -> bool {
        match (self, other) {
            (Number::Integer(a), Number::Integer(b)) => a == b,
            (Number::Float(a), Number::Float(b)) => match profile {
                Profile::RabbitMq3_10 => a == b,
                Profile::RabbitMq4_3 => a.to_bits() == b.to_bits(),
            },
            (Number::Integer(n), Number::Float(x)) | (Number::Float(x), Number::Integer(n)) => {
                // Of the numbers that a float is, an integer is none but itself.
                profile == Profile::RabbitMq3_10 && n as f64 == x && x as i128 == n
            }
        }
    }
}
