//! Counting what the broker counts: how often consumers have rejected a message.

use std::time::SystemTime;

use super::stamp::{self, Origin, header};
use crate::amqp::RawProperties;
use crate::deaths::Deaths;

/// How often consumers of this queue have rejected a message: what the broker says in `x-death`, and what a consumer has noted
/// that published it to the end of the queue. For designs that [count rejections](super::RetryProfile::counts_rejections).
pub fn rejections(properties: &RawProperties, queue: &str) -> u32 {
    let noted = properties.has_headers().then(|| properties.header(header::REJECTED)).flatten();
    let noted = noted.and_then(|noted| stamp::count(&noted)).unwrap_or_default();
    Deaths::of(properties).rejected_from(queue).saturating_add(noted)
}

/// Where a message was published to before consumers of this queue rejected it.
pub(super) fn origin(properties: &RawProperties, queue: &str) -> Option<Origin> {
    Origin::of_death(Deaths::of(properties).rejection(queue)?)
}

/// When consumers of this queue rejected a message first.
pub(super) fn first(properties: &RawProperties, queue: &str) -> Option<SystemTime> {
    stamp::time(Deaths::of(properties).rejection(queue)?.time?)
}
