//! Messages as lines of JSON, from which exactly the same messages can be made again.
//!
//! The format is described at [`ParkingLot::export`](super::ParkingLot::export).

use std::borrow::Cow;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::ParkedMessage;
use crate::amqp::{Properties, RawProperties, ShortStr};
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
#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Form<'a> {
    exchange: Cow<'a, str>,
    routing_key: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    properties: Option<Properties<'a>>,
    /// Instead of all properties, if they cannot be told otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    properties_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body_base64: Option<String>,
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
        let mut form = Form {
            exchange: (&self.exchange).into(),
            routing_key: (&self.routing_key).into(),
            ..Form::default()
        };
        if self.properties != RawProperties::default() {
            form.properties = exactly(&self.properties);
            let encode = || STANDARD.encode(self.properties.as_bytes());
            form.properties_base64 = form.properties.is_none().then(encode);
        }
        match std::str::from_utf8(&self.body) {
            Ok(text) => form.body = Some(text.into()),
            Err(_) => form.body_base64 = Some(STANDARD.encode(&self.body)),
        }
        // It may be shown on a terminal.
        serde_json::to_string(&form).map(|line| escape_json(&line))
    }

    /// What a line tells, or what is wrong with it.
    pub(super) fn read(line: &[u8]) -> Result<Self, String> {
        let form: Form<'_> = serde_json::from_slice(line).map_err(|error| {
            let error = without_value(&error.to_string());
            format!("not an exported message, as `export` writes it: {error}")
        })?;
        let body = match (form.body, form.body_base64) {
            (Some(_), Some(_)) => return Err("both body and body_base64 are given".to_owned()),
            (Some(text), None) => text.into_owned().into(),
            (None, Some(text)) => decoded(&text, "body_base64")?,
            (None, None) => return Err("there is no body".to_owned()),
        };
        let properties = match (form.properties, form.properties_base64) {
            (Some(_), Some(_)) => {
                return Err("both properties and properties_base64 are given".to_owned());
            }
            (None, None) => RawProperties::default(),
            (None, Some(text)) => RawProperties::new(decoded(&text, "properties_base64")?),
            (Some(properties), None) => RawProperties::from(&properties),
        };
        for (what, name) in [("exchange", &form.exchange), ("routing_key", &form.routing_key)] {
            ShortStr::try_from(&**name).map_err(|error| format!("{what}: {error}"))?;
        }
        let (exchange, routing_key) = (form.exchange.into_owned(), form.routing_key.into_owned());
        Ok(Line { exchange, routing_key, properties, body })
    }
}

fn decoded(text: &str, what: &str) -> Result<Bytes, String> {
    STANDARD.decode(text).map(Bytes::from).map_err(|error| format!("{what}: {error}"))
}

/// The properties, if exactly the same can be made of their JSON: not of a name that is there twice or is no text, nor of an
/// integer in another spelling.
fn exactly(raw: &RawProperties) -> Option<Properties<'_>> {
    let properties = raw.get();
    // As deep as in a line: there is a limit to how deep JSON is read.
    let json = serde_json::to_string(&[&properties]).ok()?;
    let [again]: [Properties<'_>; 1] = serde_json::from_str(&json).ok()?;
    (RawProperties::from(&again) == *raw).then_some(properties)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::amqp::{Array, Table, Value};

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
        let error = Line::read(long.as_bytes()).unwrap_err();
        assert!(error.contains("256 bytes") && error.contains("column 297"), "{error}");
    }

    #[test]
    fn headers_of_any_depth_that_are_written_can_be_read() {
        for depth in 40..=64 {
            let nested = (0..depth).fold(Value::from(5i64), |value, _| {
                Value::Table(Table::from_pairs([("n", value)]).unwrap())
            });
            let Value::Table(headers) = nested else { unreachable!("a table is around it") };
            let properties = Properties { headers: Some(headers), ..Properties::default() };
            let line = line(&properties, b"");
            assert_eq!(Line::read(line.write().unwrap().as_bytes()), Ok(line), "depth {depth}");
        }
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
