//! What broker is on the other side.

use crate::amqp::{Table, Value};

/// Major and minor version of the broker, or zeros.
pub(crate) fn version(properties: &Table<'_>) -> (u32, u32) {
    let version = properties.get("version");
    let text = version.as_ref().and_then(Value::as_str).unwrap_or_default();
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_the_broker_is_read() {
        for (text, expected) in
            [("4.3.6", (4, 3)), ("3.10.8", (3, 10)), ("4", (4, 0)), ("", (0, 0)), ("x.y", (0, 0))]
        {
            let properties = Table::from_pairs([("version", text.into())]).unwrap();
            assert_eq!(version(&properties), expected, "{text}");
        }
        assert_eq!(version(&Table::new()), (0, 0));
    }
}
