use leveret::{Error, ErrorKind, Exchange, ExchangeKind, Queue, RetryPolicy};
use leveret_profiles::{Acapi, Chandra, CoverArt, Orb};

use crate::embedded::{broker, client_of, soon};
use crate::*;

fn chandra() -> Chandra {
    Chandra::new(Exchange::topic("orders"))
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_the_client_knows_without_its_dead_letter_exchange_is_refused() {
    let broker = broker();
    let client = client_of(&broker).await;
    let index = "cover-art-archive.index";
    let topology = Topology::new()
        .exchange(Exchange::fanout("elsewhere"))
        .queue(Queue::classic("plain"))
        .queue(Queue::classic("other").dead_letter_to("elsewhere"))
        .queue(Queue::classic("keyless").dead_letter_to("keyless.dlx"))
        .queue(Queue::classic("passing").dead_letter_to("passing-retry").message_ttl(SECOND))
        .queue(Queue::temporary("mine"))
        .queue(Queue::classic(index));
    client.apply(&topology).await.unwrap();
    let growing = || RetryPolicy::linear(SECOND);
    let table: [(&str, Retry, &str); 14] = [
        ("plain", Acapi::new().into(), "x-dead-letter-exchange \"plain-retry\", and has none"),
        ("other", Acapi::new().into(), "x-dead-letter-exchange \"other-retry\", and has"),
        ("plain", chandra().into(), "x-dead-letter-exchange \"plain.dlx\""),
        ("keyless", chandra().into(), "x-dead-letter-routing-key \"retry.keyless\""),
        ("plain", Orb::new().into(), "x-dead-letter-exchange \"orb.redelivery\""),
        ("passing", Acapi::new().into(), "rejected. Take x-message-ttl"),
        ("new", Acapi::new().policy(growing()).into(), "different waits"),
        ("new", chandra().policy(growing().immediate_first()).into(), "different waits"),
        ("new", chandra().policy(RetryPolicy::fixed(SECOND).jitter(0.2)).into(), "different waits"),
        ("new", Acapi::new().interval(Duration::ZERO).into(), "millisecond"),
        (index, CoverArt::new().policy(growing()).into(), "different waits"),
        ("new", CoverArt::new().into(), "not the queue of a job"),
        (
            index,
            CoverArt::new().policy(RetryPolicy::fixed(SECOND).unlimited_retries()).into(),
            "a number of retries",
        ),
        ("new", Orb::new().multiplier(0.5).into(), "multiplier"),
    ];
    for (queue, retry, word) in table {
        let runner = client.consumer(queue).retry(retry).handle(async || ());
        let error = soon("a refusal", runner.run()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    for profile in [Retry::from(Acapi::new()), chandra().into(), Orb::new().into()] {
        let runner = client.consumer("mine").retry(profile).handle(async || ());
        assert_eq!(runner.run().await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    for orb in [Orb::new().multiplier(0.5), Orb::new().parked_queue("orb.wait")] {
        let error = orb.redelivery(&client).run().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn what_a_queue_may_not_have_is_refused_when_it_is_described() {
    let limited = [
        Queue::classic("q").message_ttl(SECOND),
        Queue::classic("q").max_length(10),
        Queue::quorum("q").delivery_limit(10),
    ];
    for queue in limited {
        let profiles = [Acapi::new().topology(queue.clone()), chandra().topology(queue.clone())];
        for refused in profiles {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("drops what comes back"), "{error}");
        }
        Orb::new().topology(queue).expect("its service sends it back, and nothing goes round");
    }
    let elsewhere = || Queue::classic("q").dead_letter_to("elsewhere");
    assert_eq!(Acapi::new().topology(elsewhere()).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(chandra().topology(elsewhere()).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(Orb::new().topology(elsewhere()).unwrap_err().kind(), ErrorKind::Invalid);
    let by_headers = Chandra::new(Exchange::headers("orders"));
    assert_eq!(by_headers.topology(Queue::new("q")).unwrap_err().kind(), ErrorKind::Invalid);
    by_headers.only_to_queue().topology(Queue::new("q")).unwrap();
    let nameless = Chandra::new(Exchange::direct("")).topology(Queue::new("q"));
    assert_eq!(nameless.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_somebody_else_has_declared_otherwise_is_a_conflict() {
    let broker = broker();
    let other = client_of(&broker).await;
    other.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let client = client_of(&broker).await;
    let runner = client.consumer("q").retry(Acapi::new()).handle(async || ());
    let error = soon("a refusal", runner.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert!(error.to_string().contains("x-dead-letter-exchange"), "{error}");
}

/// A rejected message that is parked as well, or a parked one that waits as well, would multiply.
#[test]
fn names_and_keys_by_which_messages_would_multiply_are_refused() {
    let refused = [
        (chandra().dead_letter_exchange_kind(ExchangeKind::Fanout), "a rejected message"),
        (chandra().dead_letter_exchange_kind(ExchangeKind::Headers), "a rejected message"),
        (chandra().retry_binding("#"), "a parked message"),
        (chandra().retry_binding("*"), "a rejected message"),
        (chandra().parking_key("retry.never"), "a parked message"),
        (chandra().parking_binding("*.*"), "a rejected message"),
        (chandra().parking_binding("retry.#").parking_key("retry"), "a rejected message"),
        (chandra().parking_binding("elsewhere"), "a parked message"),
        (chandra().shared_dead_letter_exchange("dead").retry_binding("#"), "a parked message"),
        (chandra().dead_letter_exchange("orders"), "a rejected message"),
        (chandra().dead_letter_exchange("orders").return_key("retry.x"), "has waited"),
        (chandra().retry_queue("q"), "different names"),
        (chandra().parking_queue("q.retry"), "different names"),
    ];
    for (profile, word) in refused {
        check_refused(profile.topology(work_queue()), word);
    }
    let sound = [
        chandra().dead_letter_exchange_kind(ExchangeKind::Direct),
        chandra().dead_letter_exchange_kind("x-delayed-message".into()),
        chandra().dead_letter_exchange("orders").only_to_queue(),
        chandra().dead_letter_exchange("orders").return_key("order.q"),
        chandra().retry_binding("*.q").parking_binding("parking_lot.#"),
        Chandra::new(Exchange::fanout("orders")),
        Chandra::new(Exchange::direct("orders")),
    ];
    for profile in sound {
        profile.topology(work_queue()).unwrap();
    }
}

#[test]
fn names_of_the_other_profiles_by_which_messages_would_multiply_are_refused() {
    let acapi = [
        (Acapi::new().retry_exchange("x").error_exchange("x"), r#"{"q-error", "q-retry"}"#),
        (Acapi::new().topic().retry_exchange("x").requeue_exchange("x"), r#"{"q", "q-retry"}"#),
        (Acapi::new().topic().retry_exchange("orders").retry_key("no"), r#"{"q", "q-retry"}"#),
        (Acapi::new().error_exchange("orders"), r#"{"q", "q-error"}"#),
        (Acapi::new().retry_queue("q"), "different names"),
        (Acapi::new().error_queue("q-retry"), "different names"),
    ];
    for (profile, word) in acapi {
        check_refused(profile.topology(work_queue()), word);
    }
    let art = || CoverArt::new().name("art");
    let cover_art = [
        (art().retry_exchange("x").failed_exchange("x"), r#"{"art.failed", "art.retry"}"#),
        (art().retry_exchange("art"), r#"{"art.index", "art.retry"}"#),
        (art().failed_exchange("art"), r#"{"art.failed", "art.index"}"#),
        (art().failed_queue("art.retry"), "different names"),
        (art().failed_queue("art.move"), "different names"),
        (art().job("one", "a").job("one", "b"), "different names"),
    ];
    for (profile, word) in cover_art {
        check_refused(profile.topology(), word);
    }
    let orb = [
        (Orb::new().wait_exchange("orb").wait_key("q"), r#"{"orb.wait", "q"}"#),
        (
            Orb::new().redelivery_exchange("orb.wait").redelivery_key("orb.wait"),
            r#"{"orb.redelivery", "orb.wait"}"#,
        ),
        (Orb::new().parked_exchange("orders"), r#"{"orb.parked", "q"}"#),
        (Orb::new().parked_queue("orb.wait"), "different names"),
        (Orb::new().redelivery_queue("q"), "different names"),
    ];
    for (profile, word) in orb {
        check_refused(profile.topology(work_queue()), word);
    }
    Acapi::new().topic().requeue_exchange("orders").topology(work_queue()).unwrap();
    Orb::new().redelivery_exchange("orb").wait_exchange("orb").topology(work_queue()).unwrap();
}

fn work_queue() -> Queue {
    Queue::new("q").bind("orders", "order.*")
}

fn check_refused(topology: Result<Topology, leveret::Error>, word: &str) {
    let error = topology.expect_err(word);
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains(word), "{word} is not in: {error}");
}

#[test]
fn the_designs_of_others_refuse_times_that_their_queues_cannot_have() {
    let times =
        [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(u64::MAX), Duration::MAX];
    let check = |what: &str, time: Duration, outcome: Result<Topology, Error>| {
        let kind = outcome.err().map(|error| error.kind());
        assert!(matches!(kind, None | Some(ErrorKind::Invalid)), "{what} {time:?}: {kind:?}");
    };
    for time in times {
        check("Acapi", time, Acapi::new().interval(time).topology(Queue::classic("q")));
        check(
            "Chandra",
            time,
            Chandra::new(Exchange::topic("x")).interval(time).topology(Queue::classic("q")),
        );
        check("CoverArt", time, CoverArt::new().interval(time).topology());
        let orb = Orb::new().initial_interval(time).max_interval(time);
        check("Orb", time, orb.topology(Queue::classic("q")));
    }
}
