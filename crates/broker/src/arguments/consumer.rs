//! What a consumer may ask for.

use leveret_wire::{ReplyCode, ShortStr, Table};

use super::queue::{Given, QueueArguments, QueueKind};
use super::{check, words};
use crate::profile::Profile;
use crate::refusal::Refusal;

const CLASSIC_3_10: &[&str] = &["x-cancel-on-ha-failover", "x-priority", "x-credit"];
const QUORUM_3_10: &[&str] = &["x-priority", "x-credit"];
const STREAM_3_10: &[&str] = &["x-stream-offset", "x-credit"];
const CLASSIC_4_3: &[&str] = &["x-priority"];
const QUORUM_4_3: &[&str] = &["x-priority", "x-consumer-timeout"];
const STREAM_4_3: &[&str] = &["x-stream-offset", "x-stream-filter", "x-stream-match-unfiltered"];

/// The arguments of a consumer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConsumerArguments {
    /// Consumers of a higher priority are served first.
    pub(crate) priority: i64,
    /// How long a delivery may stay unsettled, in milliseconds; if not given, the queue has it.
    pub(crate) consumer_timeout: Option<u64>,
}

impl ConsumerArguments {
    pub(crate) fn parse(
        profile: Profile,
        vhost: &str,
        queue: &ShortStr<'_>,
        of: &QueueArguments,
        arguments: &Table<'_>,
    ) -> Result<Self, Refusal> {
        let (known, elsewhere) = known(profile, of.kind);
        let given = Given { arguments, known, of: words::queue(vhost, queue) };
        let priority = given.take("x-priority", check::integer)?;
        given.take("x-cancel-on-ha-failover", check::truth)?;
        let consumer_timeout = given.take("x-consumer-timeout", check::non_negative)?;
        given.refuse_what_others_know(arguments.iter(), elsewhere, of.kind)?;
        Ok(ConsumerArguments { priority: priority.unwrap_or(0), consumer_timeout })
    }
}

/// What consumers of such a queue may ask for, and those of others.
fn known(
    profile: Profile,
    kind: QueueKind,
) -> (&'static [&'static str], [&'static [&'static str]; 2]) {
    let [classic, quorum, stream] = match profile {
        Profile::RabbitMq3_10 => [CLASSIC_3_10, QUORUM_3_10, STREAM_3_10],
        Profile::RabbitMq4_3 => [CLASSIC_4_3, QUORUM_4_3, STREAM_4_3],
    };
    match kind {
        QueueKind::Classic => (classic, [quorum, stream]),
        QueueKind::Quorum => (quorum, [classic, stream]),
    }
}

/// Whether a channel on which a prefetch for all consumers holds may consume from such a queue. (4.3 takes that prefetch and
/// does not do it, so there it holds on none.)
pub(crate) fn check_prefetch_for_all(
    profile: Profile,
    vhost: &str,
    queue: &ShortStr<'_>,
    of: &QueueArguments,
) -> Result<(), Refusal> {
    if profile >= Profile::RabbitMq4_3 || of.kind != QueueKind::Quorum {
        return Ok(());
    }
    let text = format!("{} does not support global qos", words::queue(vhost, queue));
    Err(Refusal::new(ReplyCode::NOT_IMPLEMENTED, text))
}
