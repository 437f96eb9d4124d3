//! Names of queues and exchanges that clients may not have.

use leveret_wire::{ReplyCode, ShortStr};

use crate::refusal::Refusal;

/// Names that begin like this are the broker's own.
const RESERVED: &[u8] = b"amq.";

/// The name that is meant by declaring, deleting, binding and unbinding: without line breaks.
pub(crate) fn declared_name<'a>(name: &'a ShortStr<'_>) -> ShortStr<'a> {
    let is_break = |byte: &u8| matches!(byte, b'\r' | b'\n');
    if !name.as_bytes().iter().any(is_break) {
        return name.borrowed();
    }
    let kept: Vec<u8> = name.as_bytes().iter().copied().filter(|byte| !is_break(byte)).collect();
    ShortStr::from_bytes(kept).unwrap_or_default()
}

/// Whether a client may declare a queue of this name, if there is none yet.
pub(crate) fn check_queue_name(name: &ShortStr<'_>) -> Result<(), Refusal> {
    check_reserved("queue", name)
}

/// Whether a client may declare an exchange of this name, if there is none yet.
pub(crate) fn check_exchange_name(name: &ShortStr<'_>) -> Result<(), Refusal> {
    check_reserved("exchange", name)
}

/// Whether a client may delete an exchange of this name, be there one or not.
pub(crate) fn check_exchange_deletion(vhost: &str, name: &ShortStr<'_>) -> Result<(), Refusal> {
    if !name.as_bytes().starts_with(RESERVED) {
        return Ok(());
    }
    let text = format!("deletion of system exchange '{name}' in vhost '{vhost}' not allowed");
    Err(Refusal::new(ReplyCode::ACCESS_REFUSED, text))
}

fn check_reserved(what: &str, name: &ShortStr<'_>) -> Result<(), Refusal> {
    if !name.as_bytes().starts_with(RESERVED) {
        return Ok(());
    }
    let text = format!("{what} name '{name}' contains reserved prefix 'amq.*'");
    Err(Refusal::new(ReplyCode::ACCESS_REFUSED, text))
}
