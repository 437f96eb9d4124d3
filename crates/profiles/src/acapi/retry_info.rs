//! The header in which Kicks (Sneakers from 2.12 on) says why it has given a message up: JSON, in which a list has the
//! newest first.

use leveret::amqp::{Properties, Table, Value};
use leveret::retry::{FailedMessage, ForwardedMessage};
use serde_json::{Map, Value as Json, json};

use crate::queues::MAX_HISTORY;

const HEADER: &str = "retry_info";

/// Says it of a message that is parked, together with what was said before.
pub(super) fn write(message: &mut ForwardedMessage, failed: &FailedMessage<'_>) {
    let before = message.remove_header(HEADER);
    // As they were written for Leveret's own readers: cut, and a time of ISO 8601.
    let text = |name| message.header(name).and_then(|value| value.as_str().map(str::to_owned));
    let error = text("x-leveret-error");
    let mut info = json!({
        "error": error,
        "num_attempts": failed.failures(),
        "failed_at": text("x-leveret-last-failure"),
        "error_class": text("x-leveret-error-kind"),
        "error_message": error,
    });
    if !failed.is_brief() {
        info["properties"] = of_properties(&failed.properties().get());
    }
    let info = match before {
        Some(before) if !failed.is_brief() => {
            let before = match before.as_str().map(serde_json::from_str) {
                Some(Ok(Json::Array(before))) => before,
                Some(Ok(before)) => vec![before],
                _ => vec![json!({ "error": "Failed to parse retry info" })],
            };
            Json::Array([info].into_iter().chain(before).take(MAX_HISTORY).collect())
        }
        _ => info,
    };
    message.set_header(HEADER, info.to_string());
}

/// Properties under the names that Bunny has for them.
fn of_properties(properties: &Properties<'_>) -> Json {
    let mut all = Map::new();
    let texts = [
        ("content_type", &properties.content_type),
        ("content_encoding", &properties.content_encoding),
        ("correlation_id", &properties.correlation_id),
        ("reply_to", &properties.reply_to),
        ("expiration", &properties.expiration),
        ("message_id", &properties.message_id),
        ("type", &properties.kind),
        ("user_id", &properties.user_id),
        ("app_id", &properties.app_id),
        ("cluster_id", &properties.cluster_id),
    ];
    for (name, text) in texts {
        if let Some(text) = text {
            all.insert(name.to_owned(), text.to_str_lossy().into());
        }
    }
    let numbers = [
        ("delivery_mode", properties.delivery_mode.map(u64::from)),
        ("priority", properties.priority.map(u64::from)),
        ("timestamp", properties.timestamp),
    ];
    for (name, number) in numbers {
        if let Some(number) = number {
            all.insert(name.to_owned(), number.into());
        }
    }
    if let Some(headers) = &properties.headers {
        let mut headers = of_table(headers);
        // That of an earlier failure is in the list already.
        headers.remove(HEADER);
        all.insert("headers".to_owned(), headers.into());
    }
    Json::Object(all)
}

fn of_table(table: &Table<'_>) -> Map<String, Json> {
    let fields = table.iter().map(|(name, value)| (name.to_str_lossy().into_owned(), of(&value)));
    fields.collect()
}

fn of(value: &Value<'_>) -> Json {
    match value {
        Value::Bool(truth) => (*truth).into(),
        Value::F32(number) => (*number).into(),
        Value::F64(number) => (*number).into(),
        Value::Decimal { scale, value } => {
            (f64::from(*value) / 10f64.powi(i32::from(*scale))).into()
        }
        Value::Timestamp(seconds) => (*seconds).into(),
        Value::Array(values) => Json::Array(values.iter().map(|value| of(&value)).collect()),
        Value::Table(table) => of_table(table).into(),
        other => match (other.as_i64(), other.as_bytes()) {
            (Some(number), _) => number.into(),
            (_, Some(bytes)) => String::from_utf8_lossy(bytes).into(),
            _ => Json::Null,
        },
    }
}
