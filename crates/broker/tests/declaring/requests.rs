//! Requests to a broker as one line of text each, so that a list of hundreds can be read.
//!
//! ```text
//! queue q durable x-max-length=5i32; B: consume q tag exclusive
//! ```
//!
//! Steps follow each other after `; `. A step is asked on the first channel of the first connection, after `2:` on its
//! second channel, after `B:` on another connection. `''` is an empty name; `\n`, `\r` and `\xff` are what they are in Rust, `\s` is a
//! blank.
//! A value is written with its type: `5i32`, `5.5f64`, `5dec`, `5ts`, `true`, `void`, `[]`, `{}`, `x"bytes"`, `"text"`.

use std::borrow::Cow;
use std::str::FromStr;

use leveret_wire::method::{basic, exchange, queue};
use leveret_wire::{Array, Method, ShortStr, Table, Value};

/// Where a step is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    First,
    /// On another channel of the same connection.
    SecondChannel,
    /// On another connection.
    OtherConnection,
}

/// One method, and who sends it.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) asker: Asker,
    pub(crate) method: Method<'static>,
}

/// The steps of a case.
///
/// # Panics
/// If the text is no case.
pub(crate) fn steps(case: &str) -> Vec<Step> {
    case.split("; ").map(step).collect()
}

fn step(text: &str) -> Step {
    let (asker, request) = if let Some(rest) = text.strip_prefix("B: ") {
        (Asker::OtherConnection, rest)
    } else if let Some(rest) = text.strip_prefix("2: ") {
        (Asker::SecondChannel, rest)
    } else {
        (Asker::First, text)
    };
    let mut words = Words { text, words: request.split(' ').collect(), at: 0 };
    let method = method(&mut words);
    assert_eq!(words.at, words.words.len(), "too many words in {text:?}");
    Step { asker, method }
}

fn method(words: &mut Words<'_>) -> Method<'static> {
    match words.next() {
        "queue" => {
            let queue = words.name();
            let Options { flags, arguments } = words.options();
            let [passive, durable, exclusive, auto_delete] =
                ["passive", "durable", "exclusive", "auto-delete"]
                    .map(|name| flags.contains(&name));
            let nowait = false;
            let declare = queue::Declare {
                queue,
                passive,
                durable,
                exclusive,
                auto_delete,
                nowait,
                arguments,
            };
            Method::QueueDeclare(declare)
        }
        "exchange" => {
            let (exchange, kind) = (words.name(), words.name());
            let Options { flags, arguments } = words.options();
            let [passive, durable, auto_delete, internal] =
                ["passive", "durable", "auto-delete", "internal"].map(|name| flags.contains(&name));
            Method::ExchangeDeclare(exchange::Declare {
                exchange,
                kind,
                passive,
                durable,
                auto_delete,
                internal,
                nowait: false,
                arguments,
            })
        }
        "delete-queue" => {
            let queue = words.name();
            let flags = words.options().flags;
            let [if_unused, if_empty] = ["if-unused", "if-empty"].map(|name| flags.contains(&name));
            Method::QueueDelete(queue::Delete { queue, if_unused, if_empty, nowait: false })
        }
        "delete-exchange" => {
            let exchange = words.name();
            let if_unused = words.options().flags.contains(&"if-unused");
            Method::ExchangeDelete(exchange::Delete { exchange, if_unused, nowait: false })
        }
        "purge" => Method::QueuePurge(queue::Purge { queue: words.name(), nowait: false }),
        "bind" => {
            let (queue, exchange, routing_key) = (words.name(), words.name(), words.name());
            let arguments = words.options().arguments;
            Method::QueueBind(queue::Bind {
                queue,
                exchange,
                routing_key,
                nowait: false,
                arguments,
            })
        }
        "unbind" => {
            let (queue, exchange, routing_key) = (words.name(), words.name(), words.name());
            let arguments = words.options().arguments;
            Method::QueueUnbind(queue::Unbind { queue, exchange, routing_key, arguments })
        }
        "bind-exchange" => {
            let (destination, source, routing_key) = (words.name(), words.name(), words.name());
            let (nowait, arguments) = (false, words.options().arguments);
            let bind = exchange::Bind { destination, source, routing_key, nowait, arguments };
            Method::ExchangeBind(bind)
        }
        "unbind-exchange" => {
            let (destination, source, routing_key) = (words.name(), words.name(), words.name());
            let (nowait, arguments) = (false, words.options().arguments);
            let unbind = exchange::Unbind { destination, source, routing_key, nowait, arguments };
            Method::ExchangeUnbind(unbind)
        }
        "qos" => {
            let (prefetch_size, prefetch_count) = (words.number(), words.number());
            let global = words.options().flags.contains(&"global");
            Method::BasicQos(basic::Qos { prefetch_size, prefetch_count, global })
        }
        "consume" => {
            let (queue, consumer_tag) = (words.name(), words.name());
            let Options { flags, arguments } = words.options();
            let [no_local, no_ack, exclusive] =
                ["no-local", "no-ack", "exclusive"].map(|name| flags.contains(&name));
            Method::BasicConsume(basic::Consume {
                queue,
                consumer_tag,
                no_local,
                no_ack,
                exclusive,
                nowait: false,
                arguments,
            })
        }
        "cancel" => {
            Method::BasicCancel(basic::Cancel { consumer_tag: words.name(), nowait: false })
        }
        "get" => {
            let queue = words.name();
            Method::BasicGet(basic::Get {
                queue,
                no_ack: words.options().flags.contains(&"no-ack"),
            })
        }
        "publish" => {
            let (exchange, routing_key) = (words.name(), words.name());
            let flags = words.options().flags;
            let [mandatory, immediate] =
                ["mandatory", "immediate"].map(|name| flags.contains(&name));
            Method::BasicPublish(basic::Publish { exchange, routing_key, mandatory, immediate })
        }
        other => panic!("no request is called {other:?}, in {:?}", words.text),
    }
}

struct Words<'a> {
    text: &'a str,
    words: Vec<&'a str>,
    at: usize,
}

struct Options<'a> {
    flags: Vec<&'a str>,
    arguments: Table<'static>,
}

impl<'a> Words<'a> {
    fn next(&mut self) -> &'a str {
        let word = self.words.get(self.at).unwrap_or_else(|| panic!("too short: {:?}", self.text));
        self.at += 1;
        word
    }

    fn name(&mut self) -> ShortStr<'static> {
        let word = self.next();
        let name = if word == "''" { Vec::new() } else { unescaped(word) };
        ShortStr::from_bytes(name).expect("a short name")
    }

    fn number<N: FromStr>(&mut self) -> N {
        let word = self.next();
        word.parse().unwrap_or_else(|_| panic!("{word:?} is no number, in {:?}", self.text))
    }

    /// All that is left: flags, and arguments with their values.
    fn options(&mut self) -> Options<'a> {
        let mut options = Options { flags: Vec::new(), arguments: Table::new() };
        for word in self.words.drain(self.at..) {
            match word.split_once('=') {
                Some((name, value)) => {
                    let value =
                        self::value(value).unwrap_or_else(|| panic!("{value:?} is no value"));
                    options
                        .arguments
                        .insert(unescaped(name), value)
                        .expect("a value that can be sent");
                }
                None => options.flags.push(word),
            }
        }
        options
    }
}

/// A value written with its type.
fn value(text: &str) -> Option<Value<'static>> {
    match text {
        "true" => return Some(Value::Bool(true)),
        "false" => return Some(Value::Bool(false)),
        "void" => return Some(Value::Void),
        "[]" => return Some(Value::Array(Array::new())),
        "{}" => return Some(Value::Table(Table::new())),
        _ => {}
    }
    if let Some(quoted) = text.strip_suffix('"') {
        return match quoted.split_once('"')? {
            ("", text) => Some(Value::Str(unescaped(text).into())),
            ("x", bytes) => Some(Value::Bytes(Cow::Owned(unescaped(bytes)))),
            _ => None,
        };
    }
    let (number, kind) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic())?);
    Some(match kind {
        "i8" => Value::I8(number.parse().ok()?),
        "u8" => Value::U8(number.parse().ok()?),
        "i16" => Value::I16(number.parse().ok()?),
        "u16" => Value::U16(number.parse().ok()?),
        "i32" => Value::I32(number.parse().ok()?),
        "u32" => Value::U32(number.parse().ok()?),
        "i64" => Value::I64(number.parse().ok()?),
        "f32" => Value::F32(number.parse().ok()?),
        "f64" => Value::F64(number.parse().ok()?),
        "dec" => Value::Decimal { scale: 1, value: number.parse().ok()? },
        "ts" => Value::Timestamp(number.parse().ok()?),
        _ => return None,
    })
}

/// `\n`, `\r` and `\xff` for what they mean.
pub(crate) fn unescaped(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some((plain, escape)) = rest.split_once('\\') {
        bytes.extend_from_slice(plain.as_bytes());
        let (byte, length) = match escape.as_bytes() {
            [b'n', ..] => (b'\n', 1),
            [b'r', ..] => (b'\r', 1),
            [b's', ..] => (b' ', 1),
            [b'x', ..] => (u8::from_str_radix(&escape[1..3], 16).expect("two hex digits"), 3),
            _ => panic!("an unknown escape in {text:?}"),
        };
        bytes.push(byte);
        rest = &escape[length..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    bytes
}
