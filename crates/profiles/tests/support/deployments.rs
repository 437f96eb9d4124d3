//! Deployments of the four designs by other programs, whose objects have names and keys of their own.

// It is a part of two kinds of tests.
#![allow(dead_code, unreachable_pub)]

use std::time::Duration;

use leveret::{Binding, Exchange, ExchangeKind, Queue, QueueType, Retry, Topology};
use leveret_profiles::{Acapi, Chandra, CoverArt, Orb};

/// How long messages wait there.
pub const WAIT: Duration = Duration::from_millis(100);

pub struct Deployment {
    pub design: &'static str,
    /// What other programs have declared.
    pub there: Topology,
    /// What the profile declares once it was told all names.
    pub ours: Topology,
    /// As the other programs have declared it.
    pub work: Queue,
    /// Where its messages are published to.
    pub address: (&'static str, &'static str),
    pub parked: &'static str,
    /// The same with three deliveries each.
    pub retry: Retry,
    /// Of Orb: what has to run beside it.
    pub orb: Option<Orb>,
}

/// All of them, with queues of this type and without any argument that the designs do not name.
pub fn all(queue_type: QueueType) -> [Deployment; 4] {
    [chandra(queue_type), acapi(queue_type), cover_art(queue_type), orb(queue_type)]
}

fn chandra(queue_type: QueueType) -> Deployment {
    let queue = |name: &str| Queue::new(name).of_type(queue_type);
    let work = queue("billing")
        .dead_letter_to("dead")
        .dead_letter_key("again.billing")
        .bind("shop", "paid");
    let wait = queue("billing_wait").message_ttl(WAIT).dead_letter_to("shop");
    let there = Topology::new()
        .exchange(Exchange::direct("shop"))
        .exchange(Exchange::topic("dead"))
        .queue(work.clone())
        .queue(wait.dead_letter_key("back.billing").bind("dead", "again.*"))
        .binding(Binding::to_queue("billing", "shop", "back.billing"))
        .queue(queue("graveyard").bind("dead", "dead.#"));
    let profile = Chandra::new(Exchange::direct("shop"))
        .dead_letter_exchange("dead")
        .retry_queue("billing_wait")
        .retry_key("again.billing")
        .retry_binding("again.*")
        .return_key("back.billing")
        .parking_queue("graveyard")
        .parking_key("dead.billing")
        .parking_binding("dead.#")
        .interval(WAIT)
        .max_retries(2)
        .plain_arguments();
    Deployment {
        design: "chandra",
        ours: profile.topology(work.clone()).unwrap(),
        there,
        work,
        address: ("shop", "paid"),
        parked: "graveyard",
        retry: profile.into(),
        orb: None,
    }
}

fn acapi(queue_type: QueueType) -> Deployment {
    let queue = |name: &str| Queue::new(name).of_type(queue_type);
    let work = queue("mail").dead_letter_to("failing");
    let wait = queue("mail_wait").message_ttl(WAIT).dead_letter_to("again");
    let there = Topology::new()
        .exchange(Exchange::topic("failing"))
        .exchange(Exchange::topic("again"))
        .exchange(Exchange::topic("broken"))
        .queue(wait.bind("failing", "mail"))
        .queue(work.clone())
        .binding(Binding::to_queue("mail", "again", "*"))
        .queue(queue("mail_broken").bind("broken", "mail.#"));
    let profile = Acapi::new()
        .topic()
        .retry_exchange("failing")
        .retry_queue("mail_wait")
        .retry_key("mail")
        .requeue_exchange("again")
        .requeue_key("*")
        .error_exchange("broken")
        .error_queue("mail_broken")
        .error_key("mail.#")
        .interval(WAIT)
        .max_retries(2)
        .plain_arguments();
    Deployment {
        design: "acapi",
        ours: profile.topology(work.clone()).unwrap(),
        there,
        work,
        address: ("", "mail"),
        parked: "mail_broken",
        retry: profile.into(),
        orb: None,
    }
}

fn cover_art(queue_type: QueueType) -> Deployment {
    let queue = |name: &str| Queue::new(name).of_type(queue_type);
    let work = queue("indexer").bind("archive", "index");
    let wait = queue("later").message_ttl(WAIT).dead_letter_to("archive");
    let there = Topology::new()
        .exchange(Exchange::direct("archive"))
        .exchange(Exchange::fanout("postponed"))
        .exchange(Exchange::fanout("lost"))
        .queue(wait.bind("postponed", ""))
        .queue(queue("never").bind("lost", ""))
        .queue(work.clone());
    let profile = CoverArt::new()
        .name("archive")
        .jobs([""; 0])
        .job("indexer", "index")
        .retry_exchange("postponed")
        .retry_queue("later")
        .failed_exchange("lost")
        .failed_queue("never")
        .interval(WAIT)
        .max_retries(2)
        .plain_arguments()
        .queue_type(queue_type);
    Deployment {
        design: "cover art",
        ours: profile.topology().unwrap(),
        there,
        work,
        address: ("archive", "index"),
        parked: "never",
        retry: profile.into(),
        orb: None,
    }
}

fn orb(queue_type: QueueType) -> Deployment {
    let queue = |name: &str| Queue::new(name).of_type(queue_type);
    let redelivered = |queue: Queue| queue.dead_letter_to("back").dead_letter_key("rejected");
    let work = redelivered(queue("inbox")).bind("domain", "inbox");
    let there = Topology::new()
        .exchange(Exchange::direct("domain"))
        .exchange(Exchange::direct("back"))
        .exchange(Exchange::direct("pause"))
        .exchange(Exchange::new("given-up", ExchangeKind::Fanout))
        .queue(queue("redeliveries").bind("back", "rejected"))
        .queue(redelivered(queue("paused")).bind("pause", "slow"))
        .queue(queue("lot").bind("given-up", ""))
        .queue(work.clone());
    let orb = Orb::new()
        .exchange("domain")
        .redelivery_exchange("back")
        .redelivery_key("rejected")
        .redelivery_queue("redeliveries")
        .wait_exchange("pause")
        .wait_key("slow")
        .wait_queue("paused")
        .parked_exchange("given-up")
        .parked_queue("lot")
        .initial_interval(WAIT)
        .max_attempts(2)
        .plain_arguments()
        .queue_type(queue_type);
    Deployment {
        design: "orb",
        ours: orb.topology(work.clone()).unwrap(),
        there,
        work,
        address: ("domain", "inbox"),
        parked: "lot",
        retry: orb.clone().into(),
        orb: Some(orb),
    }
}
