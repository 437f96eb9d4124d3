//! Deaths as 3.10 keeps them: in the `x-death` header, whoever wrote it.

use leveret_wire::{Properties, RawProperties, Table, Value};

use super::{Death, Dying, REJECTED, Station, X_DEATH};
use crate::fields::{Fields, array, text};

/// The properties of a message after a death.
pub(super) fn after(dying: &Dying<'_>, death: &Death<'_>) -> RawProperties {
    let mut properties = dying.properties.get();
    let headers = properties.headers.take().unwrap_or_default();
    let mut fields = Fields::of(&headers);
    let entry = entry(dying, death, &properties, &fields);
    let deaths = match fields.get(X_DEATH) {
        None => {
            fields.set("x-first-death-reason", death.reason.name());
            fields.set("x-first-death-queue", text(&death.queue));
            fields.set("x-first-death-exchange", text(&dying.exchange));
            vec![entry.to_table()]
        }
        Some(found) => match tables(found) {
            Some(before) => updated(&before, entry, death).unwrap_or_else(|entry| vec![entry]),
            None => vec![entry.to_table()],
        },
    };
    fields.set(X_DEATH, array(deaths.into_iter().map(Value::Table)));
    if death.routing_key.is_some() {
        fields.remove("CC");
    }
    fields.sort();
    properties.headers = Some(fields.to_table());
    properties.expiration = None;
    RawProperties::from(&properties)
}

/// Whether the last death in that queue has no rejection in it or after it.
pub(super) fn is_cycle(queue: &[u8], properties: &RawProperties) -> bool {
    let deaths = properties.header(X_DEATH);
    let deaths = deaths.as_ref().and_then(tables).unwrap_or_default();
    let names: Vec<_> =
        deaths.iter().map(|death| (death.get("queue"), death.get("reason"))).collect();
    // Only what is written as text counts here, unlike where deaths are added up.
    let text = |value: &Option<Value<'_>>| matches!(value, Some(Value::Str(_)));
    super::is_cycle(
        queue,
        names.iter().map(|(queue, reason)| Station {
            queue: queue.as_ref().filter(|_| text(queue)).and_then(Value::as_bytes),
            rejected: text(reason)
                && reason.as_ref().and_then(Value::as_bytes) == Some(REJECTED.as_bytes()),
        }),
    )
}

/// What is written of this death if it is the first of its kind.
fn entry<'a>(
    dying: &'a Dying<'_>,
    death: &'a Death<'_>,
    properties: &'a Properties<'_>,
    headers: &Fields<'_>,
) -> Fields<'a> {
    // Those of `CC` are taken from the header, and so those of `BCC` stay secret: that header is gone since the
    // message was published.
    let cc = headers.get("CC").and_then(Value::as_array);
    let cc = cc.into_iter().flat_map(|keys| keys.iter().filter(|key| key.tag() == b'S'));
    let keys = dying.routing_keys.first().map(|key| text(key).into()).into_iter().chain(cc);
    let mut entry = Fields::default();
    entry.push("count", 1i64);
    entry.push("reason", death.reason.name());
    entry.push("queue", text(&death.queue));
    entry.push("time", Value::Timestamp(death.time));
    entry.push("exchange", text(&dying.exchange));
    entry.push("routing-keys", array(keys));
    if let Some(expiration) = &properties.expiration {
        entry.push("original-expiration", text(expiration));
    }
    entry
}

/// The deaths with one more: the entry, or the one of the same queue and reason counted up, in front of the others.
/// The entry alone if that one has a count that nothing can be added to.
fn updated(
    before: &[Table<'_>],
    entry: Fields<'_>,
    death: &Death<'_>,
) -> Result<Vec<Table<'static>>, Table<'static>> {
    let (queue, reason) = (Value::from(text(&death.queue)), Value::from(death.reason.name()));
    let mut newest = None;
    let mut others = Vec::new();
    for fields in merged(before) {
        if same(fields.get("queue"), Some(&queue)) && same(fields.get("reason"), Some(&reason)) {
            newest = Some(fields);
        } else {
            others.push(fields.to_table());
        }
    }
    let mut newest = match newest {
        None => entry,
        Some(mut fields) => {
            match fields.get("count") {
                None | Some(Value::Void) => fields.push_front("count", 1i64),
                Some(count) => match integer(count) {
                    Some(count) => fields.set("count", count.wrapping_add(1)),
                    None => return Err(entry.to_table()),
                },
            }
            fields
        }
    };
    newest.sort();
    others.insert(0, newest.to_table());
    Ok(others)
}

/// One entry for each queue and reason, with a count: that of the first, or else how many there were. That turns their
/// order round, except where there is nothing to merge because there is one at most.
fn merged<'a>(deaths: &'a [Table<'_>]) -> Vec<Fields<'a>> {
    let mut merged: Vec<(Fields<'a>, i64)> = Vec::new();
    for death in deaths {
        let death = Fields::of(death);
        let alike = |(other, _): &&mut (Fields<'a>, i64)| {
            ["queue", "reason"].iter().all(|name| same(other.get(name), death.get(name)))
        };
        match merged.iter_mut().find(alike) {
            Some((_, times)) => *times += 1,
            None => merged.push((death, 1)),
        }
    }
    if deaths.len() > 1 {
        for (death, times) in &mut merged {
            if matches!(death.get("count"), None | Some(Value::Void)) {
                death.push_front("count", *times);
            }
        }
        merged.reverse();
    }
    merged.into_iter().map(|(death, _)| death).collect()
}

/// The entries of an `x-death`, if it is an array of nothing but tables.
fn tables<'a>(deaths: &'a Value<'_>) -> Option<Vec<Table<'a>>> {
    let entry = |value: Value<'a>| match value {
        Value::Table(table) => Some(table),
        _ => None,
    };
    deaths.as_array()?.iter().map(entry).collect()
}

/// Whether two values are the same to RabbitMQ, which forgets how text and integers were written when it compares.
fn same(one: Option<&Value<'_>>, other: Option<&Value<'_>>) -> bool {
    match (one, other) {
        (None | Some(Value::Void), None | Some(Value::Void)) => true,
        (Some(one), Some(other)) => {
            let bytes = one.as_bytes().is_some() && one.as_bytes() == other.as_bytes();
            let number = integer(one).is_some() && integer(one) == integer(other);
            bytes || number || one == other
        }
        _ => false,
    }
}

fn integer(value: &Value<'_>) -> Option<i64> {
    match value {
        Value::Timestamp(seconds) => i64::try_from(*seconds).ok(),
        other => other.as_i64(),
    }
}
