//! One value of a field table or array, in RabbitMQ's dialect.

use std::borrow::Cow;
use std::fmt;

use crate::error::{DecodeError, Fault, InvalidValue};
use crate::field::{Field, Reader, Writer};
use crate::table::{Array, Table};
use crate::text::{LongStr, ShortStr};

/// How deep tables and arrays may be nested, counted from the outermost as 1.
///
/// `x-death`, the deepest that RabbitMQ itself sends, needs 3. The limit keeps a hostile frame from
/// exhausting the stack.
pub const MAX_DEPTH: usize = 64;

/// A value in a [`Table`] or [`Array`], with the type tag it has on the wire.
///
/// The tags are those that RabbitMQ reads and writes, which are not quite those of the specification
/// (`s` is a 16-bit integer, `l` is signed). A value that was decoded borrows from the frame.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub enum Value<'a> {
    /// `t`
    Bool(bool),
    /// `b`
    I8(i8),
    /// `B`
    U8(u8),
    /// `s`
    I16(i16),
    /// `u`
    U16(u16),
    /// `I`
    I32(i32),
    /// `i`
    U32(u32),
    /// `l`, and `L` when decoding: RabbitMQ reads both as signed.
    I64(i64),
    /// `f`; must be finite
    F32(f32),
    /// `d`; must be finite
    F64(f64),
    /// `D`: `value / 10^scale`
    Decimal {
        /// How many digits stand behind the point.
        scale: u8,
        /// All digits.
        value: u32,
    },
    /// `T`: seconds since 1970
    Timestamp(u64),
    /// `S`: text, as a rule
    Str(LongStr<'a>),
    /// `x`: bytes that are no text
    Bytes(Cow<'a, [u8]>),
    /// `A`
    Array(Array<'a>),
    /// `F`
    Table(Table<'a>),
    /// `V`: no value
    Void,
}

impl<'a> Value<'a> {
    /// The number, if it is an integer of any width.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Value::I8(n) => Some(n.into()),
            Value::U8(n) => Some(n.into()),
            Value::I16(n) => Some(n.into()),
            Value::U16(n) => Some(n.into()),
            Value::I32(n) => Some(n.into()),
            Value::U32(n) => Some(n.into()),
            Value::I64(n) => Some(n),
            _ => None,
        }
    }

    /// The text, if it is a string and UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => text.to_str().ok(),
            _ => None,
        }
    }

    /// The bytes, if it is a string or bytes.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Value::Str(text) => Some(text.as_bytes()),
            Value::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The truth value, if it is one.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(truth) => Some(truth),
            _ => None,
        }
    }

    /// The table, if it is one.
    pub fn as_table(&self) -> Option<&Table<'a>> {
        match self {
            Value::Table(table) => Some(table),
            _ => None,
        }
    }

    /// The array, if it is one.
    pub fn as_array(&self) -> Option<&Array<'a>> {
        match self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }

    /// The type tag on the wire.
    pub fn tag(&self) -> u8 {
        match self {
            Value::Bool(_) => b't',
            Value::I8(_) => b'b',
            Value::U8(_) => b'B',
            Value::I16(_) => b's',
            Value::U16(_) => b'u',
            Value::I32(_) => b'I',
            Value::U32(_) => b'i',
            Value::I64(_) => b'l',
            Value::F32(_) => b'f',
            Value::F64(_) => b'd',
            Value::Decimal { .. } => b'D',
            Value::Timestamp(_) => b'T',
            Value::Str(_) => b'S',
            Value::Bytes(_) => b'x',
            Value::Array(_) => b'A',
            Value::Table(_) => b'F',
            Value::Void => b'V',
        }
    }

    /// The same value with its own memory.
    pub fn into_owned(self) -> Value<'static> {
        match self {
            Value::Bool(v) => Value::Bool(v),
            Value::I8(v) => Value::I8(v),
            Value::U8(v) => Value::U8(v),
            Value::I16(v) => Value::I16(v),
            Value::U16(v) => Value::U16(v),
            Value::I32(v) => Value::I32(v),
            Value::U32(v) => Value::U32(v),
            Value::I64(v) => Value::I64(v),
            Value::F32(v) => Value::F32(v),
            Value::F64(v) => Value::F64(v),
            Value::Decimal { scale, value } => Value::Decimal { scale, value },
            Value::Timestamp(v) => Value::Timestamp(v),
            Value::Str(v) => Value::Str(v.into_owned()),
            Value::Bytes(v) => Value::Bytes(Cow::Owned(v.into_owned())),
            Value::Array(v) => Value::Array(v.into_owned()),
            Value::Table(v) => Value::Table(v.into_owned()),
            Value::Void => Value::Void,
        }
    }

    /// Reads a value whose bytes were checked before, by [`check`].
    pub(crate) fn read_checked(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let [tag] = reader.array()?;
        Ok(match tag {
            b't' => Value::Bool(u8::read(reader)? != 0),
            b'b' => Value::I8(i8::from_be_bytes(reader.array()?)),
            b'B' => Value::U8(u8::read(reader)?),
            b's' => Value::I16(i16::from_be_bytes(reader.array()?)),
            b'u' => Value::U16(u16::read(reader)?),
            b'I' => Value::I32(i32::from_be_bytes(reader.array()?)),
            b'i' => Value::U32(u32::read(reader)?),
            b'l' | b'L' => Value::I64(i64::from_be_bytes(reader.array()?)),
            b'f' => Value::F32(f32::from_be_bytes(reader.array()?)),
            b'd' => Value::F64(f64::from_be_bytes(reader.array()?)),
            b'D' => Value::Decimal { scale: u8::read(reader)?, value: u32::read(reader)? },
            b'T' => Value::Timestamp(u64::read(reader)?),
            b'S' => Value::Str(reader.long_slice()?.into()),
            b'x' => Value::Bytes(Cow::Borrowed(reader.long_slice()?)),
            b'A' => Value::Array(Array::from_checked(reader.long_slice()?)),
            b'F' => Value::Table(Table::from_checked(reader.long_slice()?)),
            b'V' => Value::Void,
            tag => return Err(reader.fail(Fault::UnknownType { tag })),
        })
    }

    /// Writes the value, or nothing at all if AMQP or RabbitMQ cannot carry it.
    pub(crate) fn write(&self, writer: &mut Writer<'_>) -> Result<(), InvalidValue> {
        match self {
            Value::F32(v) if !v.is_finite() => return Err(InvalidValue::NotFinite),
            Value::F64(v) if !v.is_finite() => return Err(InvalidValue::NotFinite),
            Value::Array(v) if v.depth() >= MAX_DEPTH => return Err(InvalidValue::TooDeep),
            Value::Table(v) if v.depth() >= MAX_DEPTH => return Err(InvalidValue::TooDeep),
            _ => writer.put(&[self.tag()]),
        }
        match self {
            Value::Bool(v) => writer.put(&[u8::from(*v)]),
            Value::I8(v) => writer.put(&v.to_be_bytes()),
            Value::U8(v) => v.write(writer),
            Value::I16(v) => writer.put(&v.to_be_bytes()),
            Value::U16(v) => v.write(writer),
            Value::I32(v) => writer.put(&v.to_be_bytes()),
            Value::U32(v) => v.write(writer),
            Value::I64(v) => writer.put(&v.to_be_bytes()),
            Value::F32(v) => writer.put(&v.to_be_bytes()),
            Value::F64(v) => writer.put(&v.to_be_bytes()),
            Value::Decimal { scale, value } => {
                scale.write(writer);
                value.write(writer);
            }
            Value::Timestamp(v) => v.write(writer),
            Value::Str(v) => v.write(writer),
            Value::Bytes(v) => writer.long_slice(v),
            Value::Array(v) => writer.long_slice(v.as_bytes()),
            Value::Table(v) => writer.long_slice(v.as_bytes()),
            Value::Void => {}
        }
        Ok(())
    }
}

/// What a run of fields is made of: values alone, or values with a name before each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    Array,
    Table,
}

/// Walks over the encoded fields of a table or array, refuses what is malformed, and gives back how
/// deep they are nested (1 = no tables or arrays inside). Allocates nothing.
pub(crate) fn check(bytes: &[u8], shape: Shape) -> Result<usize, DecodeError> {
    check_level(bytes, shape, 1, &mut |_, _| false)
}

/// The same for fields that may be nested without a limit; not by recursion, which a hostile frame would make too deep.
pub(crate) fn check_any_depth(bytes: &[u8], shape: Shape) -> Result<(), DecodeError> {
    let mut unchecked = vec![(bytes, shape)];
    while let Some((bytes, shape)) = unchecked.pop() {
        check_level(bytes, shape, 1, &mut |inner, shape| {
            unchecked.push((inner, shape));
            true
        })?;
    }
    Ok(())
}

/// What is nested too deep is for `put_off`, if it says so, and else an error.
fn check_level<'b>(
    bytes: &'b [u8],
    shape: Shape,
    level: usize,
    put_off: &mut impl FnMut(&'b [u8], Shape) -> bool,
) -> Result<usize, DecodeError> {
    let mut reader = Reader::new(bytes);
    let mut deepest = level;
    while !reader.is_empty() {
        if shape == Shape::Table {
            ShortStr::read(&mut reader)?;
        }
        let start = reader.offset();
        let [tag] = reader.array()?;
        let width = match tag {
            b't' | b'b' | b'B' => 1,
            b's' | b'u' => 2,
            b'I' | b'i' => 4,
            b'D' => 5,
            b'l' | b'L' | b'T' => 8,
            b'V' => 0,
            b'S' | b'x' => {
                reader.long_slice()?;
                continue;
            }
            b'f' | b'd' => {
                let finite = match tag {
                    b'f' => f32::from_be_bytes(reader.array()?).is_finite(),
                    _ => f64::from_be_bytes(reader.array()?).is_finite(),
                };
                if !finite {
                    return Err(DecodeError::new(Fault::NotFinite, "value", start));
                }
                continue;
            }
            b'A' | b'F' => {
                let inner = reader.long_slice()?;
                let shape = if tag == b'A' { Shape::Array } else { Shape::Table };
                if level == MAX_DEPTH {
                    if put_off(inner, shape) {
                        continue;
                    }
                    return Err(DecodeError::new(Fault::TooDeep, "value", start));
                }
                let inner_at = reader.offset() - inner.len();
                let depth = check_level(inner, shape, level + 1, put_off)
                    .map_err(|error| error.shifted(inner_at))?;
                deepest = deepest.max(depth);
                continue;
            }
            tag => return Err(DecodeError::new(Fault::UnknownType { tag }, "value", start)),
        };
        reader.slice(width)?;
    }
    Ok(deepest)
}

impl fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Bool(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U8(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
            Value::Decimal { scale, value } => write!(f, "{value}e-{scale}"),
            Value::Timestamp(v) => write!(f, "timestamp {v}"),
            Value::Str(v) => v.fmt(f),
            Value::Bytes(v) => write!(f, "b\"{}\"", v.escape_ascii()),
            Value::Array(v) => v.fmt(f),
            Value::Table(v) => v.fmt(f),
            Value::Void => f.write_str("void"),
        }
    }
}

macro_rules! value_from {
    ($($from:ty => $variant:ident),* $(,)?) => {$(
        impl<'a> From<$from> for Value<'a> {
            fn from(value: $from) -> Self {
                Value::$variant(value.into())
            }
        }
    )*};
}

value_from! {
    bool => Bool, i8 => I8, u8 => U8, i16 => I16, u16 => U16, i32 => I32, u32 => U32, i64 => I64,
    f32 => F32, f64 => F64, &'a str => Str, &'a String => Str, String => Str, LongStr<'a> => Str,
    Array<'a> => Array, Table<'a> => Table,
}
