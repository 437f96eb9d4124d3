//! What a queue may be declared as, and what that means.

use leveret_wire::{ReplyCode, ShortStr, Table, Value};

use super::check::{self, Wrong};
use super::equivalence::QueueDeclared;
use super::exchange::{exchange_argument, short};
use super::words;
use crate::profile::Profile;
use crate::refusal::Refusal;

// The arguments that each type of queue knows, in the order in which RabbitMQ compares them. What 4.3 has added stands at
// the end.
const CLASSIC: &[&str] = &[
    "x-expires",
    "x-message-ttl",
    "x-dead-letter-exchange",
    "x-dead-letter-routing-key",
    "x-max-length",
    "x-max-length-bytes",
    "x-max-priority",
    "x-overflow",
    "x-queue-mode",
    "x-queue-version",
    "x-single-active-consumer",
    "x-queue-type",
    "x-queue-master-locator",
    "x-queue-leader-locator",
];
const CLASSIC_IN_3_10: usize = 13;
const QUORUM: &[&str] = &[
    "x-dead-letter-exchange",
    "x-dead-letter-routing-key",
    "x-dead-letter-strategy",
    "x-expires",
    "x-max-length",
    "x-max-length-bytes",
    "x-max-in-memory-length",
    "x-max-in-memory-bytes",
    "x-overflow",
    "x-single-active-consumer",
    "x-queue-type",
    "x-quorum-initial-group-size",
    "x-delivery-limit",
    "x-message-ttl",
    "x-queue-leader-locator",
    "x-consumer-disconnected-timeout",
    "x-consumer-timeout",
    "x-delayed-retry-type",
    "x-delayed-retry-min",
    "x-delayed-retry-max",
];
const QUORUM_IN_3_10: usize = 15;
const STREAM: &[&str] = &[
    "x-max-length-bytes",
    "x-queue-type",
    "x-max-age",
    "x-stream-max-segment-size-bytes",
    "x-initial-cluster-size",
    "x-queue-leader-locator",
    "x-stream-filter-size-bytes",
];
const STREAM_IN_3_10: usize = 6;

/// What 4.3 says of an argument that it no longer permits; a reply cannot hold even this much of it.
const NO_MASTER_LOCATOR: &str = "Feature `queue_master_locator` is deprecated.\nBy default, this feature is not \
    permitted anymore.\nThe feature will be removed from a future major RabbitMQ version, regardless of the configuration; \
    actual version to be determined.\nTo continue using this feature";

/// How often 4.3 lets a delivery from a quorum queue fail, if nothing else is asked for.
const DELIVERY_LIMIT: u64 = 20;

/// The types of queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum QueueKind {
    #[default]
    Classic,
    Quorum,
}

impl QueueKind {
    /// RabbitMQ's name for it in its texts.
    pub(super) fn module(self) -> &'static str {
        match self {
            QueueKind::Classic => "rabbit_classic_queue",
            QueueKind::Quorum => "rabbit_quorum_queue",
        }
    }

    /// The type of a queue that exists with these arguments.
    pub(super) fn of(arguments: &Table<'_>) -> QueueKind {
        match arguments.get("x-queue-type").as_ref().and_then(Value::as_str) {
            Some("quorum") => QueueKind::Quorum,
            _ => QueueKind::Classic,
        }
    }

    /// The arguments that mean something to it, in the order in which they are compared.
    pub(super) fn known(self, profile: Profile) -> &'static [&'static str] {
        match (self, profile) {
            (QueueKind::Classic, Profile::RabbitMq3_10) => &CLASSIC[..CLASSIC_IN_3_10],
            (QueueKind::Classic, Profile::RabbitMq4_3) => CLASSIC,
            (QueueKind::Quorum, Profile::RabbitMq3_10) => &QUORUM[..QUORUM_IN_3_10],
            (QueueKind::Quorum, Profile::RabbitMq4_3) => QUORUM,
        }
    }

    /// The arguments that mean something to the other types.
    fn known_elsewhere(self, profile: Profile) -> [&'static [&'static str]; 2] {
        let other = match self {
            QueueKind::Classic => QueueKind::Quorum,
            QueueKind::Quorum => QueueKind::Classic,
        };
        let stream = match profile {
            Profile::RabbitMq3_10 => &STREAM[..STREAM_IN_3_10],
            Profile::RabbitMq4_3 => STREAM,
        };
        [other.known(profile), stream]
    }
}

/// What happens to a message for which there is no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Overflow {
    /// The oldest make room, and are dead-lettered.
    #[default]
    DropHead,
    /// It is refused.
    RejectPublish,
    /// It is refused, and dead-lettered.
    RejectPublishDlx,
}

/// How surely a dead letter arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DeadLetterStrategy {
    #[default]
    AtMostOnce,
    /// It is kept until a queue has taken it.
    AtLeastOnce,
}

/// The arguments of a queue. Times are in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueArguments {
    pub(crate) kind: QueueKind,
    pub(crate) message_ttl: Option<u64>,
    /// It is deleted when it was not used for so long.
    pub(crate) expires: Option<u64>,
    pub(crate) max_length: Option<u64>,
    pub(crate) max_length_bytes: Option<u64>,
    pub(crate) overflow: Overflow,
    pub(crate) dead_letter_exchange: Option<ShortStr<'static>>,
    pub(crate) dead_letter_routing_key: Option<ShortStr<'static>>,
    pub(crate) dead_letter_strategy: DeadLetterStrategy,
    pub(crate) max_priority: Option<u8>,
    pub(crate) single_active_consumer: bool,
    /// How many deliveries of a message may fail; if none, as many as do.
    pub(crate) delivery_limit: Option<u64>,
    /// How long a delivery may stay unsettled.
    pub(crate) consumer_timeout: Option<u64>,
}

impl QueueArguments {
    /// Reads the arguments of a queue that is to be made. Its name is the one that it will have, also if the broker has
    /// chosen it.
    pub(crate) fn parse(
        profile: Profile,
        vhost: &str,
        name: &ShortStr<'_>,
        declared: &QueueDeclared<'_>,
    ) -> Result<Self, Refusal> {
        let arguments = declared.arguments;
        let queue = || words::queue(vhost, name);
        let dead_letter_exchange = exchange_argument(arguments, "x-dead-letter-exchange", queue())?;
        let any = Given { arguments, known: &["x-queue-type"], of: queue() };
        let kind = any.take("x-queue-type", |value| queue_type(profile, value))?;
        let kind = match kind.unwrap_or(Wanted::Implemented(QueueKind::Classic)) {
            Wanted::Implemented(kind) => kind,
            Wanted::Stream => return Err(no_streams(vhost, name)),
        };

        // In the order in which RabbitMQ looks at them.
        let given = Given { arguments, known: kind.known(profile), of: queue() };
        let expires = given.take("x-expires", check::some_milliseconds)?;
        let message_ttl = given.take("x-message-ttl", check::milliseconds)?;
        let dead_letter_routing_key = given.take("x-dead-letter-routing-key", |value| {
            let key = short(check::text(value)?);
            match dead_letter_exchange {
                Some(_) => Ok(key),
                None => Err("routing_key_but_no_dlx_defined".to_owned()),
            }
        })?;
        let strategy = given.take("x-dead-letter-strategy", dead_letter_strategy())?;
        let max_length = given.take("x-max-length", check::non_negative)?;
        let max_length_bytes = given.take("x-max-length-bytes", check::non_negative)?;
        given.take("x-max-in-memory-length", check::non_negative)?;
        given.take("x-max-in-memory-bytes", check::non_negative)?;
        let max_priority = given.take("x-max-priority", check::at_most(u8::MAX))?;
        let overflow = given.take("x-overflow", overflow())?.unwrap_or_default();
        given.take("x-queue-mode", |value| queue_mode(profile, value))?;
        given.take("x-queue-version", |value| queue_version(profile, value))?;
        let single_active_consumer = given.take("x-single-active-consumer", check::truth)?;
        let consumer_timeout = given.take("x-consumer-timeout", check::non_negative)?;
        given.take("x-consumer-disconnected-timeout", check::non_negative)?;
        given.take("x-quorum-initial-group-size", check::positive)?;
        given.take("x-queue-leader-locator", leader_locator())?;
        given.refuse_what_others_know(
            in_order_of_refusal(profile, arguments),
            kind.known_elsewhere(profile),
            kind,
        )?;
        check_flags(vhost, name, kind, declared)?;
        if profile >= Profile::RabbitMq4_3 && arguments.get("x-queue-master-locator").is_some() {
            return Err(Refusal::new(ReplyCode::INTERNAL_ERROR, NO_MASTER_LOCATOR));
        }

        // A quorum queue cannot refuse and dead-letter at once, and takes the default instead.
        let overflow = match (kind, overflow) {
            (QueueKind::Quorum, Overflow::RejectPublishDlx) => Overflow::DropHead,
            (_, overflow) => overflow,
        };
        // What has to keep its dead letters must not drop them to make room.
        let can_keep = dead_letter_exchange.is_some() && overflow == Overflow::RejectPublish;
        Ok(QueueArguments {
            kind,
            message_ttl,
            expires,
            max_length,
            max_length_bytes,
            overflow,
            dead_letter_exchange,
            dead_letter_routing_key,
            dead_letter_strategy: strategy.filter(|_| can_keep).unwrap_or_default(),
            max_priority,
            single_active_consumer: single_active_consumer.unwrap_or(false),
            delivery_limit: delivery_limit(profile, kind, arguments),
            consumer_timeout,
        })
    }

    /// Whether a dead message is kept until it has arrived elsewhere. One that drops messages to make room does not.
    pub(crate) fn dead_letters_at_least_once(&self) -> bool {
        self.dead_letter_strategy == DeadLetterStrategy::AtLeastOnce
            && self.overflow == Overflow::RejectPublish
            && self.is_quorum()
    }

    pub(crate) fn is_quorum(&self) -> bool {
        self.kind == QueueKind::Quorum
    }
}

/// Whether the broker may choose a name for a queue with these arguments.
pub(crate) fn check_server_named(arguments: &Table<'_>) -> Result<(), Refusal> {
    match QueueKind::of(arguments) {
        QueueKind::Classic => Ok(()),
        kind => {
            let text = format!("Cannot declare a server-named queue for type {}", kind.module());
            Err(Refusal::precondition_failed(text))
        }
    }
}

/// Whether a queue can be asked to be deleted on a condition.
pub(crate) fn check_queue_deletion(
    vhost: &str,
    name: &ShortStr<'_>,
    arguments: &QueueArguments,
    delete: &leveret_wire::method::queue::Delete<'_>,
) -> Result<(), Refusal> {
    let flag = match (delete.if_unused, delete.if_empty) {
        (true, _) => "if-unused",
        (false, true) => "if-empty",
        (false, false) => return Ok(()),
    };
    match arguments.kind {
        QueueKind::Classic => Ok(()),
        QueueKind::Quorum => {
            let queue = words::queue(vhost, name);
            let text = format!(
                "cannot delete {queue}. queue.delete operations with {flag} flag set are not supported by quorum queues"
            );
            Err(Refusal::new(ReplyCode::NOT_IMPLEMENTED, text))
        }
    }
}

/// The arguments that were given, and those that mean something here.
pub(super) struct Given<'a> {
    pub(super) arguments: &'a Table<'a>,
    pub(super) known: &'static [&'static str],
    pub(super) of: words::Resource<'a>,
}

impl Given<'_> {
    /// The value of an argument, if it is given and means something here.
    pub(super) fn take<T>(
        &self,
        argument: &str,
        check: impl FnOnce(&Value<'_>) -> Result<T, Wrong>,
    ) -> Result<Option<T>, Refusal> {
        if !self.known.contains(&argument) {
            return Ok(None);
        }
        let Some(value) = self.arguments.get(argument) else { return Ok(None) };
        check(&value).map(Some).map_err(|wrong| {
            let text = format!("invalid arg '{argument}' for {}: {wrong}", self.of);
            Refusal::precondition_failed(text)
        })
    }

    /// An argument that nobody has heard of is no fault; one that means something to another type of queue is.
    pub(super) fn refuse_what_others_know<'t>(
        &self,
        mut arguments: impl Iterator<Item = (ShortStr<'t>, Value<'t>)>,
        elsewhere: [&[&str]; 2],
        kind: QueueKind,
    ) -> Result<(), Refusal> {
        let misplaced = arguments.find(|(name, _)| {
            let is_in = |names: &[&str]| names.iter().any(|known| *name == **known);
            !is_in(self.known) && elsewhere.iter().any(|names| is_in(names))
        });
        let Some((argument, _)) = misplaced else { return Ok(()) };
        let text =
            format!("invalid arg '{argument}' for {} of queue type {}", self.of, kind.module());
        Err(Refusal::precondition_failed(text))
    }
}

/// 4.3 gives a queue of no type the usual one, and sorts the arguments while doing so.
fn in_order_of_refusal<'t>(
    profile: Profile,
    arguments: &'t Table<'_>,
) -> impl Iterator<Item = (ShortStr<'t>, Value<'t>)> {
    let mut fields: Vec<_> = arguments.iter().collect();
    if profile >= Profile::RabbitMq4_3 && arguments.get("x-queue-type").is_none() {
        fields.sort_by(|(one, _), (other, _)| one.cmp(other));
    }
    fields.into_iter()
}

/// What a quorum queue cannot be.
fn check_flags(
    vhost: &str,
    name: &ShortStr<'_>,
    kind: QueueKind,
    declared: &QueueDeclared<'_>,
) -> Result<(), Refusal> {
    let property = match declared {
        _ if kind == QueueKind::Classic => return Ok(()),
        QueueDeclared { auto_delete: true, .. } => "auto-delete",
        QueueDeclared { exclusive: true, .. } => "exclusive-owner",
        QueueDeclared { durable: false, .. } => "non-durable",
        _ => return Ok(()),
    };
    let text = format!("invalid property '{property}' for {}", words::queue(vhost, name));
    Err(Refusal::precondition_failed(text))
}

/// A type that was asked for.
enum Wanted {
    Implemented(QueueKind),
    Stream,
}

fn queue_type(profile: Profile, value: &Value<'_>) -> Result<Wanted, Wrong> {
    match check::text(value)? {
        b"classic" => Ok(Wanted::Implemented(QueueKind::Classic)),
        b"quorum" => Ok(Wanted::Implemented(QueueKind::Quorum)),
        b"stream" => Ok(Wanted::Stream),
        b"" if profile >= Profile::RabbitMq4_3 => Ok(Wanted::Implemented(QueueKind::Classic)),
        other => Err(format!("\"unsupported queue type '{}'\"", String::from_utf8_lossy(other))),
    }
}

/// Not RabbitMQ's words: it has streams.
fn no_streams(vhost: &str, name: &ShortStr<'_>) -> Refusal {
    Refusal::precondition_failed(format_args!(
        "{}: streams are not implemented by the embedded broker; it has the queue types classic and quorum",
        words::queue(vhost, name)
    ))
}

fn dead_letter_strategy() -> impl Fn(&Value<'_>) -> Result<DeadLetterStrategy, Wrong> {
    let words = &[
        ("at-most-once", DeadLetterStrategy::AtMostOnce),
        ("at-least-once", DeadLetterStrategy::AtLeastOnce),
    ];
    check::word(words, "invalid_dlx_strategy")
}

fn overflow() -> impl Fn(&Value<'_>) -> Result<Overflow, Wrong> {
    let words = &[
        ("drop-head", Overflow::DropHead),
        ("reject-publish", Overflow::RejectPublish),
        ("reject-publish-dlx", Overflow::RejectPublishDlx),
    ];
    check::word(words, "invalid_overflow")
}

/// Where a leader is placed means nothing on one node.
fn leader_locator() -> impl Fn(&Value<'_>) -> Result<(), Wrong> {
    let words = &[("client-local", ()), ("balanced", ()), ("random", ()), ("least-leaders", ())];
    check::word(words, "invalid_queue_locator_arg")
}

/// How a queue uses memory means nothing here.
fn queue_mode(profile: Profile, value: &Value<'_>) -> Result<(), Wrong> {
    if profile >= Profile::RabbitMq4_3 {
        return Ok(());
    }
    match check::text(value)? {
        b"default" | b"lazy" => Ok(()),
        other => Err(format!("\"unsupported queue mode '{}'\"", String::from_utf8_lossy(other))),
    }
}

/// How a queue is stored means nothing here.
fn queue_version(profile: Profile, value: &Value<'_>) -> Result<(), Wrong> {
    match (check::non_negative(value)?, profile) {
        (2, _) | (1, Profile::RabbitMq3_10) => Ok(()),
        (other, _) => Err(format!("\"unsupported queue version '{other}'\"")),
    }
}

/// RabbitMQ accepts whatever is given. What is no number counts as not given; what is negative is no limit to 4.3, and
/// nothing to 3.10.
fn delivery_limit(profile: Profile, kind: QueueKind, arguments: &Table<'_>) -> Option<u64> {
    if kind == QueueKind::Classic {
        return None;
    }
    let given = arguments.get("x-delivery-limit").as_ref().and_then(Value::as_i64);
    match (given, profile) {
        (None, Profile::RabbitMq3_10) => None,
        (None, Profile::RabbitMq4_3) => Some(DELIVERY_LIMIT),
        (Some(limit), Profile::RabbitMq3_10) => Some(u64::try_from(limit).unwrap_or(0)),
        (Some(limit), Profile::RabbitMq4_3) => u64::try_from(limit).ok(),
    }
}
