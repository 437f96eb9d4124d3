//! Messages as lines of JSON, from which exactly the same messages can be made again.
//!
//! The format is described at [`ParkingLot::export`](super::ParkingLot::export).

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use super::ParkedMessage;
use crate::amqp::{Array, Properties, RawProperties, ShortStr, Table, Value};
use crate::text::{escape_json, without_value};

/// A message as a line tells it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    pub(super) exchange: String,
    pub(super) routing_key: String,
    pub(super) properties: RawProperties,
    pub(super) body: Bytes,
}

/// What a line looks like.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Form {
    exchange: String,
    routing_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    properties: Option<Fields>,
    /// Instead of all properties, if they cannot be told otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    properties_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body_base64: Option<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Fields {
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_encoding: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    headers: Option<Pairs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delivery_mode: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reply_to: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expiration: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", rename = "type")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    app_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_id: Option<String>,
}

/// The fields of a table, in order.
#[derive(Debug, Default)]
struct Pairs(Vec<(String, Told)>);

/// A value.
#[derive(Debug)]
enum Told {
    Null,
    Bool(bool),
    Text(String),
    Typed(Typed),
}

/// A value that needs its type to be told: `{"i32": 5}`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Typed {
    I8(i8),
    U8(u8),
    I16(i16),
    U16(u16),
    I32(i32),
    U32(u32),
    I64(i64),
    /// As text, so that no reader rounds it.
    F32(String),
    F64(String),
    Decimal {
        scale: u8,
        value: u32,
    },
    Timestamp(u64),
    TextBase64(String),
    BytesBase64(String),
    Array(Vec<Told>),
    Table(Pairs),
}

impl Line {
    pub(super) fn of(message: &ParkedMessage) -> Self {
        Line {
            exchange: message.exchange().to_owned(),
            routing_key: message.routing_key().to_owned(),
            properties: message.raw_properties().clone(),
            body: message.body().clone(),
        }
    }

    /// The line, without its end.
    pub(super) fn write(&self) -> Result<String, serde_json::Error> {
        let properties = match self.properties == RawProperties::default() {
            true => None,
            false => Fields::of(&self.properties).filter(|fields| fields.tell(&self.properties)),
        };
        let is_told = properties.is_some() || self.properties == RawProperties::default();
        let text = std::str::from_utf8(&self.body).ok();
        let line = serde_json::to_string(&Form {
            exchange: self.exchange.clone(),
            routing_key: self.routing_key.clone(),
            properties,
            properties_base64: (!is_told).then(|| STANDARD.encode(self.properties.as_bytes())),
            body: text.map(str::to_owned),
            body_base64: text.is_none().then(|| STANDARD.encode(&self.body)),
        })?;
        // It may be shown on a terminal.
        Ok(escape_json(&line))
    }

    /// What a line tells, or what is wrong with it.
    pub(super) fn read(line: &[u8]) -> Result<Self, String> {
        let form: Form = serde_json::from_slice(line).map_err(|error| {
            let error = without_value(&error.to_string());
            format!("not an exported message, as `export` writes it: {error}")
        })?;
        let body = match (form.body, form.body_base64) {
            (Some(_), Some(_)) => return Err("both body and body_base64 are given".to_owned()),
            (Some(text), None) => text.into(),
            (None, Some(text)) => decoded(&text, "body_base64")?.into(),
            (None, None) => return Err("there is no body".to_owned()),
        };
        let properties = match (form.properties, form.properties_base64) {
            (Some(_), Some(_)) => {
                return Err("both properties and properties_base64 are given".to_owned());
            }
            (None, None) => RawProperties::default(),
            (None, Some(text)) => RawProperties::new(decoded(&text, "properties_base64")?.into()),
            (Some(fields), None) => RawProperties::from(&fields.into_properties()?),
        };
        for (what, name) in [("exchange", &form.exchange), ("routing_key", &form.routing_key)] {
            ShortStr::try_from(name.as_str()).map_err(|error| format!("{what}: {error}"))?;
        }
        Ok(Line { exchange: form.exchange, routing_key: form.routing_key, properties, body })
    }
}

fn decoded(text: &str, what: &str) -> Result<Vec<u8>, String> {
    STANDARD.decode(text).map_err(|error| format!("{what}: {error}"))
}

impl Fields {
    /// `None` if there is a text that is none, or if they are malformed.
    fn of(raw: &RawProperties) -> Option<Self> {
        if raw.fault().is_some() {
            return None;
        }
        let text = |text: &Option<ShortStr<'_>>| match text {
            None => Some(None),
            Some(text) => text.to_str().ok().map(|text| Some(text.to_owned())),
        };
        let properties = raw.get();
        Some(Fields {
            content_type: text(&properties.content_type)?,
            content_encoding: text(&properties.content_encoding)?,
            headers: match &properties.headers {
                None => None,
                Some(headers) => Some(Pairs::of(headers)?),
            },
            delivery_mode: properties.delivery_mode,
            priority: properties.priority,
            correlation_id: text(&properties.correlation_id)?,
            reply_to: text(&properties.reply_to)?,
            expiration: text(&properties.expiration)?,
            message_id: text(&properties.message_id)?,
            timestamp: properties.timestamp,
            kind: text(&properties.kind)?,
            user_id: text(&properties.user_id)?,
            app_id: text(&properties.app_id)?,
            cluster_id: text(&properties.cluster_id)?,
        })
    }

    /// Whether exactly these properties can be made of them again: a name that is there twice cannot, or an integer in
    /// another spelling.
    fn tell(&self, raw: &RawProperties) -> bool {
        let read = || {
            let again: Fields = serde_json::from_str(&serde_json::to_string(self).ok()?).ok()?;
            again.into_properties().ok()
        };
        read().is_some_and(|properties| RawProperties::from(&properties) == *raw)
    }

    fn into_properties(self) -> Result<Properties<'static>, String> {
        let text = |what: &str, text: Option<String>| match text {
            None => Ok(None),
            Some(text) => {
                ShortStr::try_from(text).map(Some).map_err(|error| format!("{what}: {error}"))
            }
        };
        let headers = match self.headers {
            None => None,
            Some(pairs) => Some(pairs.into_table().map_err(|error| format!("headers: {error}"))?),
        };
        Ok(Properties {
            content_type: text("content_type", self.content_type)?,
            content_encoding: text("content_encoding", self.content_encoding)?,
            headers,
            delivery_mode: self.delivery_mode,
            priority: self.priority,
            correlation_id: text("correlation_id", self.correlation_id)?,
            reply_to: text("reply_to", self.reply_to)?,
            expiration: text("expiration", self.expiration)?,
            message_id: text("message_id", self.message_id)?,
            timestamp: self.timestamp,
            kind: text("type", self.kind)?,
            user_id: text("user_id", self.user_id)?,
            app_id: text("app_id", self.app_id)?,
            cluster_id: text("cluster_id", self.cluster_id)?,
        })
    }
}

impl Pairs {
    /// `None` if a name is no text.
    fn of(table: &Table<'_>) -> Option<Self> {
        let pair = |(name, value): (ShortStr<'_>, Value<'_>)| {
            Some((name.to_str().ok()?.to_owned(), Told::of(&value)?))
        };
        table.iter().map(pair).collect::<Option<Vec<_>>>().map(Pairs)
    }

    fn into_table(self) -> Result<Table<'static>, String> {
        let mut table = Table::new();
        for (name, told) in self.0 {
            let value = told.into_value().map_err(|error| format!("{name:?}: {error}"))?;
            table.insert(&name, value).map_err(|error| format!("{name:?}: {error}"))?;
        }
        Ok(table)
    }
}

impl Told {
    fn of(value: &Value<'_>) -> Option<Self> {
        Some(Told::Typed(match value {
            Value::Void => return Some(Told::Null),
            Value::Bool(truth) => return Some(Told::Bool(*truth)),
            Value::Str(text) => match text.to_str() {
                Ok(text) => return Some(Told::Text(text.to_owned())),
                Err(_) => Typed::TextBase64(STANDARD.encode(text.as_bytes())),
            },
            Value::I8(n) => Typed::I8(*n),
            Value::U8(n) => Typed::U8(*n),
            Value::I16(n) => Typed::I16(*n),
            Value::U16(n) => Typed::U16(*n),
            Value::I32(n) => Typed::I32(*n),
            Value::U32(n) => Typed::U32(*n),
            Value::I64(n) => Typed::I64(*n),
            Value::F32(n) => Typed::F32(n.to_string()),
            Value::F64(n) => Typed::F64(n.to_string()),
            Value::Decimal { scale, value } => Typed::Decimal { scale: *scale, value: *value },
            Value::Timestamp(seconds) => Typed::Timestamp(*seconds),
            Value::Bytes(bytes) => Typed::BytesBase64(STANDARD.encode(bytes)),
            Value::Array(array) => {
                let all = array.iter().map(|value| Told::of(&value)).collect::<Option<Vec<_>>>();
                Typed::Array(all?)
            }
            Value::Table(table) => Typed::Table(Pairs::of(table)?),
            _ => return None,
        }))
    }

    fn into_value(self) -> Result<Value<'static>, String> {
        let typed = match self {
            Told::Null => return Ok(Value::Void),
            Told::Bool(truth) => return Ok(truth.into()),
            Told::Text(text) => return Ok(text.into()),
            Told::Typed(typed) => typed,
        };
        Ok(match typed {
            Typed::I8(n) => n.into(),
            Typed::U8(n) => n.into(),
            Typed::I16(n) => n.into(),
            Typed::U16(n) => n.into(),
            Typed::I32(n) => n.into(),
            Typed::U32(n) => n.into(),
            Typed::I64(n) => n.into(),
            Typed::F32(text) => Value::F32(number(&text)?),
            Typed::F64(text) => Value::F64(number(&text)?),
            Typed::Decimal { scale, value } => Value::Decimal { scale, value },
            Typed::Timestamp(seconds) => Value::Timestamp(seconds),
            Typed::TextBase64(text) => Value::Str(decoded(&text, "text_base64")?.into()),
            Typed::BytesBase64(text) => Value::Bytes(decoded(&text, "bytes_base64")?.into()),
            Typed::Array(all) => {
                let mut array = Array::new();
                for told in all {
                    array.push(told.into_value()?).map_err(|error| error.to_string())?;
                }
                Value::Array(array)
            }
            Typed::Table(pairs) => Value::Table(pairs.into_table()?),
        })
    }
}

fn number<N: std::str::FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| format!("{text:?} is no number"))
}

impl Serialize for Pairs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl Serialize for Told {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Told::Null => serializer.serialize_unit(),
            Told::Bool(truth) => serializer.serialize_bool(*truth),
            Told::Text(text) => serializer.serialize_str(text),
            Told::Typed(typed) => typed.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reading;
        impl<'de> Visitor<'de> for Reading {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of names and values")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Pairs, M::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Reading)
    }
}

impl<'de> Deserialize<'de> for Told {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reading;
        impl<'de> Visitor<'de> for Reading {
            type Value = Told;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    r#"a text, true, false, null, or a value with its type such as {"i32": 5}"#,
                )
            }

            fn visit_unit<E>(self) -> Result<Told, E> {
                Ok(Told::Null)
            }

            fn visit_bool<E>(self, truth: bool) -> Result<Told, E> {
                Ok(Told::Bool(truth))
            }

            fn visit_str<E>(self, text: &str) -> Result<Told, E> {
                Ok(Told::Text(text.to_owned()))
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Told, M::Error> {
                Typed::deserialize(MapAccessDeserializer::new(map)).map(Told::Typed)
            }
        }
        deserializer.deserialize_any(Reading)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(properties: &Properties<'_>, body: &'static [u8]) -> Line {
        Line {
            exchange: "x".to_owned(),
            routing_key: "k".to_owned(),
            properties: RawProperties::from(properties),
            body: Bytes::from_static(body),
        }
    }

    #[test]
    fn a_line_is_easily_read() {
        let headers = Table::from_pairs([
            ("tenant", "acme".into()),
            ("n", 5i64.into()),
            ("at", Value::Timestamp(7)),
            ("ok", true.into()),
        ]);
        let properties = Properties {
            message_id: Some("m".try_into().unwrap()),
            headers: Some(headers.unwrap()),
            ..Properties::default()
        };
        assert_eq!(
            line(&properties, b"{}").write().unwrap(),
            r#"{"exchange":"x","routing_key":"k","properties":{"headers":{"tenant":"acme","n":{"i64":5},"at":{"timestamp":7},"ok":true},"message_id":"m"},"body":"{}"}"#
        );
        assert_eq!(
            line(&Properties::default(), b"\xff").write().unwrap(),
            r#"{"exchange":"x","routing_key":"k","body_base64":"/w=="}"#
        );
    }

    #[test]
    fn a_line_has_no_character_that_a_terminal_would_obey() {
        let headers = Table::from_pairs([("\u{202e}", "\u{9b}2J".into())]);
        let properties = Properties { headers: Some(headers.unwrap()), ..Properties::default() };
        let line = line(&properties, "a\u{85}\u{1b}\u{2066}".as_bytes());
        let written = line.write().unwrap();
        assert!(written.is_ascii(), "{written:?}");
        assert_eq!(Line::read(written.as_bytes()), Ok(line));
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said() {
        let table = [
            ("{", "EOF"),
            ("[]", "there is no body"),
            (r#"{"body":"a","body_base64":""}"#, "both body"),
            (r#"{"body_base64":"?"}"#, "body_base64"),
            (r#"{"body":"","colour":"red"}"#, "colour"),
            (r#"{"body":"","properties":{"headers":{"n":5}}}"#, "a value with its type"),
            (r#"{"body":"","properties":{"headers":{"n":{"i8":500}}}}"#, "expected i8"),
            (r#"{"body":"","properties":{"headers":{"n":{"f64":"NaN"}}}}"#, "\"n\""),
            (r#"{"body":"","properties":{"headers":{"n":{"word":"x"}}}}"#, "word"),
            (r#"{"body":"","properties":{"priority":300}}"#, "expected u8"),
        ];
        for (line, word) in table {
            let error = Line::read(line.as_bytes()).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
        let long = format!(r#"{{"body":"","properties":{{"message_id":"{}"}}}}"#, "x".repeat(256));
        assert!(Line::read(long.as_bytes()).unwrap_err().contains("message_id"));
    }

    #[test]
    fn what_json_cannot_tell_is_told_byte_for_byte() {
        // A name twice; an integer in another spelling; a name that is no text; malformed.
        let doubled = b"\x20\x00\x00\x00\x00\x08\x01nt\x01\x01nt\x00".as_slice();
        let spelled = b"\x20\x00\x00\x00\x00\x0b\x01nL\0\0\0\0\0\0\0\x05".as_slice();
        let odd = b"\x20\x00\x00\x00\x00\x04\x01\xfft\x01".as_slice();
        let malformed = b"\x88\x00\x02ab".as_slice();
        let unknown = b"\x00\x01".as_slice();
        for bytes in [doubled, spelled, odd, malformed, unknown] {
            let mut line = line(&Properties::default(), b"");
            line.properties = RawProperties::new(Bytes::copy_from_slice(bytes));
            let written = line.write().unwrap();
            assert!(written.contains("properties_base64"), "{written}");
            assert_eq!(Line::read(written.as_bytes()), Ok(line));
        }
    }

    fn short() -> impl Strategy<Value = ShortStr<'static>> {
        proptest::collection::vec(any::<u8>(), 0..20)
            .prop_map(|bytes| ShortStr::from_bytes(bytes).unwrap())
            .boxed()
            .prop_union("[a-zä\"]{0,10}".prop_map(|text| text.try_into().unwrap()).boxed())
    }

    fn value() -> impl Strategy<Value = Value<'static>> {
        let leaf = prop_oneof![
            Just(Value::Void),
            any::<bool>().prop_map(Value::Bool),
            any::<i8>().prop_map(Value::I8),
            any::<u8>().prop_map(Value::U8),
            any::<i16>().prop_map(Value::I16),
            any::<u16>().prop_map(Value::U16),
            any::<i32>().prop_map(Value::I32),
            any::<u32>().prop_map(Value::U32),
            any::<i64>().prop_map(Value::I64),
            any::<f32>().prop_map(Value::F32),
            any::<f64>().prop_map(Value::F64),
            (any::<u8>(), any::<u32>()).prop_map(|(scale, value)| Value::Decimal { scale, value }),
            any::<u64>().prop_map(Value::Timestamp),
            any::<String>().prop_map(Value::from),
            any::<Vec<u8>>().prop_map(|bytes| Value::Str(bytes.into())),
            any::<Vec<u8>>().prop_map(|bytes| Value::Bytes(bytes.into())),
        ];
        leaf.prop_recursive(5, 30, 5, |inner| {
            let values = proptest::collection::vec(inner.clone(), 0..5);
            let fields = proptest::collection::vec((short(), inner), 0..5);
            prop_oneof![
                values.prop_map(|values| {
                    let mut array = Array::new();
                    for value in values {
                        let _ = array.push(value);
                    }
                    Value::Array(array)
                }),
                fields.prop_map(|fields| Value::Table(table(fields))),
            ]
        })
    }

    fn table(fields: Vec<(ShortStr<'static>, Value<'static>)>) -> Table<'static> {
        let mut table = Table::new();
        for (name, value) in fields {
            // A number that is not finite is refused.
            let _ = table.insert(&name, value);
        }
        table
    }

    prop_compose! {
        fn properties()(
            texts in proptest::collection::vec(proptest::option::of(short()), 9),
            headers in proptest::option::of(proptest::collection::vec((short(), value()), 0..6)),
            delivery_mode in any::<Option<u8>>(),
            priority in any::<Option<u8>>(),
            timestamp in any::<Option<u64>>(),
        ) -> Properties<'static> {
            let mut texts = texts.into_iter();
            let mut text = || texts.next().flatten();
            Properties {
                content_type: text(),
                content_encoding: text(),
                headers: headers.map(table),
                delivery_mode,
                priority,
                correlation_id: text(),
                reply_to: text(),
                expiration: text(),
                message_id: text(),
                timestamp,
                kind: text(),
                user_id: text(),
                app_id: text(),
                cluster_id: None,
            }
        }
    }

    proptest! {
        #[test]
        fn every_message_comes_back_as_it_was(
            properties in properties(),
            exchange in "[a-z.]{0,20}",
            routing_key in ".{0,20}",
            body in any::<Vec<u8>>(),
        ) {
            let properties = RawProperties::from(&properties);
            let line = Line { exchange, routing_key, properties, body: body.into() };
            let written = line.write().unwrap();
            prop_assert!(!written.contains('\n'));
            prop_assert_eq!(Line::read(written.as_bytes()), Ok(line));
        }
    }
}
