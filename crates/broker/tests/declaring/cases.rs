//! What is asked of a broker to find out what it accepts, what it refuses, and with which words.
//!
//! Left out is what makes RabbitMQ itself crash or depends on chance: an `x-queue-master-locator` that is none, `x-credit`,
//! a decimal compared with anything, a publish to an exchange whose name is not UTF-8, an exchange type that happens to be a
//! word the server has heard of (it is then "invalid" and not "unknown").

use std::collections::HashSet;

/// A value of every type.
const EVERY_TYPE: [&str; 18] = [
    "5i8", "5u8", "5i16", "5u16", "5i32", "5u32", "5i64", "5.5f32", "5.5f64", "55dec", "5ts",
    "\"5\"", "\"\"", "x\"5\"", "true", "[]", "{}", "void",
];

/// Numbers at which something may change.
const EDGES: [&str; 18] = [
    "-1i8",
    "0i8",
    "0u8",
    "255u8",
    "-1i16",
    "-1i32",
    "0i32",
    "1i32",
    "255i32",
    "256i32",
    "2147483647i32",
    "4294967295u32",
    "-1i64",
    "0i64",
    "4294967295i64",
    "4294967296i64",
    "315360000000i64",
    "315360000001i64",
];

/// A few values, for what is not worth all of them.
const SOME: [&str; 8] =
    ["5i32", "0i32", "-1i64", "315360000001i64", "5.5f64", "\"5\"", "true", "void"];

/// Arguments of queues that are numbers, and some that are known elsewhere.
const NUMBERS: [&str; 16] = [
    "x-message-ttl",
    "x-expires",
    "x-max-length",
    "x-max-length-bytes",
    "x-max-priority",
    "x-max-in-memory-length",
    "x-max-in-memory-bytes",
    "x-delivery-limit",
    "x-quorum-initial-group-size",
    "x-initial-cluster-size",
    "x-consumer-timeout",
    "x-consumer-disconnected-timeout",
    "x-delayed-retry-min",
    "x-delayed-retry-max",
    "x-stream-max-segment-size-bytes",
    "x-stream-filter-size-bytes",
];

/// Arguments of queues that are words, with those that mean something.
const WORDS: [(&str, &[&str]); 13] = [
    ("x-queue-type", &["classic", "quorum", "rabbit_classic_queue", "nonsense"]),
    ("x-overflow", &["drop-head", "reject-publish", "reject-publish-dlx", "nonsense"]),
    ("x-dead-letter-exchange", &["amq.fanout", "missing", "bad\\xff"]),
    ("x-dead-letter-routing-key", &["key"]),
    ("x-dead-letter-strategy", &["at-most-once", "at-least-once", "nonsense"]),
    ("x-queue-mode", &["default", "lazy", "nonsense"]),
    ("x-queue-version", &["1"]),
    (
        "x-queue-leader-locator",
        &["client-local", "balanced", "random", "least-leaders", "nonsense"],
    ),
    ("x-max-age", &["1D", "nonsense"]),
    ("x-delayed-retry-type", &["all", "nonsense"]),
    ("x-single-active-consumer", &["true"]),
    ("x-unheard-of", &["word"]),
    ("unheard-of", &["word"]),
];

const QUORUM: &str = "x-queue-type=\"quorum\"";

const FLAGS: [&str; 8] = [
    "",
    " durable",
    " exclusive",
    " auto-delete",
    " durable exclusive",
    " durable auto-delete",
    " exclusive auto-delete",
    " durable exclusive auto-delete",
];

/// All cases, each once.
pub(crate) fn all() -> Vec<String> {
    let groups = [queues(), redeclared_queues(), names_and_access(), exchanges(), consumers()];
    groups.concat()
}

/// Declaring a queue: arguments, flags, and what does not go together.
pub(crate) fn queues() -> Vec<String> {
    let mut cases = Vec::new();
    for name in NUMBERS {
        let worth_all =
            matches!(name, "x-message-ttl" | "x-expires" | "x-max-length" | "x-max-priority");
        let values = if worth_all { [&EVERY_TYPE[..], &EDGES].concat() } else { SOME.to_vec() };
        cases.extend(values.iter().map(|value| format!("queue q durable {name}={value}")));
        cases.extend(SOME.map(|value| format!("queue q durable {QUORUM} {name}={value}")));
    }
    for (name, words) in WORDS {
        let worth_all = !matches!(
            name,
            "x-max-age" | "x-delayed-retry-type" | "unheard-of" | "x-dead-letter-strategy"
        );
        let values = if worth_all { &EVERY_TYPE[..] } else { &SOME };
        cases.extend(values.iter().map(|value| format!("queue q durable {name}={value}")));
        cases.extend(words.iter().map(|word| format!("queue q durable {name}=\"{word}\"")));
        if name != "x-queue-type" {
            cases.extend(SOME.map(|value| format!("queue q durable {QUORUM} {name}={value}")));
            cases.extend(
                words.iter().map(|word| format!("queue q durable {QUORUM} {name}=\"{word}\"")),
            );
        }
    }
    for value in ["0i32", "1i32", "2i32", "3i32", "-1i32", "2i8", "2u8", "2i64", "1u32"] {
        cases.push(format!("queue q durable x-queue-version={value}"));
    }
    for kind in ["", " x-queue-type=\"classic\"", " x-queue-type=\"quorum\""] {
        for flags in FLAGS {
            cases.push(format!("queue q{flags}{kind}"));
            cases.push(format!("queue ''{flags}{kind}"));
            cases.push(format!("queue amq.q{flags}{kind}"));
            cases.push(format!("queue q{flags}{kind} x-max-priority=500i32"));
        }
        for arguments in [
            r#"x-dead-letter-exchange="" x-dead-letter-routing-key="k""#,
            r#"x-dead-letter-exchange="amq.direct" x-dead-letter-routing-key=5i32"#,
            r#"x-dead-letter-exchange=5i32 x-dead-letter-routing-key="k""#,
            r#"x-dead-letter-exchange=5i32 x-expires=0i32"#,
            r#"x-dead-letter-exchange=5i32 x-max-age="1D""#,
            r#"x-dead-letter-strategy="at-least-once" x-dead-letter-exchange="amq.direct""#,
            r#"x-dead-letter-strategy="at-least-once" x-dead-letter-exchange="amq.direct" x-overflow="reject-publish""#,
            r#"x-dead-letter-strategy="at-least-once" x-overflow="reject-publish""#,
            r#"x-max-length=5i32 x-overflow="reject-publish-dlx""#,
            r#"x-expires=0i32 x-message-ttl=-1i32"#,
            r#"x-message-ttl=-1i32 x-expires=0i32"#,
            r#"x-message-ttl=-1i32 x-dead-letter-routing-key="k""#,
            r#"x-max-length=-1i32 x-dead-letter-routing-key="k""#,
            r#"x-overflow="nonsense" x-max-length=-1i32"#,
            r#"x-overflow="nonsense" x-max-length-bytes=-1i32"#,
            r#"x-max-length-bytes=-1i32 x-max-length=-2i32"#,
            r#"x-max-priority=-1i32 x-max-length-bytes=-1i32"#,
            r#"x-overflow="nonsense" x-max-priority=-1i32"#,
            r#"x-queue-mode="nonsense" x-overflow="nonsense""#,
            r#"x-queue-mode="nonsense" x-queue-version=7i32"#,
            r#"x-single-active-consumer=5i32 x-queue-version=7i32"#,
            r#"x-single-active-consumer=5i32 x-queue-leader-locator="nonsense""#,
            r#"x-consumer-timeout=-1i32 x-queue-leader-locator="nonsense""#,
            r#"x-consumer-timeout=-1i32 x-overflow="nonsense""#,
            r#"x-consumer-timeout=-1i32 x-consumer-disconnected-timeout=-2i32"#,
            r#"x-consumer-timeout=-1i32 x-quorum-initial-group-size=0i32"#,
            r#"x-quorum-initial-group-size=0i32 x-queue-leader-locator="nonsense""#,
            r#"x-single-active-consumer=5i32 x-quorum-initial-group-size=0i32"#,
            r#"x-max-in-memory-length=-1i32 x-max-in-memory-bytes=-1i32"#,
            r#"x-max-in-memory-bytes=-1i32 x-overflow="nonsense""#,
            r#"x-dead-letter-strategy="nonsense" x-max-length=-1i32"#,
            r#"x-dead-letter-strategy="nonsense" x-dead-letter-routing-key="k""#,
            r#"x-delivery-limit=5i32 x-message-ttl=-1i32"#,
            r#"x-max-age="1D" x-delivery-limit=5i32"#,
            r#"x-delivery-limit=5i32 x-max-age="1D""#,
            r#"x-queue-mode="lazy" x-max-priority=5i32"#,
            r#"x-max-priority=5i32 x-queue-mode="lazy""#,
            r#"x-stream-max-segment-size-bytes=5i32 x-initial-cluster-size=5i32"#,
        ] {
            cases.push(format!("queue q durable{kind} {arguments}"));
        }
    }
    for text in [
        r#"queue q durable x-queue-type="nonsense" x-message-ttl=-1i32"#,
        r#"queue q durable x-message-ttl=-1i32 x-queue-type="nonsense""#,
        r#"queue q durable x-queue-type="nonsense" x-dead-letter-exchange=5i32"#,
        r#"queue amq.q durable x-queue-type="nonsense""#,
        r#"queue amq.q durable x-message-ttl=-1i32"#,
        r#"queue amq.q durable x-dead-letter-exchange=5i32"#,
        r#"queue '' durable x-queue-type="quorum" x-message-ttl=-1i32"#,
        r#"queue '' durable x-queue-type="quorum" x-dead-letter-exchange=5i32"#,
        r#"queue '' durable x-queue-type="quorum" x-max-age="1D""#,
        r#"queue q passive x-message-ttl=-1i32"#,
        r#"queue q durable; queue q passive x-message-ttl=-1i32"#,
        r#"queue q durable; queue q passive exclusive"#,
        r#"queue q durable x-queue-master-locator="min-masters""#,
        r#"queue q durable x-queue-type="quorum" x-queue-master-locator="min-masters""#,
    ] {
        cases.push(text.to_owned());
    }
    once(cases)
}

/// Declaring a queue again: with other flags, with other arguments.
pub(crate) fn redeclared_queues() -> Vec<String> {
    let mut cases = Vec::new();
    for flags in FLAGS {
        for again in FLAGS {
            cases.push(format!("queue q{flags}; queue q{again}"));
        }
        cases.push(format!("queue q{flags}; B: queue q{flags}"));
        cases.push(format!("queue q{flags}; B: queue q durable x-max-length=5i32"));
        cases.push(format!(
            "queue q{flags} x-max-length=5i32; queue q auto-delete x-max-length=6i32"
        ));
    }
    let arguments: [(&str, &[&str]); 15] = [
        ("x-message-ttl", &["5i32", "6i32", "5i64", "5u8", "5i8", "5u32", "5i16", "5u16"]),
        ("x-expires", &["50000i32", "60000i64"]),
        (
            "x-max-length",
            &[
                "5i32", "6i32", "5.5f64", "\"5\"", "true", "void", "[]", "{}", "5ts", "x\"5\"",
                "5.5f32", "-5i32",
            ],
        ),
        ("x-max-length-bytes", &["5i32", "6i32"]),
        ("x-max-priority", &["5i32", "6u8"]),
        ("x-overflow", &["\"drop-head\"", "\"reject-publish\"", "5i32", "void", "x\"drop-head\""]),
        (
            "x-dead-letter-exchange",
            &["\"a\"", "\"\"", "5i32", "\"with\\sblank\"", "\"with'quote\"", "\"caf\\xc3\\xa9\""],
        ),
        ("x-single-active-consumer", &["true", "false", "1i32"]),
        ("x-queue-type", &["\"classic\"", "\"quorum\"", "\"nonsense\"", "\"\""]),
        ("x-queue-mode", &["\"lazy\"", "\"default\"", "5i32"]),
        ("x-queue-version", &["2i32", "2i64", "1i32"]),
        ("x-queue-leader-locator", &["\"balanced\"", "\"client-local\""]),
        ("x-consumer-timeout", &["50000i32", "60000i32"]),
        ("x-unheard-of", &["5i32", "5i64", "\"word\"", "true", "void", "55dec"]),
        ("x-delivery-limit", &["5i32", "6i32"]),
    ];
    for (name, values) in arguments {
        let with = |value: &&str| format!(" {name}={value}");
        for again in values.iter().map(with).chain([String::new()]) {
            cases.push(format!("queue q durable; queue q durable{again}"));
            // Only the first ones are accepted to begin with.
            for first in &values[..2] {
                cases.push(format!("queue q durable {name}={first}; queue q durable{again}"));
            }
        }
    }
    // Which of several differences is told.
    let several =
        ["x-message-ttl", "x-expires", "x-max-length", "x-max-length-bytes", "x-max-priority"];
    for (at, one) in several.iter().enumerate() {
        for other in &several[at + 1..] {
            cases.push(format!("queue q durable; queue q durable {one}=5i32 {other}=6i32"));
            cases.push(format!("queue q durable {one}=70000i32; queue q durable {other}=5i32"));
        }
    }
    for argument in [
        "x-delivery-limit=5i32",
        "x-delivery-limit=5i64",
        "x-delivery-limit=6i32",
        "x-message-ttl=5i32",
        "x-message-ttl=5i32 x-delivery-limit=5i32",
        "x-delivery-limit=6i32 x-max-length=5i32",
        "x-dead-letter-strategy=\"at-most-once\"",
        "x-quorum-initial-group-size=1i32",
        "x-queue-leader-locator=\"balanced\"",
        "x-max-in-memory-length=5i32",
        "x-unheard-of=5i32",
        "x-consumer-timeout=50000i32",
        "x-consumer-disconnected-timeout=50000i32",
        "x-delayed-retry-type=\"all\"",
        "x-single-active-consumer=true",
        "x-overflow=\"reject-publish\"",
        "x-dead-letter-exchange=\"a\"",
        "x-max-priority=5i32",
    ] {
        cases.push(format!("queue q durable {QUORUM}; queue q durable {QUORUM} {argument}"));
        cases.push(format!(
            "queue q durable {QUORUM} x-delivery-limit=5i32; queue q durable {QUORUM} {argument}"
        ));
    }
    for text in [
        r#"queue q durable x-queue-type="quorum"; queue q durable"#,
        r#"queue q durable x-queue-type="quorum"; queue q durable x-queue-type="quorum""#,
        r#"queue q durable x-queue-type="quorum"; queue q exclusive"#,
        r#"queue q durable x-queue-type="quorum"; queue q"#,
        r#"queue q durable x-queue-type="quorum"; queue q x-queue-type="quorum""#,
        r#"queue q; queue q x-queue-type="quorum""#,
        r#"queue q; queue q durable x-queue-type="quorum""#,
        r#"queue q exclusive; queue q exclusive x-queue-type="quorum""#,
        r#"queue q durable; queue q durable x-message-ttl=-1i32"#,
        r#"queue q exclusive; B: queue q exclusive x-message-ttl=-1i32"#,
        r#"queue q exclusive; B: queue q passive"#,
        r#"queue q durable x-message-ttl=5i32 x-max-length=6i32; queue q durable x-max-length=6i32 x-message-ttl=5i32"#,
        r#"queue q durable x-dead-letter-exchange="a" x-dead-letter-routing-key="k"; queue q durable x-dead-letter-exchange="a" x-dead-letter-routing-key="l""#,
        r#"queue q durable x-dead-letter-exchange="a" x-dead-letter-routing-key="k"; queue q durable x-dead-letter-exchange="a""#,
        r#"queue q durable x-dead-letter-exchange="a" x-dead-letter-routing-key="k"; queue q durable x-dead-letter-exchange="b" x-dead-letter-routing-key="l""#,
        r#"queue q durable x-overflow="drop-head" x-max-length=5i32; queue q durable x-overflow="reject-publish" x-max-length=6i32"#,
        r#"queue q durable x-queue-mode="lazy" x-single-active-consumer=true; queue q durable"#,
        r#"queue q durable x-queue-mode="lazy" x-overflow="drop-head"; queue q durable"#,
        r#"queue q durable x-single-active-consumer=true x-overflow="drop-head"; queue q durable"#,
        r#"queue q durable x-queue-version=2i32 x-queue-mode="lazy"; queue q durable"#,
        r#"queue q durable x-queue-version=2i32 x-single-active-consumer=true; queue q durable"#,
        r#"queue q durable x-dead-letter-exchange="a" x-max-length=5i32; queue q durable"#,
        r#"queue q durable x-max-length=5i32; queue q durable x-queue-type="quorum""#,
        r#"queue q durable; queue q durable x-queue-master-locator="min-masters""#,
    ] {
        cases.push(text.to_owned());
    }
    once(cases)
}

/// Names that are reserved, odd or long; queues that are missing, in use, not empty, or another connection's.
pub(crate) fn names_and_access() -> Vec<String> {
    let mut cases = Vec::new();
    let long = "x".repeat(255);
    for name in [
        "amq.q",
        "amq.",
        "amq",
        "AMQ.q",
        "a\\sb",
        "a\\nb",
        "a\\r\\nb",
        "\\x00",
        "\\xff",
        "caf\\xc3\\xa9",
        "a'b",
        "~w",
        "amq.\\xff",
        "amq.gen-x",
        "a\\nmq.q",
        "amq.rabbitmq.reply-to",
        &long,
    ] {
        cases.push(format!("queue {name} durable"));
        cases.push(format!("queue {name} passive"));
        cases.push(format!("delete-queue {name}"));
        cases.push(format!("purge {name}"));
        cases.push(format!("queue {name} durable x-message-ttl=-1i32"));
        cases.push(format!("queue {name} durable; queue {name} passive"));
        // 4.3 crashes where it has to cut a text that is not ASCII, which depends on the name of the virtual host.
        if name != "caf\\xc3\\xa9" {
            cases.push(format!("queue {name} durable; queue {name} exclusive"));
        }
    }
    for text in [
        "queue '' passive",
        "queue \\n durable",
        "queue \\n passive",
        "delete-queue \\n",
        "purge \\n",
        "queue ''; queue '' passive",
        "queue q; queue '' passive",
        "queue q; delete-queue ''",
        "queue q; purge ''",
        "delete-queue ''",
        "purge ''",
        "get ''",
        "consume '' tag",
        "bind '' amq.direct k",
        "bind '' '' k",
        "bind '' gone k",
        "unbind '' amq.direct k",
        "unbind '' '' k",
        "queue q; bind '' amq.direct ''",
        "queue q; bind '' amq.direct k",
        "queue q; unbind '' amq.direct k",
        "queue q; delete-queue q; purge ''",
        "queue q; 2: purge ''",
        "delete-queue q",
        "delete-queue q if-unused",
        "delete-queue q if-empty",
        "purge q",
        "get q",
        "get q no-ack",
        "queue q passive",
        "queue q; get q\\n",
        "queue q; purge q\\n",
        "queue q; delete-queue q\\n; queue q passive",
        "queue q; consume q tag; delete-queue q if-unused",
        "queue q; publish '' q; delete-queue q if-empty",
        "queue q; publish '' q; consume q tag; delete-queue q if-unused if-empty",
        "queue q; publish '' q; consume q tag; delete-queue q",
        "queue q; publish '' q; get q; delete-queue q if-empty",
        "queue q exclusive; B: queue q exclusive",
        "queue q exclusive; B: queue q",
        "queue q exclusive; B: queue q durable",
        "queue q exclusive; B: delete-queue q",
        "queue q exclusive; B: delete-queue q if-unused",
        "queue q exclusive; B: purge q",
        "queue q exclusive; B: get q",
        "queue q exclusive; B: consume q tag",
        "queue q exclusive; B: consume q tag exclusive",
        "queue q exclusive; B: consume q tag x-priority=true",
        "queue q exclusive; B: bind q amq.direct k",
        "queue q exclusive; B: bind q missing k",
        "queue q exclusive; B: bind q '' k",
        "queue q exclusive; B: bind q amq.headers k x-match=5i32",
        "queue q exclusive; B: unbind q amq.direct k",
        "queue q exclusive; bind q amq.direct k; B: unbind q amq.direct k",
        "queue q exclusive; B: publish '' q",
        "queue q exclusive; 2: queue q exclusive",
        "queue q exclusive; 2: consume q tag",
        r#"queue q durable x-queue-type="quorum"; purge q"#,
        r#"queue q durable x-queue-type="quorum"; consume q tag; delete-queue q if-unused"#,
        r#"queue q durable x-queue-type="quorum"; publish '' q; delete-queue q if-empty"#,
        r#"queue q durable x-queue-type="quorum"; delete-queue q if-unused if-empty"#,
        "publish gone k",
        "publish '' gone",
        "publish amq.direct k",
        "publish go\\nne k",
        "publish amq.direct\\n k",
        "exchange e direct internal; publish e k",
        "publish '' k immediate",
        "publish gone k immediate",
        "publish amq.rabbitmq.trace k",
        "publish '' amq.rabbitmq.reply-to",
    ] {
        cases.push(text.to_owned());
    }
    once(cases)
}

/// Exchanges, again and anew, and bindings.
pub(crate) fn exchanges() -> Vec<String> {
    let mut cases = Vec::new();
    for kind in [
        "direct",
        "fanout",
        "topic",
        "headers",
        "''",
        "nonsense",
        "x-consistent-hash",
        "x-recent-history",
        "x-delayed-message",
        "no\\nsense",
        "non\\xffsense",
        "non'sense",
    ] {
        cases.push(format!("exchange e {kind}"));
        cases.push(format!("exchange e {kind} durable auto-delete internal"));
        cases.push(format!("exchange amq.e {kind}"));
        cases.push(format!("exchange amq.direct {kind} durable"));
        cases.push(format!("exchange e direct; exchange e {kind}"));
        cases.push(format!("exchange '' {kind} durable"));
        cases.push(format!("exchange e {kind} passive"));
        cases.push(format!("exchange e direct; exchange e {kind} passive"));
        cases.push(format!("exchange e {kind} alternate-exchange=5i32"));
        cases.push(format!("exchange amq.e {kind} alternate-exchange=5i32"));
    }
    for value in EVERY_TYPE {
        cases.push(format!("exchange e direct alternate-exchange={value}"));
        cases.push(format!("exchange e direct x-unheard-of={value}"));
    }
    for value in ["\"missing\"", "\"amq.fanout\"", "\"e\"", "\"bad\\xff\"", "\"a\\nb\""] {
        cases.push(format!("exchange e direct alternate-exchange={value}"));
    }
    let long = "x".repeat(255);
    for name in [
        "amq.e",
        "amq.",
        "amq",
        "AMQ.e",
        "a\\sb",
        "a\\nb",
        "a\\r\\nb",
        "\\n",
        "\\x00",
        "\\xff",
        "caf\\xc3\\xa9",
        "a'b",
        "amq.\\xff",
        "a\\nmq.e",
        "amq.direct",
        "amq.fanout",
        "amq.topic",
        "amq.headers",
        "amq.match",
        "amq.rabbitmq.trace",
        "amq.rabbitmq.event",
        "amq.default",
        "''",
        &long,
    ] {
        for kind in ["direct", "headers"] {
            cases.push(format!("exchange {name} {kind} durable"));
        }
        cases.push(format!("exchange {name} topic durable internal"));
        cases.push(format!("exchange {name} ''"));
        cases.push(format!("exchange {name} direct passive"));
        cases.push(format!("delete-exchange {name}"));
        cases.push(format!("delete-exchange {name} if-unused"));
        cases.push(format!("exchange {name} direct; exchange {name} fanout"));
        cases.push(format!("exchange {name} direct; exchange {name} direct passive"));
    }
    let flags = ["", " durable", " auto-delete", " internal", " durable auto-delete internal"];
    for first in flags {
        for again in flags {
            cases.push(format!("exchange e direct{first}; exchange e direct{again}"));
        }
        cases.push(format!("exchange e direct{first}; exchange e topic durable auto-delete"));
    }
    let alternates = [
        "",
        r#" alternate-exchange="a""#,
        r#" alternate-exchange="b""#,
        r#" alternate-exchange="""#,
        r#" alternate-exchange="a\nb""#,
        r#" alternate-exchange="a" x-unheard-of=5i32"#,
        " x-unheard-of=5i32",
        " alternate-exchange=5i32",
    ];
    for first in &alternates[..alternates.len() - 1] {
        for again in alternates {
            cases.push(format!("exchange e direct{first}; exchange e direct{again}"));
        }
        cases.push(format!(
            "exchange e direct{first}; exchange e direct internal alternate-exchange=\"c\""
        ));
    }
    for text in [
        "exchange e direct; delete-exchange e",
        "exchange e direct; delete-exchange e if-unused",
        "exchange e direct; queue q; bind q e k; delete-exchange e",
        "exchange e direct; queue q; bind q e k; delete-exchange e if-unused",
        "exchange e direct; queue q; bind q e k; unbind q e k; delete-exchange e if-unused",
        "exchange e direct; exchange f direct; bind-exchange f e k; delete-exchange e if-unused",
        "exchange e direct; exchange f direct; bind-exchange f e k; delete-exchange f if-unused",
        "exchange e direct auto-delete; queue q; bind q e k; unbind q e k; exchange e direct passive",
        "exchange e direct auto-delete; exchange f direct; bind-exchange e f k; unbind-exchange e f k; exchange e direct passive",
        "exchange e direct auto-delete; exchange f direct; bind-exchange f e k; unbind-exchange f e k; exchange e direct passive",
    ] {
        cases.push(text.to_owned());
    }
    bindings(&mut cases);
    once(cases)
}

fn bindings(cases: &mut Vec<String>) {
    for verb in ["bind", "unbind"] {
        for text in [
            "missing amq.direct k",
            "missing gone k",
            "missing '' missing",
            "missing amq.\\xff k",
            "missing amq.headers k x-match=5i32",
            "missing gone k x-match=5i32",
        ] {
            cases.push(format!("{verb} {text}"));
        }
        for text in [
            "q gone k",
            "q '' k",
            "q '' q",
            "q amq.direct k",
            "q amq.headers k",
            "q amq.match k x-match=\"nonsense\"",
            "q amq.headers k x-match=\"nonsense\"",
            "q amq.headers k x-match=\"any\"",
            "q amq.headers k x-match=\"all-with-x\"",
            "q amq.headers k x-match=\"any-with-x\"",
            "q amq.headers k x-match=\"\"",
            "q amq.headers k x-match=\"a'b\"",
            "q amq.headers k x-match=5i32",
            "q amq.headers k x-match=true",
            "q amq.headers k x-match=void",
            "q amq.headers k x-match=5.5f64",
            "q amq.headers k x-match=x\"any\"",
            "q amq.headers k x-match=[]",
            "q amq.topic k x-match=\"nonsense\"",
            "q amq.topic a.#.b",
            "q gone\\n k",
            "q amq.dir\\nect k",
            "q\\n amq.direct k",
            "q amq.direct a\\nb",
            "q amq.direct \\xff",
            "q amq.direct '' unheard-of=[]",
        ] {
            cases.push(format!("queue q; {verb} {text}"));
        }
        for text in [
            "gone amq.direct k",
            "amq.direct gone k",
            "gone away k",
            "'' amq.direct k",
            "amq.direct '' k",
            "'' '' k",
            "'' gone k",
            "gone '' k",
            "amq.direct amq.direct k",
            "amq.direct amq.fanout k",
            "\\xff amq.topic k",
            "amq.fanout amq.headers k x-match=\"nonsense\"",
            "gone amq.headers k x-match=5i32",
            "amq.fanout\\n amq.topic k",
        ] {
            cases.push(format!("{verb}-exchange {text}"));
        }
        cases.push(format!("exchange e direct internal; {verb}-exchange e amq.direct k"));
        cases.push(format!("exchange e direct internal; {verb}-exchange amq.direct e k"));
    }
    for text in [
        "queue q; bind q amq.direct k; bind q amq.direct k",
        "queue q; bind q amq.direct k; unbind q amq.direct k",
        "queue q; bind q amq.direct k; unbind q amq.direct other",
        "queue q; bind q amq.direct k; unbind q amq.direct k unheard-of=5i32",
        "exchange e direct; queue q durable; bind q e k",
        "exchange e direct durable; queue q; bind q e k",
        "exchange e direct; exchange f direct durable; bind-exchange f e k",
    ] {
        cases.push(text.to_owned());
    }
}

/// Consumers, and what limits them.
pub(crate) fn consumers() -> Vec<String> {
    let mut cases = Vec::new();
    for queue in ["queue q", r#"queue q durable x-queue-type="quorum""#] {
        for name in [
            "x-priority",
            "x-cancel-on-ha-failover",
            "x-stream-offset",
            "x-consumer-timeout",
            "x-stream-filter",
            "x-stream-match-unfiltered",
            "x-unheard-of",
        ] {
            let worth_all =
                matches!(name, "x-priority" | "x-cancel-on-ha-failover") && queue == "queue q";
            let values = if worth_all { &EVERY_TYPE[..] } else { &SOME };
            cases.extend(
                values.iter().map(|value| format!("{queue}; consume q tag {name}={value}")),
            );
        }
        for text in [
            "consume q tag",
            "consume q ''",
            "consume q tag no-ack",
            "consume q tag no-local",
            "consume q tag exclusive",
            "consume q tag x-priority=-5i32",
            "consume q tag x-priority=9223372036854775807i64",
            "consume q tag x-stream-offset=\"first\"",
            "consume q tag x-priority=true x-cancel-on-ha-failover=5i32",
            "consume q tag x-consumer-timeout=-1i32 x-priority=true",
            "consume q tag x-stream-offset=true x-priority=true",
            "consume q tag; consume q tag",
            "consume q tag; consume missing tag",
            "consume q tag; consume q tag exclusive",
            "consume q tag; consume q tag x-priority=true",
            "consume q tag; cancel tag; consume q tag",
            "consume q tag; 2: consume q tag",
            "consume q tag; B: consume q tag",
            "consume q tag; consume q other exclusive",
            "consume q tag exclusive; consume q other",
            "consume q tag exclusive; consume q other exclusive",
            "consume q tag exclusive; consume q tag",
            "consume q tag exclusive; consume q other x-priority=true",
            "consume q tag exclusive; 2: consume q other",
            "consume q tag exclusive; B: consume q other",
            "consume q tag exclusive; B: get q",
            "consume q tag exclusive; B: delete-queue q if-unused",
            "consume q tag exclusive; B: purge q",
            "consume q tag exclusive; B: queue q passive",
            "consume q tag exclusive; cancel tag; consume q other",
            "qos 0 5 global; consume q tag",
            "qos 0 5 global; consume q tag x-priority=true",
            "qos 0 5 global; consume q tag no-ack",
            "qos 0 0 global; consume q tag",
            "qos 0 5; consume q tag",
            "qos 0 5 global; get q",
            "consume q tag; qos 0 5 global",
        ] {
            cases.push(format!("{queue}; {text}"));
        }
    }
    for text in [
        "consume missing tag",
        "consume missing tag x-priority=true",
        "consume \\xff tag",
        "queue q; consume q \\xff",
        "queue q; consume q\\n tag",
        "cancel missing",
        "cancel ''",
        "qos 1 0",
        "qos 1 5 global",
        "qos 0 65535",
        "qos 0 5 global",
        "queue q durable x-single-active-consumer=true; consume q tag exclusive",
        "queue q durable x-single-active-consumer=true; consume q tag; consume q other",
        "queue q durable x-single-active-consumer=true; consume q tag; consume q other exclusive",
        "queue q exclusive x-single-active-consumer=true; B: consume q tag exclusive",
        "consume amq.rabbitmq.reply-to tag",
        "consume amq.rabbitmq.reply-to tag no-ack",
        "consume amq.rabbitmq.reply-to tag no-ack; consume amq.rabbitmq.reply-to other no-ack",
        "consume amq.rabbitmq.reply-to tag no-ack; consume amq.rabbitmq.reply-to tag no-ack",
        "consume amq.rabbitmq.reply-to tag no-ack; consume amq.rabbitmq.reply-to other",
        "consume amq.rabbitmq.reply-to tag no-ack; queue q; consume q tag",
        "consume amq.rabbitmq.reply-to tag no-ack exclusive",
        "queue q; consume q tag; consume amq.rabbitmq.reply-to tag no-ack",
        "queue q; consume q tag; consume amq.rabbitmq.reply-to tag",
        "get amq.rabbitmq.reply-to",
        r#"queue q durable x-queue-type="quorum" x-single-active-consumer=true; consume q tag exclusive"#,
    ] {
        cases.push(text.to_owned());
    }
    once(cases)
}

fn once(mut cases: Vec<String>) -> Vec<String> {
    let mut seen = HashSet::new();
    cases.retain(|case| seen.insert(case.clone()));
    cases
}
