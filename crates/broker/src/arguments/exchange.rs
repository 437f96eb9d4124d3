//! What an exchange may be declared as.

use leveret_wire::{ReplyCode, ShortStr, Table, Value};

use super::words;
use crate::erlang::type_name;
use crate::exchange::Kind;
use crate::profile::Profile;
use crate::refusal::Refusal;

/// The type of exchange that has this name.
pub(crate) fn exchange_kind(profile: Profile, kind: &ShortStr<'_>) -> Result<Kind, Refusal> {
    if let Some(kind) = Kind::parse(kind.as_bytes()) {
        return Ok(kind);
    }
    // RabbitMQ says "invalid" of every word that it uses for something else, whatever that may be.
    let what = if kind.is_empty() { "invalid" } else { "unknown" };
    let code = match profile {
        Profile::RabbitMq3_10 => ReplyCode::COMMAND_INVALID,
        Profile::RabbitMq4_3 => ReplyCode::PRECONDITION_FAILED,
    };
    Err(Refusal::new(code, format_args!("{what} exchange type '{kind}'")))
}

/// Where an exchange sends what it cannot route.
pub(crate) fn alternate_exchange(
    vhost: &str,
    name: &ShortStr<'_>,
    arguments: &Table<'_>,
) -> Result<Option<ShortStr<'static>>, Refusal> {
    exchange_argument(arguments, "alternate-exchange", words::exchange(vhost, name))
}

/// An argument that names an exchange, of a queue or of an exchange.
pub(super) fn exchange_argument(
    arguments: &Table<'_>,
    argument: &str,
    of: words::Resource<'_>,
) -> Result<Option<ShortStr<'static>>, Refusal> {
    match arguments.get(argument) {
        None => Ok(None),
        Some(Value::Str(text)) => Ok(Some(short(text.as_bytes()))),
        Some(other) => {
            let type_name = type_name(&other);
            let text = format!("invalid type '{type_name}' for arg '{argument}' in {of}");
            Err(Refusal::precondition_failed(text))
        }
    }
}

/// As much of a name or key as AMQP can carry. RabbitMQ takes a longer one, to which nothing can ever correspond.
pub(super) fn short(bytes: &[u8]) -> ShortStr<'static> {
    let kept = &bytes[..bytes.len().min(ShortStr::MAX)];
    ShortStr::from_bytes(kept.to_vec()).unwrap_or_default()
}
