//! Values as RabbitMQ's texts show them: printed by Erlang.

use std::fmt::{self, Write};

use leveret_wire::Value;

use crate::Profile;

/// RabbitMQ's name for the type of a value.
pub(crate) fn type_name(value: &Value<'_>) -> &'static str {
    match value {
        Value::Bool(_) => "bool",
        Value::I8(_) => "byte",
        Value::U8(_) => "unsignedbyte",
        Value::I16(_) => "short",
        Value::U16(_) => "unsignedshort",
        Value::I32(_) => "signedint",
        Value::U32(_) => "unsignedint",
        Value::I64(_) => "long",
        Value::F32(_) => "float",
        Value::F64(_) => "double",
        Value::Decimal { .. } => "decimal",
        Value::Timestamp(_) => "timestamp",
        Value::Str(_) => "longstr",
        Value::Bytes(_) => "binary",
        Value::Array(_) => "array",
        Value::Table(_) => "table",
        Value::Void => "void",
        _ => "unknown",
    }
}

/// A value as Erlang's `~p` prints it, in one line. (Erlang breaks what is too long for a line.)
pub(crate) struct Term<'a>(pub(crate) &'a Value<'a>, pub(crate) Profile);

impl fmt::Display for Term<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Term(value, profile) = self;
        match value {
            Value::Bool(truth) => write!(f, "{truth}"),
            Value::F32(n) => float(f64::from(*n), f),
            Value::F64(n) => float(*n, f),
            Value::Decimal { scale, value } => write!(f, "{{{scale},{value}}}"),
            Value::Timestamp(n) => write!(f, "{n}"),
            Value::Str(text) => binary(text.as_bytes(), profile, f),
            Value::Bytes(bytes) => binary(bytes, profile, f),
            Value::Array(array) => list(f, array.iter(), |value, f| {
                write!(f, "{{{},{}}}", type_name(&value), Term(&value, profile))
            }),
            Value::Table(table) => list(f, table.iter(), |(name, value), f| {
                f.write_char('{')?;
                binary(name.as_bytes(), profile, f)?;
                write!(f, ",{},{}}}", type_name(&value), Term(&value, profile))
            }),
            integer => match integer.as_i64() {
                Some(n) => write!(f, "{n}"),
                None => f.write_str("undefined"),
            },
        }
    }
}

/// Bytes, as Erlang prints them.
pub(crate) struct Binary<'a>(pub(crate) &'a [u8], pub(crate) Profile);

impl fmt::Display for Binary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        binary(self.0, self.1, f)
    }
}

fn list<T>(
    f: &mut fmt::Formatter<'_>,
    elements: impl Iterator<Item = T>,
    mut element: impl FnMut(T, &mut fmt::Formatter<'_>) -> fmt::Result,
) -> fmt::Result {
    f.write_char('[')?;
    for (place, value) in elements.enumerate() {
        if place > 0 {
            f.write_char(',')?;
        }
        element(value, f)?;
    }
    f.write_char(']')
}

/// With a point, also before an exponent.
fn float(n: f64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let text = format!("{n:?}");
    match text.split_once('e') {
        Some((digits, exponent)) if !digits.contains('.') => write!(f, "{digits}.0e{exponent}"),
        _ => f.write_str(&text),
    }
}

/// As text, if all of it can be printed, and otherwise as numbers.
fn binary(bytes: &[u8], profile: Profile, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.is_empty() && text.chars().all(|c| is_printable(c, profile)) => {
            f.write_str("<<\"")?;
            text.chars().try_for_each(|c| match escape(c) {
                Some(letter) => write!(f, "\\{letter}"),
                None => f.write_char(c),
            })?;
            f.write_str(if text.is_ascii() { "\">>" } else { "\"/utf8>>" })
        }
        _ => {
            f.write_str("<<")?;
            for (place, byte) in bytes.iter().enumerate() {
                let comma = if place > 0 { "," } else { "" };
                write!(f, "{comma}{byte}")?;
            }
            f.write_str(">>")
        }
    }
}

/// 3.10 does not look for text beyond ASCII.
fn is_printable(c: char, profile: Profile) -> bool {
    match c.is_ascii() {
        true => matches!(c, ' '..='~') || escape(c).is_some(),
        false => profile >= Profile::RabbitMq4_3 && !c.is_control(),
    }
}

fn escape(c: char) -> Option<char> {
    Some(match c {
        '\n' => 'n',
        '\r' => 'r',
        '\t' => 't',
        '\x0b' => 'v',
        '\x08' => 'b',
        '\x0c' => 'f',
        '\x1b' => 'e',
        '"' => '"',
        '\\' => '\\',
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use leveret_wire::{Array, Table};

    use super::*;

    fn shown(value: impl Into<Value<'static>>) -> String {
        Term(&value.into(), Profile::RabbitMq4_3).to_string()
    }

    #[test]
    fn values_look_as_erlang_prints_them() {
        assert_eq!(shown(-1), "-1");
        assert_eq!(shown(true), "true");
        assert_eq!(shown(Value::Void), "undefined");
        assert_eq!(shown(1.0), "1.0");
        assert_eq!(shown(1e22), "1.0e22");
        assert_eq!(shown(Value::Decimal { scale: 2, value: 314 }), "{2,314}");
        assert_eq!(shown(""), "<<>>");
        assert_eq!(shown("a\n\"\\ \x1b"), r#"<<"a\n\"\\ \e">>"#);
        assert_eq!(shown(Value::Bytes((&b"\x01\xff"[..]).into())), "<<1,255>>");
        assert_eq!(shown("x\x7f"), "<<120,127>>");
        let array = Array::from_values(["a".into(), 1.into()]).unwrap();
        assert_eq!(shown(array), r#"[{longstr,<<"a">>},{signedint,1}]"#);
        let table = Table::from_pairs([("a", 1i64.into())]).unwrap();
        assert_eq!(shown(table), r#"[{<<"a">>,long,1}]"#);
    }

    #[test]
    fn text_beyond_ascii_is_text_to_4_3_alone() {
        assert_eq!(shown("日本"), r#"<<"日本"/utf8>>"#);
        let value = Value::from("日本");
        let shown = Term(&value, Profile::RabbitMq3_10).to_string();
        assert_eq!(shown, "<<230,151,165,230,156,172>>");
    }
}
