use leveret::amqp::{Array, Value};
use leveret::{Exchange, Failure, Message, Queue};
use leveret_profiles::Chandra;

use crate::embedded::{broker, client_of, depth};
use crate::*;

fn profile() -> Chandra {
    Chandra::new(Exchange::topic("orders")).interval(10 * SECOND).max_retries(2)
}

fn queue() -> Queue {
    Queue::new("Q").bind("orders", "order.*")
}

#[test]
fn it_declares_what_the_document_says() {
    // "Dead-Letter Exchange and Retry Queue", 1 to 3, and "Parking Lot Queue"; the primary exchange is the producers'. The
    // dead-letter routing key and the binding with it are what makes the document's `retry.#` catch anything.
    let document = "
        exchange orders topic
        exchange Q.dlx topic
        queue Q x-dead-letter-exchange=Q.dlx x-dead-letter-routing-key=retry.Q
        binding orders -> Q [order.*]
        queue Q.retry x-dead-letter-exchange=orders x-message-ttl=10000
        binding Q.dlx -> Q.retry [retry.#]
        binding orders -> Q [retry.Q]
        queue Q.parking_lot
        binding Q.dlx -> Q.parking_lot [parking_lot]
    ";
    assert_eq!(lines(&profile().topology(queue()).unwrap()), listed(document));
    let alone = "
        exchange orders topic
        exchange Q.dlx topic
        queue Q x-dead-letter-exchange=Q.dlx x-dead-letter-routing-key=retry.Q
        binding orders -> Q [order.*]
        queue Q.retry x-dead-letter-exchange= x-dead-letter-routing-key=Q x-message-ttl=10000
        binding Q.dlx -> Q.retry [retry.#]
        queue Q.parking_lot
        binding Q.dlx -> Q.parking_lot [parking_lot]
    ";
    let topology = profile().only_to_queue().topology(queue()).unwrap();
    assert_eq!(lines(&topology), listed(alone));
    let shared = "
        exchange orders topic
        exchange dead topic
        queue Q x-dead-letter-exchange=dead x-dead-letter-routing-key=retry.Q x-dead-letter-strategy=at-least-once x-delivery-limit=1000000 x-overflow=reject-publish x-queue-type=quorum
        binding orders -> Q [order.*]
        queue Q.retry x-dead-letter-exchange=orders x-dead-letter-strategy=at-least-once x-message-ttl=10000 x-overflow=reject-publish x-queue-type=quorum
        binding dead -> Q.retry [retry.Q]
        binding orders -> Q [retry.Q]
        queue Q.parking_lot x-delivery-limit=1000000000 x-queue-type=quorum
        binding dead -> Q.parking_lot [parking_lot.Q]
    ";
    let queue = Queue::quorum("Q").bind("orders", "order.*");
    let topology = profile().shared_dead_letter_exchange("dead").topology(queue).unwrap();
    assert_eq!(lines(&topology), listed(shared));
}

#[test]
fn a_dead_letter_exchange_of_another_name_changes_no_key() {
    let usual = lines(&profile().topology(queue()).unwrap());
    let other = lines(&profile().dead_letter_exchange("dead").topology(queue()).unwrap());
    let renamed = usual.iter().map(|line| line.replace("Q.dlx", "dead")).collect();
    assert_eq!(other, renamed);
}

#[tokio::test(start_paused = true)]
async fn it_comes_back_under_its_own_key_and_is_parked_after_its_retries() {
    let queue = || queue().bind("orders", "#");
    let shared = profile().shared_dead_letter_exchange("dead");
    let scenes = [
        (profile(), queue()),
        (profile().only_to_queue(), queue()),
        (profile(), Queue::quorum("Q").bind("orders", "order.*")),
        (shared, queue()),
    ];
    for (profile, queue) in scenes {
        let broker = broker();
        let client = client_of(&broker).await;
        client.apply(&profile.topology(queue).unwrap()).await.unwrap();
        client.apply(&profile.topology(Queue::new("other")).unwrap()).await.unwrap();
        let copies = Array::from_values([Value::from("retry.copy")]).unwrap();
        let message =
            Message::new("job").header("CC", Value::Array(copies)).header("tenant", "acme");
        let publisher = client.publisher("orders").build().await.unwrap();
        publisher.publish("order.paid", message).await.unwrap();
        let (seen, summary) = consume(&client, "Q", profile, LATER, always).await;
        assert_eq!(times(&seen, 10 * SECOND), [(1, 0), (2, 1), (3, 2)]);
        assert_eq!((summary.retried, summary.parked), (2, 1));
        for seen in &seen {
            let incoming = &seen.incoming;
            let place = (incoming.exchange().to_string(), incoming.routing_key().to_string());
            assert_eq!(place, ("orders".to_owned(), "order.paid".to_owned()));
            assert_eq!(incoming.header("tenant"), Some("acme".into()));
        }
        for empty in ["Q", "Q.retry", "other", "other.retry", "other.parking_lot"] {
            assert_eq!(depth(&broker, empty), Some(0), "{empty}");
        }
        assert_eq!(depth(&broker, "Q.parking_lot"), Some(1));
        let parked = take(&client, "Q.parking_lot").await;
        check_stamp(
            &parked,
            &Stamp {
                attempts: 3,
                error: "not yet",
                kind: "early",
                reason: "exhausted",
                queue: "Q",
                exchange: "orders",
                routing_key: "order.paid",
                back: None,
            },
        );
        assert_eq!(text(&parked, "x-leveret-cc").split(' ').count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn by_the_primary_exchange_others_get_copies_and_by_the_queue_they_do_not() {
    for (profile, copies) in [(profile(), 3), (profile().only_to_queue(), 1)] {
        let broker = broker();
        let client = client_of(&broker).await;
        let audit = Topology::new().queue(Queue::new("audit").bind("orders", "#"));
        client.apply(&profile.topology(queue()).unwrap().and(audit)).await.unwrap();
        let publisher = client.publisher("orders").build().await.unwrap();
        publisher.publish("order.paid", "job").await.unwrap();
        consume(&client, "Q", profile, LATER, always).await;
        assert_eq!(depth(&broker, "audit"), Some(copies));
    }
}

#[tokio::test(start_paused = true)]
async fn permanent_errors_park_and_requeueing_does_not_count() {
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&profile().topology(queue()).unwrap()).await.unwrap();
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish("order.bad", Message::new("bad").expires_in(60 * SECOND)).await.unwrap();
    publisher.publish("order.busy", "busy").await.unwrap();
    let requeued = std::sync::atomic::AtomicU32::new(0);
    let fate = move |seen: &Seen| match seen.body.as_str() {
        "bad" => Err(Failure::permanent("never")),
        _ if requeued.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 20 => {
            Err(Failure::requeue("not here"))
        }
        _ => Ok(()),
    };
    let (seen, summary) = consume(&client, "Q", profile(), LATER, fate).await;
    assert_eq!((seen.len(), summary.parked, summary.handled), (22, 1, 1));
    assert!(seen.iter().all(|seen| seen.attempt == 1));
    let parked = take(&client, "Q.parking_lot").await;
    assert_eq!(text(&parked, "x-leveret-reason"), "permanent");
    assert_eq!(text(&parked, "x-leveret-routing-key"), "order.bad");
    assert_eq!(text(&parked, "x-leveret-expiration"), "60000");
}

#[tokio::test(start_paused = true)]
async fn an_expiration_that_dying_took_away_is_told_by_the_parked_message() {
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&profile().topology(queue()).unwrap()).await.unwrap();
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish("order.paid", Message::new("job").expires_in(60 * SECOND)).await.unwrap();
    consume(&client, "Q", profile(), LATER, always).await;
    assert_eq!(text(&take(&client, "Q.parking_lot").await, "x-leveret-expiration"), "60000");
}
