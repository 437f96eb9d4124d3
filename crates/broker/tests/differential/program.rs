//! What a program is: steps, each by one channel of one connection.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use leveret_wire::{Method, Properties, ShortStr, Table, method::basic};

use super::show::{bare, show_body, show_properties};

/// Connections a program has at most.
pub(super) const CONNECTIONS: usize = 3;

/// A TTL that has run out before the next step, in milliseconds.
pub(super) const SHORT_TTL: i32 = 60;

/// How long a step that may put messages into queues waits, in a program with [`SHORT_TTL`]s.
const TTL_WAIT: Duration = Duration::from_millis(180);

/// An `x-expires` that runs out during [`Op::Wait`] and not between two other steps, in milliseconds.
pub(super) const SHORT_EXPIRES: i32 = 700;

/// How long [`Op::Wait`] takes.
pub(super) const WAIT: Duration = Duration::from_millis(1200);

/// Steps, and the seed they were made from.
#[derive(Clone)]
pub(crate) struct Program {
    pub(super) seed: u64,
    /// The connection of a user who may not do everything, if there is one.
    pub(super) limited: Option<usize>,
    pub(super) steps: Vec<Step>,
}

/// One operation of one channel. Connection and channel are opened if they are not open.
#[derive(Clone)]
pub(super) struct Step {
    /// From 0.
    pub(super) connection: usize,
    /// From 1.
    pub(super) channel: u16,
    pub(super) op: Op,
}

#[derive(Clone)]
pub(super) enum Op {
    /// Sends a method as it is.
    Call(Method<'static>),
    /// Sends a method on a channel that was never opened.
    Unopened(Method<'static>),
    Publish(Box<Publish>),
    /// Publishes an answer to where the newest delivery wants one.
    Reply,
    Settle(Which, How),
    CloseConnection,
    /// Ends the connection without a word.
    CutConnection,
    /// Does nothing for long enough that an unused queue with [`SHORT_EXPIRES`] is gone.
    Wait,
}

#[derive(Clone)]
pub(super) struct Publish {
    pub(super) method: basic::Publish<'static>,
    pub(super) properties: Properties<'static>,
    pub(super) body: String,
    /// How often, in one go.
    pub(super) times: usize,
}

/// Which delivery is to be settled.
#[derive(Clone, Copy, Debug)]
pub(super) enum Which {
    /// One of those that the channel holds, counted from the oldest and around.
    Held(usize),
    /// One that it has settled already.
    Settled(usize),
    /// This tag, whatever it is.
    Tag(u64),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    Ack { multiple: bool },
    Nack { multiple: bool, requeue: bool },
    Reject { requeue: bool },
}

impl How {
    pub(super) fn multiple(self) -> bool {
        matches!(self, How::Ack { multiple: true } | How::Nack { multiple: true, .. })
    }

    pub(super) fn method(self, delivery_tag: u64) -> Method<'static> {
        match self {
            How::Ack { multiple } => basic::Ack { delivery_tag, multiple }.into(),
            How::Nack { multiple, requeue } => {
                basic::Nack { delivery_tag, multiple, requeue }.into()
            }
            How::Reject { requeue } => basic::Reject { delivery_tag, requeue }.into(),
        }
    }
}

/// How long a program's run waits until all that a step causes has happened.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Before looking at what a step that may have put messages into queues did.
    pub(super) expiry: Duration,
    /// Between looks.
    pub(super) pause: Duration,
}

impl Program {
    /// `patience` is how many times as long as usual is waited between looks, and 1 in most runs.
    pub(super) fn pace(&self, patience: u32) -> Pace {
        let (mut short_ttl, mut quorum) = (false, false);
        for step in &self.steps {
            match &step.op {
                Op::Call(Method::QueueDeclare(declare)) => {
                    let text = |name| declare.arguments.get(name).map(|value| value.into_owned());
                    let ttl = text("x-message-ttl").and_then(|value| value.as_i64());
                    short_ttl |= ttl == Some(SHORT_TTL.into());
                    quorum |=
                        text("x-queue-type").is_some_and(|kind| kind.as_str() == Some("quorum"));
                }
                Op::Publish(publish) => {
                    let expiration = publish.properties.expiration.as_ref();
                    short_ttl |= expiration.is_some_and(|ttl| *ttl == *SHORT_TTL.to_string());
                }
                _ => {}
            }
        }
        Pace {
            expiry: if short_ttl { TTL_WAIT } else { Duration::ZERO },
            // A quorum queue does nothing before its log is on disk, and no call waits for that.
            pause: match (quorum, patience) {
                (false, 1) => Duration::ZERO,
                _ => Duration::from_millis(25) * patience,
            },
        }
    }

    /// The exchanges that it may leave behind.
    pub(super) fn exchanges(&self) -> BTreeSet<String> {
        self.names(|method| match method {
            Method::ExchangeDeclare(declare) if !declare.passive => Some(&declare.exchange),
            _ => None,
        })
    }

    /// The queues that it may leave behind.
    pub(super) fn queues(&self) -> BTreeSet<String> {
        self.names(|method| match method {
            Method::QueueDeclare(declare) if !declare.passive => Some(&declare.queue),
            _ => None,
        })
    }

    fn names(
        &self,
        name: for<'m> fn(&'m Method<'static>) -> Option<&'m ShortStr<'static>>,
    ) -> BTreeSet<String> {
        let called = self.steps.iter().filter_map(|step| match &step.op {
            Op::Call(method) => name(method),
            _ => None,
        });
        called
            .map(ShortStr::to_string)
            .filter(|name| !name.is_empty() && !name.starts_with("amq."))
            .collect()
    }
}

impl Op {
    /// Whether all it does is done when it is answered, unless it is refused.
    pub(super) fn is_done_when_answered(&self) -> bool {
        let Op::Call(method) = self else { return false };
        matches!(
            method,
            Method::QueueDeclare(_)
                | Method::QueueBind(_)
                | Method::QueueUnbind(_)
                | Method::ExchangeDeclare(_)
                | Method::ExchangeBind(_)
                | Method::ExchangeUnbind(_)
                | Method::ExchangeDelete(_)
                | Method::ConfirmSelect(_)
                | Method::TxSelect(_)
                | Method::BasicQos(_)
        )
    }

    /// Whether messages may get into a queue by it.
    pub(super) fn may_enqueue(&self) -> bool {
        match self {
            Op::Call(method) => matches!(
                method,
                Method::BasicRecover(_)
                    | Method::BasicRecoverAsync(_)
                    | Method::TxCommit(_)
                    | Method::ChannelClose(_)
                    | Method::QueueDelete(_)
                    | Method::BasicCancel(_)
                    | Method::BasicGet(_)
            ),
            _ => true,
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(limited) = self.limited {
            writeln!(f, "      c{} may not do everything", limited + 1)?;
        }
        for (number, step) in self.steps.iter().enumerate() {
            writeln!(f, "  {:>2}. {step}", number + 1)?;
        }
        Ok(())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Step { connection, channel, op } = self;
        write!(f, "c{}/{channel} ", connection + 1)?;
        match op {
            Op::Call(method) => write!(f, "{}", bare(method)),
            Op::Unopened(method) => write!(f, "on a channel that is not open: {}", bare(method)),
            Op::Publish(publish) => {
                let Publish { method, properties, body, times } = &**publish;
                let method = Method::from(method.clone());
                let properties = show_properties(properties);
                let body = show_body(body.as_bytes());
                write!(f, "{} {properties} {body} × {times}", bare(&method))
            }
            Op::Reply => f.write_str("reply to the newest delivery"),
            Op::Settle(which, how) => write!(f, "settle {which:?} {how:?}"),
            Op::CloseConnection => f.write_str("close the connection"),
            Op::CutConnection => f.write_str("cut the connection"),
            Op::Wait => write!(f, "wait {WAIT:?}"),
        }
    }
}

/// A table of these pairs.
pub(super) fn table(pairs: Vec<(&'static str, leveret_wire::Value<'static>)>) -> Table<'static> {
    Table::from_pairs(pairs).expect("short names and finite numbers").into_owned()
}
