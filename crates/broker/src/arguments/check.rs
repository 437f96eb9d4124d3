//! The values an argument may have.

use leveret_wire::Value;

use crate::erlang::type_name;

/// What is wrong with a value, as RabbitMQ puts it: `{value_negative,-1}`.
pub(super) type Wrong = String;

/// Ten years: no time may be longer.
const LONGEST_MILLISECONDS: i64 = 10 * 365 * 24 * 60 * 60 * 1000;

/// An integer of any width.
pub(super) fn integer(value: &Value<'_>) -> Result<i64, Wrong> {
    value.as_i64().ok_or_else(|| format!("\"expected integer, got {}\"", type_name(value)))
}

pub(super) fn non_negative(value: &Value<'_>) -> Result<u64, Wrong> {
    let number = integer(value)?;
    u64::try_from(number).map_err(|_| format!("{{value_negative,{number}}}"))
}

pub(super) fn positive(value: &Value<'_>) -> Result<u64, Wrong> {
    match non_negative(value)? {
        0 => Err("{value_zero,0}".to_owned()),
        number => Ok(number),
    }
}

/// At most so much.
pub(super) fn at_most(most: u8) -> impl Fn(&Value<'_>) -> Result<u8, Wrong> {
    move |value| {
        let number = non_negative(value)?;
        let fitting = u8::try_from(number).ok().filter(|fitting| *fitting <= most);
        fitting.ok_or_else(|| format!("{{max_value_exceeded,{number}}}"))
    }
}

/// A time that may be none at all.
pub(super) fn milliseconds(value: &Value<'_>) -> Result<u64, Wrong> {
    match integer(value)? {
        long if long > LONGEST_MILLISECONDS => Err(format!("{{value_too_large,{long}}}")),
        _ => non_negative(value),
    }
}

/// A time that is one.
pub(super) fn some_milliseconds(value: &Value<'_>) -> Result<u64, Wrong> {
    match milliseconds(value)? {
        0 => positive(value),
        time => Ok(time),
    }
}

pub(super) fn truth(value: &Value<'_>) -> Result<bool, Wrong> {
    value.as_bool().ok_or_else(|| unacceptable_type(value))
}

/// The bytes of a string.
pub(super) fn text<'v>(value: &'v Value<'_>) -> Result<&'v [u8], Wrong> {
    match value {
        Value::Str(text) => Ok(text.as_bytes()),
        other => Err(unacceptable_type(other)),
    }
}

/// One of the words that mean something.
pub(super) fn word<T: Copy>(
    words: &[(&str, T)],
    wrong: &'static str,
) -> impl Fn(&Value<'_>) -> Result<T, Wrong> {
    move |value| {
        let text = text(value)?;
        let meant = words.iter().find(|(word, _)| word.as_bytes() == text);
        meant.map(|(_, meaning)| *meaning).ok_or_else(|| wrong.to_owned())
    }
}

fn unacceptable_type(value: &Value<'_>) -> Wrong {
    format!("{{unacceptable_type,{}}}", type_name(value))
}
