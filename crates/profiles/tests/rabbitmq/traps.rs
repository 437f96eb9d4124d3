//! The designs of retrying that have names, with short waits, and what the broker does that they must not fall into.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::{Array, GetOptions, Table, Value};
use leveret::{
    Client, Delivery, ErrorKind, Exchange, Failure, Incoming, Message, Queue, QueueType, Retry,
    RetryPolicy, Topology,
};
use leveret_profiles::{Acapi, Chandra, CoverArt, Orb};
use leveret_testkit::{eventually, rabbitmq};

use crate::client::{SOON, client, publisher, soon, until_consumed, until_depth};

const WAIT: Duration = Duration::from_millis(100);

/// What a handler saw of a delivery: the attempt, exchange and routing key.
type Seen = (u32, String, String);

/// Lets a consumer fail until `parked` has a message, and says what it saw.
async fn fail_until_parked(client: &Client, queue: &str, retry: Retry, parked: &str) -> Vec<Seen> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let seen = Arc::clone(&seen);
        move |incoming: Incoming| {
            let place = (incoming.exchange().to_string(), incoming.routing_key().to_string());
            seen.lock().unwrap().push((incoming.attempt(), place.0, place.1));
            async { Err::<(), _>(Failure::retry("not yet").kind("early")) }
        }
    };
    let runner = client.consumer(queue).retry(retry).handle(handler);
    let stop = until_depth(client, parked, 1);
    soon("the end", runner.run_until(stop)).await.unwrap();
    seen.lock().unwrap().clone()
}

fn attempts(number: u32, exchange: &str, key: &str) -> Vec<Seen> {
    (1..=number).map(|n| (n, exchange.to_owned(), key.to_owned())).collect()
}

pub(super) async fn take(client: &Client, queue: &str) -> Delivery {
    let got = soon("an answer", client.get(queue, GetOptions::default())).await.unwrap();
    got.unwrap_or_else(|| panic!("a message in {queue}"))
}

fn text(delivery: &Delivery, header: &str) -> String {
    let value = delivery.header(header).unwrap_or_else(|| panic!("no header {header}"));
    value.as_str().expect("text").to_owned()
}

/// What every parked message says, and that it would begin anew.
fn check_stamp(parked: &Delivery, attempts: i64, [queue, exchange, key]: [&str; 3]) {
    assert_eq!(text(parked, "x-leveret-attempts"), attempts.to_string());
    assert_eq!(text(parked, "x-leveret-error"), "not yet");
    assert_eq!(text(parked, "x-leveret-error-kind"), "early");
    assert_eq!(text(parked, "x-leveret-reason"), "exhausted");
    assert_eq!(text(parked, "x-leveret-queue"), queue);
    assert_eq!(text(parked, "x-leveret-exchange"), exchange);
    assert_eq!(text(parked, "x-leveret-routing-key"), key);
    for time in ["x-leveret-first-failure", "x-leveret-last-failure"] {
        assert!(text(parked, time).as_str() > "2023-11-14T22:13:20Z", "{time}");
    }
    assert_eq!(parked.body(), "job");
    assert_eq!(text(parked, "tenant"), "acme");
    assert_eq!(parked.properties().message_id.as_ref().unwrap(), "7");
}

/// A message that would send a copy to the queue `other` each time that it is published.
fn job() -> Message {
    let copies = Array::from_values([Value::from("other")]).unwrap();
    let message = Message::new("job").message_id("7").header("tenant", "acme");
    message.header("CC", Value::Array(copies)).expires_in(Duration::from_secs(600))
}

fn queues(name: &str) -> [Queue; 3] {
    [Queue::new(name), Queue::classic(name), Queue::quorum(name)]
}

#[tokio::test]
async fn acapi_comes_back_by_itself_and_ends_in_the_error_queue() {
    for (queue, profile) in
        queues("Q").into_iter().zip([Acapi::new().topic(), Acapi::new(), Acapi::new()])
    {
        let vhost = rabbitmq::vhost().await;
        let client = client(&vhost).await;
        let profile = profile.interval(WAIT).max_retries(2);
        let orders = Topology::new()
            .exchange(Exchange::topic("orders"))
            .queue(Queue::new("other").bind("orders", "other"));
        let topology = profile.topology(queue.bind("orders", "order.*")).unwrap();
        soon("objects", client.apply(&orders.and(topology))).await.unwrap();
        let publisher = client.publisher("orders").build().await.unwrap();
        soon("an outcome", publisher.publish("order.paid", job())).await.unwrap();
        let seen = fail_until_parked(&client, "Q", profile.into(), "Q-error").await;
        assert_eq!(seen, attempts(3, "orders", "order.paid"));
        let parked = take(&client, "Q-error").await;
        check_stamp(&parked, 3, ["Q", "orders", "order.paid"]);
        assert_eq!(parked.routing_key(), "order.paid");
        assert_eq!(text(&parked, "x-leveret-return"), "Q-retry-requeue");
        assert_eq!(text(&parked, "x-leveret-expiration"), "600000");
        assert_eq!(parked.header("x-death"), None);
        let info: serde_json::Value = serde_json::from_str(&text(&parked, "retry_info")).unwrap();
        assert_eq!((&info["num_attempts"], &info["error"]), (&3.into(), &"not yet".into()));
        let deaths = info["properties"]["headers"]["x-death"].as_array().unwrap();
        let rejected = deaths.iter().find(|death| death["queue"] == "Q").unwrap();
        assert_eq!(rejected["count"], 2);
        until_depth(&client, "other", 1).await;
        parked.ack().unwrap();
    }
}

/// What the Maxretry handler of Sneakers declares, numbers as Ruby sends them.
fn of_sneakers() -> Topology {
    let wait = Queue::new("Q-retry")
        .argument("x-dead-letter-exchange", "Q-retry-requeue")
        .argument("x-message-ttl", 100i32)
        .bind("Q-retry", "#");
    Topology::new()
        .exchange(Exchange::topic("Q-retry"))
        .exchange(Exchange::topic("Q-error"))
        .exchange(Exchange::topic("Q-retry-requeue"))
        .queue(wait)
        .queue(Queue::new("Q-error").bind("Q-error", "#"))
        .queue(Queue::new("Q").dead_letter_to("Q-retry").bind("Q-retry-requeue", "#"))
}

#[tokio::test]
async fn acapi_takes_up_the_work_of_sneakers_in_the_queues_that_are_there() {
    let vhost = rabbitmq::vhost().await;
    let sneakers = client(&vhost).await;
    soon("objects", sneakers.apply(&of_sneakers())).await.unwrap();
    soon("an outcome", publisher(&sneakers).await.publish("Q", "job")).await.unwrap();
    // A worker of theirs has rejected it once.
    take(&sneakers, "Q").await.discard().unwrap();
    let client = client(&vhost).await;
    let profile = Acapi::new().topic().interval(WAIT).max_retries(2);
    let seen = fail_until_parked(&client, "Q", profile.into(), "Q-error").await;
    let numbers: Vec<u32> = seen.iter().map(|(attempt, ..)| *attempt).collect();
    assert_eq!(numbers, [2, 3]);
    let fanouts = crate::client::client(&vhost).await;
    let runner = fanouts.consumer("Q").retry(Acapi::new().interval(WAIT)).handle(async || ());
    let error = soon("a refusal", runner.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
}

#[tokio::test]
async fn cover_art_counts_down_and_ends_in_the_failed_queue() {
    for queue_type in [None, Some(QueueType::Classic), Some(QueueType::Quorum)] {
        let vhost = rabbitmq::vhost().await;
        let client = client(&vhost).await;
        let mut profile =
            CoverArt::new().name("p").jobs(["index", "other"]).interval(WAIT).max_retries(2);
        if let Some(queue_type) = queue_type {
            profile = profile.queue_type(queue_type);
        }
        soon("objects", client.apply(&profile.topology().unwrap())).await.unwrap();
        let publisher = client.publisher("p").build().await.unwrap();
        soon("an outcome", publisher.publish("index", job())).await.unwrap();
        let seen = fail_until_parked(&client, "p.index", profile.into(), "p.failed").await;
        assert_eq!(seen, attempts(3, "p", "index"));
        let parked = take(&client, "p.failed").await;
        check_stamp(&parked, 3, ["p.index", "p", "index"]);
        assert_eq!(parked.routing_key(), "index");
        assert_eq!(parked.header("x-leveret-return"), None, "it would send copies");
        assert_eq!(parked.header("mb-retries"), None);
        let errors = parked.header("mb-exceptions").unwrap().into_owned();
        let errors: Vec<_> = errors.as_array().unwrap().iter().map(Value::into_owned).collect();
        assert_eq!(errors, ["not yet", "not yet", "not yet"].map(Value::from));
        until_depth(&client, "p.other", 1).await;
        parked.ack().unwrap();
    }
}

#[tokio::test]
async fn chandra_comes_back_under_its_own_key_and_ends_in_the_parking_lot() {
    for queue in queues("Q") {
        for to_queue in [false, true] {
            let vhost = rabbitmq::vhost().await;
            let client = client(&vhost).await;
            let mut profile =
                Chandra::new(Exchange::direct("orders")).interval(WAIT).max_retries(2);
            if to_queue {
                profile = profile.only_to_queue();
            }
            let topology = profile.topology(queue.clone().bind("orders", "paid")).unwrap();
            let other = Topology::new().queue(Queue::new("other").bind("orders", "other"));
            soon("objects", client.apply(&topology.and(other))).await.unwrap();
            let publisher = client.publisher("orders").build().await.unwrap();
            soon("an outcome", publisher.publish("paid", job())).await.unwrap();
            let seen = fail_until_parked(&client, "Q", profile.into(), "Q.parking_lot").await;
            assert_eq!(seen, attempts(3, "orders", "paid"));
            let parked = take(&client, "Q.parking_lot").await;
            check_stamp(&parked, 3, ["Q", "orders", "paid"]);
            assert_eq!(text(&parked, "x-leveret-cc"), "other");
            until_depth(&client, "other", 1).await;
            parked.ack().unwrap();
        }
    }
}

#[tokio::test]
async fn orb_sends_back_at_once_then_after_waits_and_parks() {
    for queue_type in [QueueType::Classic, QueueType::Quorum] {
        let vhost = rabbitmq::vhost().await;
        let client = client(&vhost).await;
        let orb = Orb::new()
            .initial_interval(WAIT)
            .max_interval(2 * WAIT)
            .max_attempts(4)
            .queue_type(queue_type);
        for name in ["inbox", "other"] {
            let queue = Queue::new(name).of_type(queue_type);
            soon("objects", client.apply(&orb.topology(queue).unwrap())).await.unwrap();
        }
        let publisher = client.publisher("orb").build().await.unwrap();
        soon("an outcome", publisher.publish("inbox", job())).await.unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let service = tokio::spawn(orb.redelivery(&client).run_until(stopped));
        let seen = fail_until_parked(&client, "inbox", orb.into(), "orb.parked").await;
        assert_eq!(seen, attempts(5, "orb", "inbox"));
        stop.send(()).unwrap();
        let redelivered = soon("the service's end", service).await.unwrap().unwrap();
        // Four times it was sent back, and three times it waited before.
        assert_eq!((redelivered.retried, redelivered.parked), (7, 0));
        let parked = take(&client, "orb.parked").await;
        check_stamp(&parked, 5, ["inbox", "orb", "inbox"]);
        assert_eq!(parked.header("x-leveret-return"), None, "it would send copies");
        assert_eq!(text(&parked, "x-leveret-expiration"), "600000");
        assert_eq!(parked.header("orb-redelivery-count"), None);
        until_depth(&client, "other", 1).await;
        parked.ack().unwrap();
    }
}

/// A queue whose messages go to `wait` when they are rejected or expire, and come back after a short while.
fn round(work: Queue) -> Topology {
    Topology::new()
        .exchange(Exchange::fanout("out"))
        .exchange(Exchange::fanout("back"))
        .queue(work.dead_letter_to("out").bind("back", ""))
        .queue(Queue::classic("wait").message_ttl(WAIT).dead_letter_to("back").bind("out", ""))
}

#[tokio::test]
async fn trap_1_what_goes_round_without_a_rejection_is_dropped_and_such_a_round_is_refused() {
    for queue in [Queue::classic("Q"), Queue::quorum("Q")] {
        let vhost = rabbitmq::vhost().await;
        let client = client(&vhost).await;
        let passing = queue.message_ttl(WAIT);
        assert!(round(passing.clone()).dropping_cycle().is_some());
        soon("objects", client.apply(&round(passing.clone()))).await.unwrap();
        soon("an outcome", publisher(&client).await.publish("Q", "job")).await.unwrap();
        eventually(SOON, "the loss of the message", async || {
            let mut all = 0;
            for queue in ["Q", "wait"] {
                all +=
                    client.inspect_queue(queue).await.map_err(|error| error.to_string())?.messages;
            }
            // On its way between queues it is in none: it stays away for longer than that takes.
            if all > 0 {
                return Err(all.to_string());
            }
            tokio::time::sleep(3 * WAIT).await;
            let found = client.inspect_queue("wait").await.map_err(|error| error.to_string())?;
            let work = client.inspect_queue("Q").await.map_err(|error| error.to_string())?;
            if found.messages + work.messages == 0 {
                Ok(())
            } else {
                Err("it goes round".to_owned())
            }
        })
        .await;
        assert_eq!(Acapi::new().topology(passing.clone()).unwrap_err().kind(), ErrorKind::Invalid);
        let chandra = Chandra::new(Exchange::direct("x")).topology(passing);
        assert_eq!(chandra.unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[tokio::test]
async fn trap_2_the_shorter_of_two_times_wins_and_an_expiration_of_its_own_does_not_end_a_wait() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let waiting = Queue::classic("w")
        .message_ttl(Duration::from_secs(600))
        .dead_letter_to("")
        .dead_letter_key("end");
    let topology = Topology::new().queue(waiting).queue(Queue::classic("end"));
    soon("objects", client.apply(&topology)).await.unwrap();
    let short = || Message::new("job").expires_in(WAIT);
    soon("an outcome", publisher(&client).await.publish("w", short())).await.unwrap();
    until_depth(&client, "end", 1).await;

    let long = Duration::from_secs(600);
    let profile = CoverArt::new().name("p").jobs(["index"]).interval(long);
    soon("objects", client.apply(&profile.topology().unwrap())).await.unwrap();
    let jobs = client.publisher("p").build().await.unwrap();
    let handler = async || Err::<(), _>("no");
    let runner = client.consumer("p.index").retry(profile).handle(handler);
    let stop = async {
        // Whoever waits for a message gets it before it can expire.
        until_consumed(&client, "p.index").await;
        soon("an outcome", jobs.publish("index", short())).await.unwrap();
        until_depth(&client, "p.retry", 1).await;
        tokio::time::sleep(3 * WAIT).await;
    };
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!(summary.failed, 1);
    until_depth(&client, "p.retry", 1).await;
}

#[tokio::test]
async fn trap_3_a_missing_dead_letter_exchange_swallows_and_a_profile_does_not_begin_without_it() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let topology = Topology::new().queue(Queue::classic("Q").dead_letter_to("nowhere"));
    soon("objects", client.apply(&topology)).await.unwrap();
    soon("an outcome", publisher(&client).await.publish("Q", "job")).await.unwrap();
    take(&client, "Q").await.discard().unwrap();
    until_depth(&client, "Q", 0).await;
    for retry in [Retry::from(Acapi::new()), Orb::new().into()] {
        let runner = client.consumer("Q").retry(retry).handle(async || ());
        let error = soon("a refusal", runner.run()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[tokio::test]
async fn trap_4_dead_letters_go_by_all_keys_they_came_with_unless_they_get_another() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let out = |name: &str| Queue::classic(name).message_ttl(WAIT).dead_letter_to("back");
    let topology = Topology::new()
        .exchange(Exchange::direct("back"))
        .queue(out("keeping").bind("back", "nothing"))
        .queue(out("changing").dead_letter_key("end"))
        .queue(Queue::classic("end").bind("back", "end").bind("back", "keeping"))
        .queue(Queue::classic("other").bind("back", "other"));
    soon("objects", client.apply(&topology)).await.unwrap();
    let publisher = publisher(&client).await;
    // Each is a copy by the default exchange at first: it goes to `other` when it is published.
    soon("an outcome", publisher.publish("keeping", job())).await.unwrap();
    until_depth(&client, "end", 1).await;
    until_depth(&client, "other", 2).await;
    soon("an outcome", publisher.publish("changing", job())).await.unwrap();
    until_depth(&client, "end", 2).await;
    until_depth(&client, "other", 3).await;
    // The tests of the profiles have a message of the same kind, and see that `other` gets one copy.
}

#[tokio::test]
async fn a_message_stands_behind_one_that_waits_longer_in_the_same_queue() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let waiting = Queue::classic("w").dead_letter_to("").dead_letter_key("end");
    let topology = Topology::new().queue(waiting).queue(Queue::classic("end"));
    soon("objects", client.apply(&topology)).await.unwrap();
    let publisher = publisher(&client).await;
    for time in [10 * WAIT, WAIT] {
        let message = Message::new(format!("{time:?}")).expires_in(time);
        soon("an outcome", publisher.publish("w", message)).await.unwrap();
    }
    until_depth(&client, "end", 2).await;
    assert_eq!(take(&client, "end").await.body(), format!("{:?}", 10 * WAIT).as_str());
    // So designs with one wait queue refuse policies with different waits.
    let growing = RetryPolicy::linear(WAIT);
    let refused = Acapi::new().policy(growing.clone()).topology(Queue::new("q"));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    let refused =
        Chandra::new(Exchange::direct("x")).policy(growing.clone()).topology(Queue::new("q"));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(CoverArt::new().policy(growing).topology().unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_story_that_a_client_has_published_does_not_lead_orb_astray() {
    let mut deaths = Array::new();
    for (queue, reason) in
        [("orb.wait", "expired"), ("elsewhere", "rejected"), ("inbox", "expired")]
    {
        let mut death = Table::new();
        death.insert("count", 4i64).unwrap();
        death.insert("reason", reason).unwrap();
        death.insert("queue", queue).unwrap();
        death.insert("exchange", "orb").unwrap();
        let keys = Array::from_values([Value::from(queue)]).unwrap();
        death.insert("routing-keys", Value::Array(keys)).unwrap();
        death.insert("time", Value::Timestamp(1_700_000_000)).unwrap();
        deaths.push(Value::Table(death)).unwrap();
    }
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let orb = Orb::new().initial_interval(WAIT).max_attempts(2);
    soon("objects", client.apply(&orb.topology(Queue::classic("inbox")).unwrap())).await.unwrap();
    let publisher = client.publisher("orb").build().await.unwrap();
    let message = Message::new("job").header("x-death", Value::Array(deaths));
    soon("an outcome", publisher.publish("inbox", message)).await.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let service = tokio::spawn(orb.redelivery(&client).run_until(stopped));
    let seen = fail_until_parked(&client, "inbox", orb.into(), "orb.parked").await;
    assert_eq!(seen.len(), 3, "{seen:?}");
    stop.send(()).unwrap();
    soon("the service's end", service).await.unwrap().unwrap();
}

#[tokio::test]
async fn trap_5_a_delivery_limit_takes_messages_out_for_good_and_profiles_are_out_of_its_way() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let limited = Queue::quorum("Q").delivery_limit(2);
    assert!(round(limited.clone()).dropping_cycle().is_some());
    soon("objects", client.apply(&round(limited.clone()))).await.unwrap();
    soon("an outcome", publisher(&client).await.publish("Q", "job")).await.unwrap();
    // A consumer that goes away with it counts on every version, and a requeue on some.
    let mut deliveries = 0;
    while goes_away_with_a_message(&vhost, "Q").await {
        deliveries += 1;
        assert!(deliveries < 20, "there is a limit");
    }
    until_depth(&client, "Q", 0).await;
    until_depth(&client, "wait", 0).await;
    assert_eq!(Acapi::new().topology(limited.clone()).unwrap_err().kind(), ErrorKind::Invalid);

    let profile = Acapi::new().interval(WAIT).max_retries(1);
    soon("objects", client.apply(&profile.topology(Queue::quorum("safe")).unwrap())).await.unwrap();
    soon("an outcome", publisher(&client).await.publish("safe", "job")).await.unwrap();
    let requeued = Arc::new(Mutex::new(0));
    let handler = {
        let requeued = Arc::clone(&requeued);
        move || {
            let mut requeued = requeued.lock().unwrap();
            *requeued += 1;
            let outcome =
                if *requeued <= 60 { Failure::requeue("not here") } else { Failure::retry("no") };
            async move { Err::<(), _>(outcome) }
        }
    };
    let runner = client.consumer("safe").retry(profile).handle(handler);
    let stop = until_depth(&client, "safe-error", 1);
    soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!(*requeued.lock().unwrap(), 62);
    let parked = take(&client, "safe-error").await;
    assert_eq!(text(&parked, "x-leveret-attempts"), "2");
}

/// Whether there was a message to go away with.
async fn goes_away_with_a_message(vhost: &rabbitmq::Vhost, queue: &str) -> bool {
    let passing = client(vhost).await;
    let mut deliveries = soon("a consumer", passing.consumer(queue).stream()).await.unwrap();
    let taken = tokio::time::timeout(5 * WAIT, deliveries.next()).await;
    passing.close().await;
    taken.is_ok()
}

#[tokio::test]
async fn trap_10_a_queue_with_other_arguments_is_a_conflict_that_names_them() {
    let vhost = rabbitmq::vhost().await;
    let there = client(&vhost).await;
    soon("a queue", there.apply(&Topology::new().queue(Queue::classic("Q")))).await.unwrap();
    let client = client(&vhost).await;
    let runner = client.consumer("Q").retry(Acapi::new()).handle(async || ());
    let error = soon("a refusal", runner.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert!(error.to_string().contains("x-dead-letter-exchange"), "{error}");
}

/// RabbitMQ 4.0 counts what is requeued, so it is put into its queue anew; and it does not believe what such a message says
/// about its deaths.
#[tokio::test]
async fn what_is_requeued_between_rejections_keeps_its_count() {
    let chandra = || Chandra::new(Exchange::topic("orders")).interval(WAIT).max_retries(2);
    let acapi = || Acapi::new().interval(WAIT).max_retries(2);
    // With no delivery limit of their own.
    let plain = Queue::quorum("q").bind("orders", "order.*");
    let of_acapi = plain.clone().dead_letter_to("q-retry");
    let of_chandra = plain.dead_letter_to("q.dlx").dead_letter_key("retry.q");
    let profiles: [(Queue, Retry, &str); 2] =
        [(of_acapi, acapi().into(), "q-error"), (of_chandra, chandra().into(), "q.parking_lot")];
    for (queue, retry, parked) in profiles {
        let vhost = rabbitmq::vhost().await;
        let client = client(&vhost).await;
        let topology = Topology::new().exchange(Exchange::topic("orders")).queue(queue);
        soon("a topology", client.apply(&topology)).await.unwrap();
        let publisher = soon("a publisher", client.publisher("orders").build()).await.unwrap();
        soon("an outcome", publisher.publish("order.paid", job())).await.unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let handler = {
            let seen = Arc::clone(&seen);
            move |incoming: Incoming| {
                let mut seen = seen.lock().unwrap();
                seen.push((incoming.attempt(), incoming.routing_key().to_string()));
                // Rejected each third time.
                let failure = match seen.len() % 3 {
                    0 => Failure::retry("not yet").kind("early"),
                    _ => Failure::requeue("not here"),
                };
                async { Err::<(), _>(failure) }
            }
        };
        let runner = client.consumer("q").retry(retry).handle(handler);
        let stop = async {
            eventually(SOON, "a parked message", async || {
                client.inspect_queue(parked).await.is_ok_and(|lot| lot.messages == 1)
            })
            .await;
        };
        soon("the end", runner.run_until(stop)).await.unwrap();
        let expected =
            [1, 1, 1, 2, 2, 2, 3, 3, 3].map(|attempt| (attempt, "order.paid".to_owned()));
        assert_eq!(*seen.lock().unwrap(), expected);
        let parked = take(&client, parked).await;
        check_stamp(&parked, 3, ["q", "orders", "order.paid"]);
        assert!(parked.header("x-leveret-rejected").is_none(), "it would begin with a count");
        parked.ack().unwrap();
    }
}
