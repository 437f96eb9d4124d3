//! What the broker says of itself.

use leveret_wire::{Table, Value};

use crate::profile::Profile;

/// As RabbitMQ of that version says it, since clients branch on it, but for the platform.
pub(super) fn server_properties(profile: Profile) -> Table<'static> {
    let capabilities = [
        "publisher_confirms",
        "exchange_exchange_bindings",
        "basic.nack",
        "consumer_cancel_notify",
        "connection.blocked",
        "consumer_priorities",
        "authentication_failure_close",
        "per_consumer_qos",
        "direct_reply_to",
    ];
    let capabilities = Table::from_pairs(capabilities.map(|name| (name, Value::from(true))));
    let properties = capabilities.and_then(|capabilities| {
        Table::from_pairs([
            ("capabilities", capabilities.into()),
            ("cluster_name", "rabbit@leveret".into()),
            ("information", "Licensed under MIT or Apache-2.0".into()),
            ("platform", concat!("Leveret ", env!("CARGO_PKG_VERSION")).into()),
            ("product", "RabbitMQ".into()),
            ("version", profile.version().into()),
        ])
    });
    // All names are short and all values plain.
    properties.unwrap_or_default()
}
