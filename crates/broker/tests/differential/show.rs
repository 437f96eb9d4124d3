//! Methods and messages as text that two brokers can be compared by.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use leveret_wire::{Method, Properties, Table, Value};

/// What a broker calls "now" is this near at most.
const RECENT_SECONDS: u64 = 24 * 3600;

/// Bodies from this length on are not shown whole.
const LONG: usize = 60;

/// A method with those of its fields that say something: `queue.declare queue: "q1", durable: true`.
pub(super) fn bare(method: &Method<'_>) -> String {
    let debug = format!("{method:?}");
    let inside = debug.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}'));
    let fields = inside.map_or("", |(fields, _)| fields.trim());
    let mut fields = format!("{fields},");
    for nothing in [": false,", ": \"\",", ": {},", ": None,", ": 0,"] {
        while let Some(at) = fields.find(nothing) {
            let name = fields[..at].rfind(' ').map_or(0, |space| space + 1);
            // A table's own entry, whose name is quoted, is something even if it is empty.
            if fields[name..at].contains('"') {
                fields.replace_range(at..at + 1, "=");
            } else {
                fields.replace_range(name..at + nothing.len(), "");
            }
        }
    }
    let fields: Vec<&str> = fields.split_whitespace().collect();
    format!("{} {}", method.name(), fields.join(" ").trim_end_matches(',')).trim_end().to_owned()
}

/// A body, or what tells it from others if it is long.
pub(super) fn show_body(body: &[u8]) -> String {
    match body.get(..LONG) {
        None => format!("\"{}\"", body.escape_ascii()),
        Some(begin) => {
            let sum = body
                .iter()
                .fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
            format!("\"{}…\" of {} bytes ({sum:x})", begin.escape_ascii(), body.len())
        }
    }
}

/// The properties that are there; header values with their types.
pub(super) fn show_properties(properties: &Properties<'_>) -> String {
    let mut text = String::from("{");
    macro_rules! show {
        ($($name:ident)*) => {$(
            if let Some(value) = &properties.$name {
                let _ = write!(text, " {}: {value:?}", stringify!($name));
            }
        )*};
    }
    show!(content_type content_encoding delivery_mode priority correlation_id reply_to expiration message_id);
    show!(timestamp kind user_id app_id cluster_id);
    if let Some(headers) = &properties.headers {
        text.push_str(" headers: ");
        show_table(&mut text, headers);
    }
    text.push_str(" }");
    text
}

fn show_table(text: &mut String, table: &Table<'_>) {
    text.push('{');
    for (number, (name, value)) in table.iter().enumerate() {
        let _ = write!(text, "{}{name:?}: ", if number == 0 { "" } else { ", " });
        show_value(text, &value);
    }
    text.push('}');
}

fn show_value(text: &mut String, value: &Value<'_>) {
    match value {
        Value::Table(table) => show_table(text, table),
        Value::Array(array) => {
            text.push('[');
            for (number, value) in array.iter().enumerate() {
                text.push_str(if number == 0 { "" } else { ", " });
                show_value(text, &value);
            }
            text.push(']');
        }
        Value::Timestamp(seconds) if is_recent(*seconds) => text.push_str("now"),
        Value::Str(_) | Value::Bool(_) | Value::Void | Value::Timestamp(_) => {
            let _ = write!(text, "{value:?}");
        }
        other => {
            let _ = write!(text, "{}({other:?})", char::from(other.tag()));
        }
    }
}

fn is_recent(seconds: u64) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    seconds.abs_diff(now) < RECENT_SECONDS
}
