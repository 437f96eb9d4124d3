//! What the clients of one run do, made of the fuzzer's bytes: methods over a few names, so that they meet.

use arbitrary::{Arbitrary, Result, Unstructured};

/// How many steps a program has at most.
const MOST_STEPS: usize = 200;

/// One run.
#[derive(Debug)]
pub struct Program {
    pub settings: Settings,
    pub steps: Vec<Step>,
}

impl<'a> Arbitrary<'a> for Program {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        let settings = input.arbitrary()?;
        let mut steps = Vec::new();
        while !input.is_empty() && steps.len() < MOST_STEPS {
            steps.push(input.arbitrary()?);
        }
        Ok(Program { settings, steps })
    }
}

/// How the broker is set up.
#[derive(Arbitrary, Debug)]
pub struct Settings {
    /// RabbitMQ 3.10 instead of 4.3.
    pub old: bool,
    pub small_memory: bool,
    /// Clients have to send heartbeats, which they do not.
    pub heartbeats: bool,
    pub record: bool,
}

/// One of the clients, and one of its channels. Taken modulo how many there are.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Place {
    pub client: u8,
    pub channel: u8,
}

#[derive(Arbitrary, Debug)]
pub enum Step {
    /// A client sends a method.
    Method(Place, Method),
    /// The same, without having to think of opening a channel before.
    OnNewChannel(Place, Method),
    Publish(Place, Publish),
    /// A publish whose body does not follow at once.
    Begin(Place, Publish),
    /// A part of a body.
    Body(Place, Size),
    /// A method as the codec can make it, with any names and arguments.
    Any(Place, AnyMethod),
    /// A frame of any kind.
    Frame(Place, u8, Vec<u8>),
    /// Bytes that are no frames.
    Bytes(u8, Vec<u8>),
    Chain(Place, Chain),
    /// The broker does what it can do now.
    Run,
    /// A client reads all that came.
    Read(u8),
    /// A client is gone without a word, and another one comes in its place.
    Leave(u8),
    /// Time passes.
    Advance(Time),
    Restart,
    Block,
    Unblock,
    CutAll,
}

#[derive(Debug)]
pub struct AnyMethod(pub leveret_wire::Method<'static>);

impl<'a> Arbitrary<'a> for AnyMethod {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        let method: leveret_wire::Method<'a> = input.arbitrary()?;
        Ok(AnyMethod(method.into_owned()))
    }
}

/// What may be asked of a broker on a channel.
#[derive(Arbitrary, Debug)]
pub enum Method {
    Open,
    Close,
    CloseOk,
    ConnectionClose,
    DeclareQueue { queue: u8, arguments: QueueArguments, durable: bool, exclusive: bool, auto_delete: bool },
    DeclareExchange { exchange: u8, kind: u8, alternate: Option<u8>, auto_delete: bool },
    BindQueue { queue: u8, exchange: u8, key: u8, arguments: BindingArguments },
    UnbindQueue { queue: u8, exchange: u8, key: u8, arguments: BindingArguments },
    BindExchange { destination: u8, source: u8, key: u8, arguments: BindingArguments },
    UnbindExchange { destination: u8, source: u8, key: u8, arguments: BindingArguments },
    DeleteQueue { queue: u8, if_unused: bool, if_empty: bool },
    DeleteExchange { exchange: u8, if_unused: bool },
    Purge { queue: u8 },
    Qos { prefetch: u8, global: bool },
    Consume { queue: u8, tag: u8, no_ack: bool, exclusive: bool, priority: Option<i8> },
    Cancel { tag: u8 },
    CancelOk { tag: u8 },
    Get { queue: u8, no_ack: bool },
    Ack { tag: u8, multiple: bool },
    Nack { tag: u8, multiple: bool, requeue: bool },
    Reject { tag: u8, requeue: bool },
    Recover,
    ConfirmSelect,
    TxSelect,
    TxCommit,
    TxRollback,
}

/// What a headers exchange compares.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct BindingArguments {
    /// `x-match`, sometimes one that does not exist.
    pub how: Option<u8>,
    /// So many headers, which messages may have.
    pub headers: u8,
}

#[derive(Arbitrary, Debug)]
pub struct QueueArguments {
    pub quorum: bool,
    pub at_least_once: bool,
    pub single_active: bool,
    pub ttl: Option<Time>,
    pub expires: Option<Time>,
    pub max_length: Option<u8>,
    pub overflow: u8,
    pub dead_letters: Option<(u8, Option<u8>)>,
    pub delivery_limit: Option<u8>,
    pub consumer_timeout: Option<Time>,
}

#[derive(Arbitrary, Debug)]
pub struct Publish {
    pub exchange: u8,
    pub key: u8,
    pub mandatory: bool,
    pub size: Size,
    pub persistent: bool,
    pub expiration: Option<Time>,
    /// Further routing keys: a few, or with `many_copies` hundreds.
    pub copies: Option<u8>,
    pub many_copies: bool,
    /// So many headers, which bindings may ask for.
    pub headers: u8,
    /// An `x-death` that the client has made up.
    pub death: Option<u8>,
    pub reply_to: bool,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Size {
    None,
    Few(u8),
    /// More than a frame.
    Some(u16),
    Many,
    /// More than may be.
    TooMany,
}

impl Size {
    pub fn bytes(self) -> usize {
        match self {
            Size::None => 0,
            Size::Few(bytes) => usize::from(bytes),
            Size::Some(bytes) => usize::from(bytes),
            Size::Many => 200_000,
            Size::TooMany => 300_000,
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Time {
    None,
    Millisecond,
    Milliseconds(u8),
    Second,
    Minute,
}

impl Time {
    pub fn millis(self) -> u64 {
        match self {
            Time::None => 0,
            Time::Millisecond => 1,
            Time::Milliseconds(millis) => u64::from(millis),
            Time::Second => 1000,
            Time::Minute => 61_000,
        }
    }
}

/// Many objects, each of which leads to the next.
#[derive(Arbitrary, Debug)]
pub struct Chain {
    pub links: Links,
    pub length: Length,
    /// A message is published at its beginning.
    pub publish: bool,
    /// The queue at its end is deleted.
    pub delete: bool,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Links {
    /// Exchanges that delete themselves, each bound to the next.
    AutoDelete,
    /// Each is the alternate exchange of the one before.
    Alternates,
    /// Queues without patience, each with the next one for its dead letters.
    DeadLetters,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Length {
    Short,
    Long,
    Huge,
}

impl Length {
    pub fn links(self) -> usize {
        match self {
            Length::Short => 3,
            Length::Long => 100,
            Length::Huge => 2500,
        }
    }
}
