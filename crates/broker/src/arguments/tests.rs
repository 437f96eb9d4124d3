//! What RabbitMQ answered on real nodes, held against what is said here. Only what a declaration or its words decide is
//! asked here; the whole table is for the broker as a whole.

#[path = "../../tests/declaring/requests.rs"]
mod requests;
#[path = "../../tests/declaring/table.rs"]
mod table;

use leveret_wire::method::{basic, exchange, queue};
use leveret_wire::{Method, ShortStr, Table};
use requests::{Asker, Step};
use table::Answer;

use super::queue::{DeadLetterStrategy, QueueKind};
use super::*;
use crate::exchange::Kind;
use crate::profile::Profile;
use crate::refusal::Refusal;

/// As much of a virtual host as declarations need.
struct Declarations {
    profile: Profile,
    queues: Vec<DeclaredQueue>,
    exchanges: Vec<DeclaredExchange>,
}

struct DeclaredQueue {
    method: queue::Declare<'static>,
    name: ShortStr<'static>,
    owner: Asker,
    arguments: QueueArguments,
}

struct DeclaredExchange {
    method: exchange::Declare<'static>,
    name: ShortStr<'static>,
    kind: Kind,
}

impl Declarations {
    const VHOST: &str = "shop";

    fn new(profile: Profile) -> Self {
        Declarations { profile, queues: Vec::new(), exchanges: Vec::new() }
    }

    fn queue(&self, name: &ShortStr<'_>) -> Option<&DeclaredQueue> {
        self.queues.iter().find(|queue| queue.name == *name)
    }

    fn declare_queue(&mut self, asker: Asker, method: &queue::Declare<'static>) -> Done {
        let name = declared_name(&method.queue).into_owned();
        if let Some(found) = self.queue(&name) {
            if found.method.exclusive && found.owner != asker {
                return Err(words::owned_by_another(Self::VHOST, &name));
            }
            if !method.passive {
                let (current, wanted) = (queue_declared(&found.method), queue_declared(method));
                same_queue(self.profile, Self::VHOST, &name, &current, &wanted)?;
            }
        } else if method.passive {
            return Err(words::no_queue(Self::VHOST, &name));
        } else {
            check_queue_name(&name)?;
            let declared = queue_declared(method);
            let arguments = QueueArguments::parse(self.profile, Self::VHOST, &name, &declared)?;
            let (method, name, owner) = (method.clone(), name.clone(), asker);
            self.queues.push(DeclaredQueue { method, name, owner, arguments });
        }
        Ok((name != method.queue).then(|| name.to_string()))
    }

    fn declare_exchange(&mut self, method: &exchange::Declare<'static>) -> Done {
        let name = declared_name(&method.exchange).into_owned();
        let found = self.exchanges.iter().find(|exchange| exchange.name == name);
        if method.passive {
            return match found {
                _ if name.is_empty() => Err(words::default_exchange()),
                Some(_) => Ok(None),
                None => Err(words::no_exchange(Self::VHOST, &name)),
            };
        }
        let kind = exchange_kind(self.profile, &method.kind)?;
        if name.is_empty() {
            return Err(words::default_exchange());
        }
        if let Some(found) = found {
            let current = exchange_declared(found.kind, &found.method);
            let wanted = exchange_declared(kind, method);
            same_exchange(self.profile, Self::VHOST, &name, &current, &wanted)?;
        } else {
            check_exchange_name(&name)?;
            alternate_exchange(Self::VHOST, &name, &method.arguments)?;
            self.exchanges.push(DeclaredExchange { method: method.clone(), name, kind });
        }
        Ok(None)
    }

    fn consume(&self, method: &basic::Consume<'static>) -> Done {
        let Some(found) = self.queue(&method.queue) else {
            return Err(words::no_queue(Self::VHOST, &method.queue));
        };
        let (of, arguments) = (&found.arguments, &method.arguments);
        ConsumerArguments::parse(self.profile, Self::VHOST, &method.queue, of, arguments)?;
        match of.single_active_consumer && method.exclusive && !of.is_quorum() {
            true => Err(words::exclusive_use(Self::VHOST, &method.queue)),
            false => Ok(None),
        }
    }

    fn delete_queue(&self, method: &queue::Delete<'static>) -> Done {
        let name = declared_name(&method.queue);
        if let Some(found) = self.queue(&name) {
            check_queue_deletion(Self::VHOST, &name, &found.arguments, method)?;
        }
        Ok(None)
    }

    fn delete_exchange(&self, method: &exchange::Delete<'static>) -> Done {
        let name = declared_name(&method.exchange);
        if name.is_empty() {
            return Err(words::default_exchange());
        }
        check_exchange_deletion(Self::VHOST, &name).map(|()| None)
    }

    fn ask(&mut self, step: &Step) -> Done {
        match &step.method {
            Method::QueueDeclare(method) => self.declare_queue(step.asker, method),
            Method::ExchangeDeclare(method) => self.declare_exchange(method),
            Method::BasicConsume(method) => self.consume(method),
            Method::QueueDelete(method) => self.delete_queue(method),
            Method::ExchangeDelete(method) => self.delete_exchange(method),
            other => panic!("{} is not asked here", other.name()),
        }
    }
}

/// The name of a queue, if it is not the one that was asked for; or a refusal.
type Done = Result<Option<String>, Refusal>;

fn queue_declared<'a>(method: &'a queue::Declare<'_>) -> QueueDeclared<'a> {
    QueueDeclared {
        durable: method.durable,
        exclusive: method.exclusive,
        auto_delete: method.auto_delete,
        arguments: &method.arguments,
    }
}

fn exchange_declared<'a>(kind: Kind, method: &'a exchange::Declare<'_>) -> ExchangeDeclared<'a> {
    ExchangeDeclared {
        kind,
        durable: method.durable,
        auto_delete: method.auto_delete,
        internal: method.internal,
        arguments: &method.arguments,
    }
}

/// Whether declarations alone decide a case. What is not UTF-8 does not get so far; names that the broker chooses, and the
/// exchanges that it has of itself, are its own affair.
fn is_about_declarations(case: &str) -> bool {
    let elsewhere = [
        "''",
        "\\xff",
        "queue \\n",
        "amq.rabbitmq",
        "exchange amq.d",
        "exchange amq.f",
        "exchange amq.t",
        "exchange amq.h",
        "exchange amq.m",
    ];
    if elsewhere.iter().any(|other| case.contains(other)) {
        return false;
    }
    let verbs: Vec<&str> = case.split("; ").filter_map(|step| step.split(' ').next()).collect();
    match verbs.as_slice() {
        ["queue", "B:"] => case.contains("B: queue"),
        ["queue", "queue"] | ["exchange", "exchange"] => true,
        ["queue" | "exchange" | "delete-queue" | "delete-exchange"] => true,
        ["queue", "consume"] => true,
        ["queue", "delete-queue"] => case.contains("quorum"),
        _ => false,
    }
}

fn answers(profile: Profile, version: &str) -> usize {
    let mut asked = 0;
    let mut differences = Vec::new();
    for (case, expected) in table::recorded(version) {
        if !is_about_declarations(case) {
            continue;
        }
        asked += 1;
        let mut declarations = Declarations::new(profile);
        let mut done = Ok(None);
        for step in requests::steps(case) {
            done = done.and_then(|_| declarations.ask(&step));
        }
        let answer = match done {
            Ok(name) => Answer::Ok(name),
            Err(refusal) => Answer::refused(refusal.scope(), refusal.code, refusal.text),
        };
        let expected = expected.in_virtual_host(Declarations::VHOST);
        if answer != expected {
            differences.push(format!("{case}\n    RabbitMQ: {expected}\n    here:     {answer}"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    asked
}

#[test]
fn declarations_are_answered_as_rabbitmq_3_10_does() {
    let asked = answers(Profile::RabbitMq3_10, "3.10");
    assert!(asked > 1000, "only {asked} cases");
}

#[test]
fn declarations_are_answered_as_rabbitmq_4_3_does() {
    let asked = answers(Profile::RabbitMq4_3, "4.3");
    assert!(asked > 1000, "only {asked} cases");
}

fn parsed(profile: Profile, case: &str) -> QueueArguments {
    let steps = requests::steps(case);
    let Method::QueueDeclare(declare) = &steps[0].method else { panic!("a declaration") };
    let declared = queue_declared(declare);
    QueueArguments::parse(profile, "/", &declare.queue, &declared).unwrap()
}

#[test]
fn arguments_mean_what_they_say() {
    let arguments = r#"queue q durable x-message-ttl=1u8 x-expires=2i16 x-max-length=3i64 x-max-length-bytes=4u32
        x-max-priority=5i8 x-overflow="reject-publish-dlx" x-dead-letter-exchange="a" x-dead-letter-routing-key="k"
        x-single-active-consumer=true"#;
    let case = arguments.split_whitespace().collect::<Vec<_>>().join(" ");
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        assert_eq!(
            parsed(profile, &case),
            QueueArguments {
                kind: QueueKind::Classic,
                message_ttl: Some(1),
                expires: Some(2),
                max_length: Some(3),
                max_length_bytes: Some(4),
                overflow: Overflow::RejectPublishDlx,
                dead_letter_exchange: Some(ShortStr::from_static("a")),
                dead_letter_routing_key: Some(ShortStr::from_static("k")),
                dead_letter_strategy: DeadLetterStrategy::AtMostOnce,
                max_priority: Some(5),
                single_active_consumer: true,
                delivery_limit: None,
                consumer_timeout: None,
            }
        );
    }
}

#[test]
fn a_quorum_queue_of_4_3_has_a_delivery_limit_unless_told_otherwise() {
    let limit = |profile, argument: &str| {
        let case = format!("queue q durable x-queue-type=\"quorum\"{argument}");
        parsed(profile, &case).delivery_limit
    };
    assert_eq!(limit(Profile::RabbitMq3_10, ""), None);
    assert_eq!(limit(Profile::RabbitMq4_3, ""), Some(20));
    assert_eq!(limit(Profile::RabbitMq4_3, " x-delivery-limit=5i32"), Some(5));
    assert_eq!(limit(Profile::RabbitMq4_3, " x-delivery-limit=\"5\""), Some(20));
    assert_eq!(limit(Profile::RabbitMq4_3, " x-delivery-limit=-1i32"), None);
    assert_eq!(limit(Profile::RabbitMq3_10, " x-delivery-limit=-1i32"), Some(0));
}

#[test]
fn a_quorum_queue_does_not_dead_letter_what_it_refuses() {
    let overflow = |kind: &str| {
        let case =
            format!("queue q durable x-queue-type=\"{kind}\" x-overflow=\"reject-publish-dlx\"");
        parsed(Profile::RabbitMq4_3, &case).overflow
    };
    assert_eq!(overflow("classic"), Overflow::RejectPublishDlx);
    assert_eq!(overflow("quorum"), Overflow::DropHead);
}

#[test]
fn dead_letters_are_kept_only_where_none_is_dropped_to_make_room() {
    let strategy = |arguments: &str| {
        let case = format!(
            "queue q durable x-queue-type=\"quorum\" x-dead-letter-strategy=\"at-least-once\" {arguments}"
        );
        parsed(Profile::RabbitMq4_3, &case).dead_letter_strategy
    };
    let exchange = r#"x-dead-letter-exchange="a""#;
    let refusing = r#"x-overflow="reject-publish""#;
    assert_eq!(strategy(&format!("{exchange} {refusing}")), DeadLetterStrategy::AtLeastOnce);
    assert_eq!(strategy(exchange), DeadLetterStrategy::AtMostOnce);
    assert_eq!(strategy(refusing), DeadLetterStrategy::AtMostOnce);
}

#[test]
fn a_stream_is_refused_in_words_of_our_own() {
    let arguments = Table::from_pairs([("x-queue-type", "stream".into())]).unwrap();
    let declared = QueueDeclared {
        durable: true,
        exclusive: false,
        auto_delete: false,
        arguments: &arguments,
    };
    let name = ShortStr::from_static("q");
    let refusal = QueueArguments::parse(Profile::RabbitMq4_3, "/", &name, &declared).unwrap_err();
    assert!(refusal.text.contains("streams are not implemented"), "{}", refusal.text);
}

#[test]
fn a_name_is_as_long_as_a_name_can_be() {
    let long = "x".repeat(300);
    let case = format!("queue q durable x-dead-letter-exchange=\"{long}\"");
    let arguments = parsed(Profile::RabbitMq4_3, &case);
    assert_eq!(arguments.dead_letter_exchange, Some(ShortStr::try_from("x".repeat(255)).unwrap()));
}
