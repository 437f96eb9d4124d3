use leveret::amqp::{Array, Value};
use leveret::{Failure, Message, Queue, QueueType};
use leveret_profiles::Orb;

use crate::embedded::{broker, client_of, depth};
use crate::*;

const INBOX: &str = "orb.inbox";

#[test]
fn it_declares_what_the_document_says() {
    // "The redelivery queue is configured as the dead-letter-queue for all queues" and for the wait queue, by the names and
    // exchanges of Orb; the parking lot takes the place of dropping.
    let document = "
        exchange orb direct
        exchange orb.redelivery direct
        exchange orb.wait direct
        exchange orb.parked fanout
        queue orb.inbox x-dead-letter-exchange=orb.redelivery x-dead-letter-routing-key=orb.redelivery
        queue orb.redelivery
        queue orb.wait x-dead-letter-exchange=orb.redelivery x-dead-letter-routing-key=orb.redelivery
        queue orb.parked
        binding orb -> orb.inbox [orb.inbox]
        binding orb.redelivery -> orb.redelivery [orb.redelivery]
        binding orb.wait -> orb.wait [orb.wait]
        binding orb.parked -> orb.parked []
    ";
    assert_eq!(lines(&Orb::new().topology(Queue::new(INBOX)).unwrap()), listed(document));
    let other = "
        exchange x direct
        exchange again direct
        exchange later direct
        exchange never fanout
        queue q x-dead-letter-exchange=again x-dead-letter-routing-key=again x-dead-letter-strategy=at-least-once x-delivery-limit=1000000 x-overflow=reject-publish x-queue-type=quorum
        queue again x-delivery-limit=1000000 x-queue-type=quorum
        queue later x-dead-letter-exchange=again x-dead-letter-routing-key=again x-dead-letter-strategy=at-least-once x-overflow=reject-publish x-queue-type=quorum
        queue never x-delivery-limit=1000000000 x-queue-type=quorum
        binding x -> q [q]
        binding again -> again [again]
        binding later -> later [later]
        binding never -> never []
    ";
    let profile = Orb::new()
        .name("x")
        .redelivery_name("again")
        .wait_name("later")
        .parked_name("never")
        .queue_type(QueueType::Quorum);
    assert_eq!(lines(&profile.topology(Queue::quorum("q")).unwrap()), listed(other));
}

async fn scene(orb: &Orb, queue: Queue) -> (leveret_broker::Broker, Client) {
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&orb.topology(queue).unwrap()).await.unwrap();
    (broker, client)
}

async fn publish(client: &Client, message: Message) {
    let publisher = client.publisher("orb").build().await.unwrap();
    publisher.publish(INBOX, message).await.unwrap();
}

/// A consumer together with the service that it needs.
async fn consume_with_service(
    client: &Client,
    orb: &Orb,
    time: Duration,
    fate: impl Fn(&Seen) -> Result<(), Failure> + Send + Sync + 'static,
) -> (Vec<Seen>, Summary, Summary) {
    let service = orb.redelivery(client).run_until(tokio::time::sleep(time));
    let (consumed, redelivered) =
        tokio::join!(consume(client, INBOX, orb.clone(), time, fate), service);
    (consumed.0, consumed.1, redelivered.unwrap())
}

#[tokio::test(start_paused = true)]
async fn at_once_the_first_time_then_after_growing_waits_and_parked_after_all_attempts() {
    let types = [
        (Orb::new(), Queue::classic(INBOX)),
        (Orb::new().queue_type(QueueType::Quorum), Queue::quorum(INBOX)),
    ];
    for (orb, queue) in types {
        let orb = orb.max_interval(6 * SECOND).max_attempts(6);
        let (broker, client) = scene(&orb, queue).await;
        publish(&client, Message::new("job").message_id("7")).await;
        let (seen, summary, redelivered) = consume_with_service(&client, &orb, LATER, always).await;
        let waits: Vec<u128> =
            seen.windows(2).map(|pair| (pair[1].at - pair[0].at).as_millis() / 100).collect();
        assert_eq!(waits, [0, 20, 30, 45, 60, 60]);
        let counts: Vec<_> = seen
            .iter()
            .map(|seen| seen.incoming.header("orb-redelivery-count").map(Value::into_owned))
            .collect();
        assert_eq!(counts[0], None);
        for (n, count) in counts.iter().enumerate().skip(1) {
            assert_eq!(count.as_ref().unwrap().as_str(), Some(n.to_string().as_str()));
        }
        for (n, seen) in seen.iter().enumerate() {
            assert_eq!(seen.attempt as usize, n + 1);
            assert_eq!(seen.incoming.routing_key(), INBOX);
            assert_eq!(seen.incoming.exchange(), "orb");
            assert_eq!(seen.incoming.properties().expiration, None);
            assert_eq!(seen.incoming.properties().message_id.unwrap(), "7");
        }
        assert_eq!((summary.retried, summary.parked), (6, 1));
        // Six times it was sent back, and five times it waited before.
        assert_eq!((redelivered.retried, redelivered.parked), (6 + 5, 0));
        for empty in [INBOX, "orb.redelivery", "orb.wait"] {
            assert_eq!(depth(&broker, empty), Some(0));
        }
        let parked = take(&client, "orb.parked").await;
        assert_eq!(parked.header("orb-redelivery-count"), None);
        check_stamp(
            &parked,
            &Stamp {
                attempts: 7,
                error: "not yet",
                kind: "early",
                reason: "exhausted",
                queue: INBOX,
                exchange: "orb",
                routing_key: INBOX,
                back: Some("orb"),
            },
        );
    }
}

#[test]
fn the_defaults_are_those_of_the_document() {
    let text = format!("{:?}", Orb::new());
    for part in [
        "initial: 2s",
        "multiplier: 1.5",
        "Some(60s)",
        "immediate_first: true",
        "max_retries: Some(30)",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_others_only_reject_is_parked_by_the_service() {
    let orb = Orb::new().max_attempts(2);
    let (_broker, client) = scene(&orb, Queue::quorum(INBOX)).await;
    publish(&client, Message::new("job")).await;
    let rejecting = async {
        let mut deliveries = client.consumer(INBOX).stream().await.unwrap();
        for _ in 0..3 {
            deliveries.next().await.unwrap().unwrap().discard().unwrap();
        }
        tokio::time::sleep(LATER).await;
    };
    let service = orb.redelivery(&client).run_until(rejecting).await.unwrap();
    assert_eq!((service.retried, service.parked), (2 + 1, 1));
    let parked = take(&client, "orb.parked").await;
    check_stamp(
        &parked,
        &Stamp {
            attempts: 3,
            error: "consumers of queue \"orb.inbox\" have rejected it",
            kind: "rejected",
            reason: "exhausted",
            queue: INBOX,
            exchange: "orb",
            routing_key: INBOX,
            back: Some("orb"),
        },
    );
}

#[tokio::test(start_paused = true)]
async fn permanent_errors_park_and_requeueing_does_not_count() {
    let orb = Orb::new();
    let (_broker, client) = scene(&orb, Queue::classic(INBOX)).await;
    publish(&client, Message::new("bad")).await;
    publish(&client, Message::new("busy")).await;
    let requeued = std::sync::atomic::AtomicU32::new(0);
    let fate = move |seen: &Seen| match seen.body.as_str() {
        "bad" => Err(Failure::permanent("never")),
        _ if requeued.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 20 => {
            Err(Failure::requeue("not here"))
        }
        _ => Ok(()),
    };
    let (seen, summary, redelivered) = consume_with_service(&client, &orb, LATER, fate).await;
    assert_eq!((seen.len(), summary.parked, summary.handled), (22, 1, 1));
    assert_eq!(redelivered.retried, 0);
    assert_eq!(text(&take(&client, "orb.parked").await, "x-leveret-reason"), "permanent");
}

#[tokio::test(start_paused = true)]
async fn what_belongs_nowhere_is_parked() {
    let orb = Orb::new();
    let (broker, client) = scene(&orb, Queue::classic(INBOX)).await;
    // Somebody's own: it never died, so nothing says where it belongs.
    let stray = client.publisher("orb.redelivery").build().await.unwrap();
    stray.publish("orb.redelivery", "stray").await.unwrap();
    // It waits for a queue that is not there, or for nobody knows which.
    let waiting = client.publisher("orb.wait").build().await.unwrap();
    let later = |body: &'static str| Message::new(body).expires_in(SECOND);
    waiting.publish("orb.wait", later("gone").header("orb-queue", "orb.gone")).await.unwrap();
    waiting.publish("orb.wait", later("unnamed")).await.unwrap();
    // Its queue goes while it is on its way.
    publish(&client, Message::new("orphan")).await;
    take(&client, INBOX).await.discard().unwrap();
    client.delete_queue(INBOX, Default::default()).await.unwrap();
    let service = orb.redelivery(&client).run_until(tokio::time::sleep(60 * SECOND));
    let redelivered = service.await.unwrap();
    assert_eq!((redelivered.retried, redelivered.parked), (0, 4));
    assert_eq!(depth(&broker, "orb.redelivery"), Some(0));
    let mut bodies = Vec::new();
    for _ in 0..4 {
        let parked = take(&client, "orb.parked").await;
        assert_eq!(text(&parked, "x-leveret-reason"), "unroutable");
        let body = String::from_utf8_lossy(parked.body()).into_owned();
        bodies.push((body, text(&parked, "x-leveret-attempts")));
        parked.ack().unwrap();
    }
    bodies.sort();
    let bodies: Vec<_> = bodies.iter().map(|(body, attempts)| (&**body, &**attempts)).collect();
    // The end of a wait is no failure.
    assert_eq!(bodies, [("gone", "0"), ("orphan", "1"), ("stray", "1"), ("unnamed", "0")]);
}

#[tokio::test(start_paused = true)]
async fn a_message_that_orb_makes_to_wait_is_sent_back_and_what_has_only_waited_has_not_failed() {
    let orb = Orb::new();
    let (_broker, client) = scene(&orb, Queue::classic(INBOX)).await;
    let waiting = client.publisher("orb.wait").build().await.unwrap();
    // As earlier versions delayed messages: Orb's programs refuse such headers.
    let delayed = Message::new("delayed")
        .header("orb-queue", INBOX)
        .header("leveret-delay-03", true)
        .header("x-leveret-priority", 7i64)
        .expires_in(SECOND);
    waiting.publish("orb.wait", delayed).await.unwrap();
    let failed = Message::new("failed")
        .header("orb-queue", INBOX)
        .header("orb-redelivery-count", "4")
        .expires_in(SECOND);
    waiting.publish("orb.wait", failed).await.unwrap();
    let (seen, _, _) = consume_with_service(&client, &orb, 60 * SECOND, |_| Ok(())).await;
    let mut attempts: Vec<_> = seen.iter().map(|s| (s.body.as_str(), s.attempt)).collect();
    attempts.sort_unstable();
    assert_eq!(attempts, [("delayed", 1), ("failed", 6)]);
    let delayed = seen.iter().find(|s| s.body == "delayed").unwrap();
    assert!(delayed.incoming.header("leveret-delay-03").is_none());
    let priority = delayed.incoming.header("x-leveret-priority").unwrap();
    assert_eq!(priority.as_str(), Some("7"));
}

#[tokio::test(start_paused = true)]
async fn the_headers_that_orb_adds_can_have_other_names() {
    let orb = Orb::new().count_header("times").queue_header("belongs-to").max_attempts(3);
    let (_broker, client) = scene(&orb, Queue::classic(INBOX)).await;
    publish(&client, Message::new("job")).await;
    let (seen, summary, _) = consume_with_service(&client, &orb, LATER, always).await;
    let headers = ["times", "belongs-to", "orb-redelivery-count", "orb-queue"];
    let last = headers.map(|name| {
        let value = seen[3].incoming.header(name)?;
        value.as_str().map(str::to_owned)
    });
    assert_eq!(last, [Some("3".to_owned()), Some(INBOX.to_owned()), None, None]);
    assert_eq!((seen.len(), summary.parked), (4, 1));
    let parked = take(&client, "orb.parked").await;
    assert!(headers.iter().all(|name| parked.header(name).is_none()));
}

#[tokio::test(start_paused = true)]
async fn nobody_else_gets_copies_and_an_expiration_of_its_own_does_not_end_a_wait() {
    let orb = Orb::new().max_attempts(3);
    let (broker, client) = scene(&orb, Queue::classic(INBOX)).await;
    client.apply(&orb.topology(Queue::classic("orb.outbox")).unwrap()).await.unwrap();
    let copies = Array::from_values([Value::from("orb.outbox")]).unwrap();
    let message = Message::new("job").header("CC", Value::Array(copies)).expires_in(SECOND);
    publish(&client, message).await;
    take(&client, "orb.outbox").await.ack().unwrap();
    let (seen, _, _) = consume_with_service(&client, &orb, LATER, always).await;
    assert_eq!(times(&seen, SECOND), [(1, 0), (2, 0), (3, 2), (4, 5)]);
    assert_eq!(depth(&broker, "orb.outbox"), Some(0));
    let parked = take(&client, "orb.parked").await;
    assert_eq!(text(&parked, "x-leveret-expiration"), "1000");
    assert!(parked.header("x-leveret-cc").is_some());
}

#[tokio::test(start_paused = true)]
async fn what_expires_in_its_queue_counts_as_failed_and_does_not_go_round_for_ever() {
    let orb = Orb::new().max_attempts(3);
    let (_broker, client) = scene(&orb, Queue::classic(INBOX).message_ttl(SECOND)).await;
    publish(&client, Message::new("job")).await;
    let service = orb.redelivery(&client).run_until(tokio::time::sleep(LATER)).await.unwrap();
    assert_eq!((service.retried, service.parked), (3 + 2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_step_that_fails_may_double_a_message_and_never_loses_it() {
    let faults: [fn(&leveret_broker::Broker); 2] = [
        |broker| broker.faults().nack_publishes(1),
        |broker| broker.faults().cut_all_connections(),
    ];
    for fault in faults {
        let orb = Orb::new().max_attempts(3);
        let (broker, client) = scene(&orb, Queue::quorum(INBOX)).await;
        publish(&client, Message::new("job")).await;
        let (faulty, once) = (broker.clone(), Mutex::new(true));
        let fate = move |_: &Seen| {
            if std::mem::take(&mut *once.lock().unwrap()) {
                fault(&faulty);
            }
            Err(Failure::retry("no"))
        };
        let (_, summary, _) = consume_with_service(&client, &orb, LATER, fate).await;
        assert!(summary.parked >= 1, "{summary:?}");
        assert_eq!(take(&client, "orb.parked").await.body(), "job");
    }
}
