//! Whether what is declared again is what was declared before.

use std::borrow::Cow;
use std::fmt;

use leveret_wire::{ShortStr, Table, Value};

use super::queue::QueueKind;
use super::words::{self, Resource};
use crate::erlang::{Term, type_name};
use crate::exchange::Kind;
use crate::profile::Profile;
use crate::refusal::Refusal;

/// How a queue was or is declared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueDeclared<'a> {
    pub(crate) durable: bool,
    pub(crate) exclusive: bool,
    pub(crate) auto_delete: bool,
    pub(crate) arguments: &'a Table<'a>,
}

impl QueueDeclared<'_> {
    /// What is gone with its connection survives nothing, whatever was asked for.
    fn is_durable(&self) -> bool {
        self.durable && !self.exclusive
    }
}

/// How an exchange was or is declared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExchangeDeclared<'a> {
    pub(crate) kind: Kind,
    pub(crate) durable: bool,
    pub(crate) auto_delete: bool,
    pub(crate) internal: bool,
    pub(crate) arguments: &'a Table<'a>,
}

/// Refuses to take a queue for one that is declared otherwise. That it is exclusive to another connection is for the caller
/// to find out, before.
pub(crate) fn same_queue(
    profile: Profile,
    vhost: &str,
    name: &ShortStr<'_>,
    current: &QueueDeclared<'_>,
    wanted: &QueueDeclared<'_>,
) -> Result<(), Refusal> {
    if current.exclusive != wanted.exclusive {
        return Err(words::owned_by_another(vhost, name));
    }
    let same = Comparison { of: words::queue(vhost, name), profile };
    same.flag("durable", current.is_durable(), wanted.is_durable())?;
    same.flag("auto_delete", current.auto_delete, wanted.auto_delete)?;
    let (was, is) = (typed(profile, current.arguments), typed(profile, wanted.arguments));
    for argument in QueueKind::of(current.arguments).known(profile) {
        same.argument(argument, was.get(argument), is.get(argument))?;
    }
    Ok(())
}

/// Refuses to take an exchange for one that is declared otherwise.
pub(crate) fn same_exchange(
    profile: Profile,
    vhost: &str,
    name: &ShortStr<'_>,
    current: &ExchangeDeclared<'_>,
    wanted: &ExchangeDeclared<'_>,
) -> Result<(), Refusal> {
    let same = Comparison { of: words::exchange(vhost, name), profile };
    same.flag("type", current.kind.name(), wanted.kind.name())?;
    same.flag("durable", current.durable, wanted.durable)?;
    same.flag("auto_delete", current.auto_delete, wanted.auto_delete)?;
    same.flag("internal", current.internal, wanted.internal)?;
    let alternate = "alternate-exchange";
    same.argument(alternate, current.arguments.get(alternate), wanted.arguments.get(alternate))
}

/// The arguments, with the type that 4.3 gives to a queue of none.
fn typed<'t>(profile: Profile, arguments: &'t Table<'t>) -> Cow<'t, Table<'t>> {
    const TYPE: &str = "x-queue-type";
    if profile < Profile::RabbitMq4_3 || arguments.get(TYPE).is_some() {
        return Cow::Borrowed(arguments);
    }
    let mut typed = arguments.clone();
    // A short name and a short text always fit.
    let _ = typed.insert(TYPE, "classic");
    Cow::Owned(typed)
}

struct Comparison<'a> {
    of: Resource<'a>,
    profile: Profile,
}

impl Comparison<'_> {
    fn flag<T: PartialEq + fmt::Display>(
        &self,
        flag: &str,
        current: T,
        wanted: T,
    ) -> Result<(), Refusal> {
        if current == wanted {
            return Ok(());
        }
        Err(self.differs(flag, format_args!("'{wanted}'"), format_args!("'{current}'")))
    }

    fn argument(
        &self,
        argument: &str,
        current: Option<Value<'_>>,
        wanted: Option<Value<'_>>,
    ) -> Result<(), Refusal> {
        match (&current, &wanted) {
            (None, None) => Ok(()),
            (Some(was), Some(is)) if is_same(was, is) => Ok(()),
            (Some(was), Some(is)) => Err(self.differs(argument, self.shown(is), self.shown(was))),
            (None, Some(only)) | (Some(only), None) if is_usual(argument, only) => Ok(()),
            (None, Some(is)) => Err(self.differs(argument, self.explained(is), "none")),
            (Some(was), None) => Err(self.differs(argument, "none", self.explained(was))),
        }
    }

    fn differs(
        &self,
        what: &str,
        wanted: impl fmt::Display,
        current: impl fmt::Display,
    ) -> Refusal {
        Refusal::precondition_failed(format_args!(
            "inequivalent arg '{what}' for {}: received {wanted} but current is {current}",
            self.of
        ))
    }

    /// A value beside another one.
    fn shown(&self, value: &Value<'_>) -> String {
        match value {
            Value::Void => "none".to_owned(),
            value => format!("'{}'", self.plain(value)),
        }
    }

    /// A value where there is no other.
    fn explained(&self, value: &Value<'_>) -> String {
        format!("the value '{}' of type '{}'", self.plain(value), type_name(value))
    }

    fn plain(&self, value: &Value<'_>) -> String {
        match value.as_bytes() {
            Some(text) => String::from_utf8_lossy(text).into_owned(),
            None => Term(value, self.profile).to_string(),
        }
    }
}

/// RabbitMQ compares values, and hardly looks at their types: 5 is 5 in every width and also as a time, and a text is a
/// text also if it is called bytes.
fn is_same(one: &Value<'_>, other: &Value<'_>) -> bool {
    match (number(one), number(other)) {
        (Some(one), Some(other)) => return one == other,
        (None, None) => {}
        _ => return false,
    }
    match (one, other) {
        (Value::F32(one), Value::F64(other)) | (Value::F64(other), Value::F32(one)) => {
            f64::from(*one) == *other
        }
        (Value::Str(_) | Value::Bytes(_), Value::Str(_) | Value::Bytes(_)) => {
            one.as_bytes() == other.as_bytes()
        }
        (Value::Array(array), Value::Table(table)) | (Value::Table(table), Value::Array(array)) => {
            array.is_empty() && table.is_empty()
        }
        _ => one == other,
    }
}

fn number(value: &Value<'_>) -> Option<i128> {
    match value {
        Value::Timestamp(seconds) => Some(i128::from(*seconds)),
        value => value.as_i64().map(i128::from),
    }
}

/// A queue of no type is a classic one.
fn is_usual(argument: &str, value: &Value<'_>) -> bool {
    argument == "x-queue-type" && value.as_str() == Some("classic")
}
