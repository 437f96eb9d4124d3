//! Values for formats such as JSON, from which exactly the same values can be made again.
//!
//! Texts, truth values and nothing are themselves; all other values are given with their type, as in `{"i32": 5}`. A name that is
//! not UTF-8, and tables nested too deep, are errors.

use std::borrow::Cow;
use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde::ser::{Error as _, Serialize, SerializeMap, Serializer};

use crate::error::InvalidValue;
use crate::table::{Array, Table};
use crate::text::{LongStr, ShortStr};
use crate::value::{MAX_DEPTH, Value};

/// A [`Value`] with its type.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(remote = "Value", rename_all = "snake_case")]
enum Typed<'a> {
    #[serde(skip)]
    Bool(bool),
    I8(i8),
    U8(u8),
    I16(i16),
    U16(u16),
    I32(i32),
    U32(u32),
    I64(i64),
    /// As text, so that no reader rounds it.
    F32(#[serde(with = "as_text")] f32),
    F64(#[serde(with = "as_text")] f64),
    Decimal {
        scale: u8,
        value: u32,
    },
    Timestamp(u64),
    /// Of text that is not UTF-8.
    #[serde(rename = "text_base64")]
    Str(#[serde(with = "as_base64")] LongStr<'a>),
    #[serde(rename = "bytes_base64")]
    Bytes(#[serde(with = "as_base64")] Cow<'a, [u8]>),
    Array(Array<'a>),
    Table(Table<'a>),
    #[serde(skip)]
    Void,
}

impl Serialize for Value<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match (self, self.as_str()) {
            (Value::Void, _) => serializer.serialize_unit(),
            (Value::Bool(truth), _) => serializer.serialize_bool(*truth),
            (_, Some(text)) => serializer.serialize_str(text),
            (_, None) => Typed::serialize(self, serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Value<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reading;
        impl<'de> Visitor<'de> for Reading {
            type Value = Value<'static>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    r#"a text, true, false, null, or a value with its type such as {"i32": 5}"#,
                )
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(Value::Void)
            }

            fn visit_bool<E>(self, truth: bool) -> Result<Self::Value, E> {
                Ok(truth.into())
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(text.to_owned().into())
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Self::Value, M::Error> {
                Typed::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_any(Reading)
    }
}

impl Serialize for Table<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        refuse_too_deep(self.depth())?;
        let mut map = serializer.serialize_map(None)?;
        for (name, value) in self.iter() {
            map.serialize_entry(&name, &value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Table<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reading;
        impl<'de> Visitor<'de> for Reading {
            type Value = Table<'static>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of names and values")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut table = Table::new();
                while let Some((name, value)) = map.next_entry::<ShortStr<'_>, Value<'_>>()? {
                    table
                        .insert(&name, value)
                        .map_err(|error| M::Error::custom(format_args!("{name:?}: {error}")))?;
                }
                Ok(table)
            }
        }
        deserializer.deserialize_map(Reading)
    }
}

impl Serialize for Array<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        refuse_too_deep(self.depth())?;
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for Array<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let values = Vec::<Value<'_>>::deserialize(deserializer)?;
        Array::from_values(values).map_err(D::Error::custom)
    }
}

/// What came from elsewhere may be nested deeper than the stack bears.
fn refuse_too_deep<E: serde::ser::Error>(depth: usize) -> Result<(), E> {
    match depth > MAX_DEPTH {
        true => Err(E::custom(InvalidValue::TooDeep)),
        false => Ok(()),
    }
}

impl Serialize for ShortStr<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.to_str().map_err(S::Error::custom)?)
    }
}

impl<'de> Deserialize<'de> for ShortStr<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.try_into().map_err(D::Error::custom)
    }
}

mod as_text {
    use super::*;

    pub(super) fn serialize<S: Serializer>(
        number: &impl fmt::Display,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>, N: std::str::FromStr>(
        deserializer: D,
    ) -> Result<N, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|_| D::Error::custom(format_args!("{text:?} is no number")))
    }
}

mod as_base64 {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    pub(super) fn serialize<S: Serializer>(
        bytes: &impl AsRef<[u8]>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>, B: From<Vec<u8>>>(
        deserializer: D,
    ) -> Result<B, D::Error> {
        let text = String::deserialize(deserializer)?;
        STANDARD.decode(text).map(B::from).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::properties::{Properties, RawProperties};

    #[test]
    fn values_say_their_types_where_json_has_none() {
        let json = r#"{"t":"text","o":true,"v":null,"n":{"i64":5},"f":{"f64":"0.1"},"d":{"decimal":{"scale":2,"value":314}},"at":{"timestamp":7},"s":{"text_base64":"/w=="},"x":{"bytes_base64":"AQ=="},"a":{"array":["one",{"table":{}}]}}"#;
        let table: Table<'_> = serde_json::from_str(json).unwrap();
        assert_eq!(table.get("f"), Some(Value::F64(0.1)));
        assert_eq!(table.get("s"), Some(Value::Str(b"\xff".as_slice().into())));
        assert_eq!(serde_json::to_string(&table).unwrap(), json);
    }

    #[test]
    fn what_is_not_text_or_nested_too_deep_is_an_error() {
        let odd = Table::decode(b"\x01\xfft\x01").unwrap();
        assert!(serde_json::to_string(&odd).is_err());
        let array = |inside: u32| [b"A".as_slice(), &(inside * 5).to_be_bytes()].concat();
        let mut fields = b"\x01n".to_vec();
        fields.extend((0..20_000).rev().flat_map(array));
        let length = (fields.len() as u32).to_be_bytes();
        let raw = RawProperties::new([b"\x20\x00", &length[..], &fields].concat().into());
        let deep: Properties<'_> = raw.get_of_any_depth().unwrap();
        assert!(serde_json::to_string(&deep).unwrap_err().to_string().contains("deep"));
    }
}
