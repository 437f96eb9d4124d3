//! RabbitMQ's words for what needs no more than a look: something is missing, in use, or another's.

use std::fmt;

use leveret_wire::{ReplyCode, ShortStr};

use crate::erlang::Binary;
use crate::profile::Profile;
use crate::refusal::Refusal;

/// `queue 'q' in vhost '/'`
pub(super) struct Resource<'a> {
    pub(super) what: &'static str,
    pub(super) name: &'a ShortStr<'a>,
    pub(super) vhost: &'a str,
}

impl fmt::Display for Resource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} '{}' in vhost '{}'", self.what, self.name, self.vhost)
    }
}

pub(super) fn queue<'a>(vhost: &'a str, name: &'a ShortStr<'a>) -> Resource<'a> {
    Resource { what: "queue", name, vhost }
}

pub(super) fn exchange<'a>(vhost: &'a str, name: &'a ShortStr<'a>) -> Resource<'a> {
    Resource { what: "exchange", name, vhost }
}

pub(crate) fn no_queue(vhost: &str, name: &ShortStr<'_>) -> Refusal {
    Refusal::not_found(format_args!("no {}", queue(vhost, name)))
}

/// A transaction published to a queue that is not there any more.
pub(crate) fn queue_gone(profile: Profile, vhost: &str, name: &ShortStr<'_>) -> Refusal {
    let binary = |bytes| Binary(bytes, profile);
    let (vhost, name) = (binary(vhost.as_bytes()), binary(name.as_bytes()));
    let text =
        format!("failed to deliver message: {{not_found,{{resource,{vhost},queue,{name}}}}}");
    Refusal::new(ReplyCode::RESOURCE_ERROR, text)
}

/// A queue without a name is the one that the channel declared last; it has declared none.
pub(crate) fn no_last_queue() -> Refusal {
    Refusal::not_found("no previously declared queue")
}

pub(crate) fn no_exchange(vhost: &str, name: &ShortStr<'_>) -> Refusal {
    Refusal::not_found(format_args!("no {}", exchange(vhost, name)))
}

/// Nobody may declare, delete or bind the default exchange.
pub(crate) fn default_exchange() -> Refusal {
    Refusal::new(ReplyCode::ACCESS_REFUSED, "operation not permitted on the default exchange")
}

/// Only exchanges may publish to it.
pub(crate) fn internal_exchange(vhost: &str, name: &ShortStr<'_>) -> Refusal {
    let text = format!("cannot publish to internal {}", exchange(vhost, name));
    Refusal::new(ReplyCode::ACCESS_REFUSED, text)
}

pub(crate) fn exchange_in_use(vhost: &str, name: &ShortStr<'_>) -> Refusal {
    Refusal::precondition_failed(format_args!("{} in use", exchange(vhost, name)))
}

pub(crate) fn queue_in_use(vhost: &str, name: &ShortStr<'_>) -> Refusal {
    Refusal::precondition_failed(format_args!("{} in use", queue(vhost, name)))
}

pub(crate) fn queue_not_empty(vhost: &str, name: &ShortStr<'_>) -> Refusal {
    Refusal::precondition_failed(format_args!("{} not empty", queue(vhost, name)))
}

/// The queue is exclusive to another connection; or it is not exclusive, and is declared as if it were.
pub(crate) fn owned_by_another(vhost: &str, name: &ShortStr<'_>) -> Refusal {
    let queue = queue(vhost, name);
    let text = format!(
        "cannot obtain exclusive access to locked {queue}. It could be originally declared on another connection or \
         the exclusive property value does not match that of the original declaration."
    );
    Refusal::new(ReplyCode::RESOURCE_LOCKED, text)
}

/// A consumer has the queue for itself; or wants to, and there is another.
pub(crate) fn exclusive_use(vhost: &str, name: &ShortStr<'_>) -> Refusal {
    Refusal::new(ReplyCode::ACCESS_REFUSED, format_args!("{} in exclusive use", queue(vhost, name)))
}

/// A quorum queue with a single active consumer is for consumers alone.
pub(crate) fn not_to_get_from(profile: Profile, vhost: &str, name: &ShortStr<'_>) -> Refusal {
    let kind = match profile {
        Profile::RabbitMq3_10 => "quorum",
        Profile::RabbitMq4_3 => "<<\"quorum\">>",
    };
    let queue = queue(vhost, name);
    let text = format!(
        "cannot obtain access to locked {queue}. basic.get operations are not supported by {kind} queues with single \
         active consumer"
    );
    Refusal::new(ReplyCode::RESOURCE_LOCKED, text)
}

/// The channel has a consumer of this name.
pub(crate) fn tag_in_use(tag: &ShortStr<'_>) -> Refusal {
    let text = format!("attempt to reuse consumer tag '{tag}'");
    Refusal::new(ReplyCode::NOT_ALLOWED, text)
}

/// Prefetch is counted in messages, not in bytes.
pub(crate) fn prefetch_size(bytes: u32) -> Refusal {
    Refusal::new(ReplyCode::NOT_IMPLEMENTED, format_args!("prefetch_size!=0 ({bytes})"))
}

pub(crate) fn immediate() -> Refusal {
    Refusal::new(ReplyCode::NOT_IMPLEMENTED, "immediate=true")
}

pub(crate) fn message_too_large(bytes: u64, max: u64) -> Refusal {
    Refusal::precondition_failed(format_args!(
        "message size {bytes} is larger than configured max size {max}"
    ))
}

/// A consumer of direct replies has to be without acks.
pub(crate) fn replies_cannot_be_acked() -> Refusal {
    Refusal::precondition_failed("reply consumer cannot acknowledge")
}

/// A channel has one consumer of direct replies at most.
pub(crate) fn replies_already_consumed() -> Refusal {
    Refusal::precondition_failed("reply consumer already set")
}

/// A short string of a method is not text. RabbitMQ blames no method for it.
pub(crate) fn not_utf8() -> Refusal {
    Refusal::new(ReplyCode::FRAME_ERROR, "Malformed UTF-8 in shortstr")
}
