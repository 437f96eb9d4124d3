use leveret::amqp::{Array, Value};
use leveret::{Failure, Message, QueueType};
use leveret_profiles::CoverArt;

use crate::embedded::{broker, client_of, depth};
use crate::*;

const INDEX: &str = "cover-art-archive.index";
const FAILED: &str = "cover-art-archive.failed";

/// "five queues" and "three exchanges" of the document.
const DOCUMENT: &str = "
    exchange cover-art-archive direct
    exchange cover-art-archive.retry fanout
    exchange cover-art-archive.failed fanout
    queue cover-art-archive.index
    queue cover-art-archive.delete
    queue cover-art-archive.move
    queue cover-art-archive.retry x-dead-letter-exchange=cover-art-archive x-message-ttl=14400000
    queue cover-art-archive.failed
    binding cover-art-archive -> cover-art-archive.index [index]
    binding cover-art-archive -> cover-art-archive.delete [delete]
    binding cover-art-archive -> cover-art-archive.move [move]
    binding cover-art-archive.retry -> cover-art-archive.retry []
    binding cover-art-archive.failed -> cover-art-archive.failed []
";

#[test]
fn it_declares_what_the_document_says() {
    assert_eq!(lines(&CoverArt::new().topology().unwrap()), listed(DOCUMENT));
    let other = "
        exchange p direct
        exchange p.retry fanout
        exchange p.failed fanout
        queue p.scan x-queue-type=quorum
        queue p.retry x-dead-letter-exchange=p x-dead-letter-strategy=at-least-once x-message-ttl=1000 x-overflow=reject-publish x-queue-type=quorum
        queue p.failed x-delivery-limit=1000000000 x-queue-type=quorum
        binding p -> p.scan [scan]
        binding p.retry -> p.retry []
        binding p.failed -> p.failed []
    ";
    let profile = CoverArt::new().name("p").jobs(["scan"]).interval(SECOND);
    let topology = profile.queue_type(QueueType::Quorum).topology().unwrap();
    assert_eq!(lines(&topology), listed(other));
}

async fn scene(profile: &CoverArt) -> (leveret_broker::Broker, Client) {
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&profile.topology().unwrap()).await.unwrap();
    (broker, client)
}

fn left(seen: &Seen) -> Option<i64> {
    seen.incoming.header("mb-retries").and_then(|value| value.as_i64())
}

fn exceptions(value: Option<Value<'_>>) -> Vec<String> {
    let value = value.expect("errors").into_owned();
    let errors = value.as_array().expect("a list").iter();
    errors.map(|error| error.as_str().expect("text").to_owned()).collect()
}

#[tokio::test(start_paused = true)]
async fn it_counts_down_every_four_hours_and_ends_as_failed() {
    for queue_type in [QueueType::Classic, QueueType::Quorum] {
        let profile = CoverArt::new().queue_type(queue_type);
        let (broker, client) = scene(&profile).await;
        let publisher = client.publisher("cover-art-archive").build().await.unwrap();
        publisher.publish("index", Message::new("mbid").message_id("7")).await.unwrap();
        let fate = |seen: &Seen| Err(Failure::retry(format!("error {}", seen.attempt)));
        let (seen, summary) = consume(&client, INDEX, profile, DAY, fate).await;
        assert_eq!(times(&seen, 4 * HOUR), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]);
        let all: Vec<_> = seen.iter().map(left).collect();
        assert_eq!(all, [None, Some(3), Some(2), Some(1), Some(0)]);
        let errors = exceptions(seen[4].incoming.header("mb-exceptions"));
        assert_eq!(errors, ["error 1", "error 2", "error 3", "error 4"]);
        assert!(seen.iter().all(|seen| seen.incoming.routing_key() == "index"));
        assert!(seen.iter().all(|seen| seen.incoming.exchange() == "cover-art-archive"));
        assert_eq!((summary.retried, summary.parked), (4, 1));
        for empty in ["index", "delete", "move", "retry"] {
            assert_eq!(depth(&broker, &format!("cover-art-archive.{empty}")), Some(0));
        }
        let parked = take(&client, FAILED).await;
        assert_eq!(parked.routing_key(), "index");
        assert_eq!(parked.properties().message_id.unwrap(), "7");
        assert_eq!(exceptions(parked.header("mb-exceptions")).len(), 5);
        assert_eq!(parked.header("mb-retries"), None);
        let kept = parked.header("x-leveret-history").unwrap().into_owned();
        assert_eq!(kept.as_array().unwrap().iter().count(), 5);
        check_stamp_without_deaths(&parked);
    }
}

fn check_stamp_without_deaths(parked: &Delivery) {
    assert_eq!(number(parked, "x-leveret-attempts"), 5);
    assert_eq!(text(parked, "x-leveret-error"), "error 5");
    assert_eq!(text(parked, "x-leveret-reason"), "exhausted");
    assert_eq!(text(parked, "x-leveret-queue"), INDEX);
    assert_eq!(text(parked, "x-leveret-return"), "cover-art-archive");
}

#[tokio::test(start_paused = true)]
async fn a_message_may_say_itself_how_many_retries_it_has_left() {
    let table = [
        (Value::from(2), 3),
        (Value::from(9), 10),
        (Value::from("1"), 2),
        (Value::from(0), 1),
        (Value::from(-1), 1),
        (Value::from("many"), 5),
    ];
    for (header, deliveries) in table {
        let profile = CoverArt::new().interval(SECOND);
        let (_broker, client) = scene(&profile).await;
        let publisher = client.publisher("cover-art-archive").build().await.unwrap();
        let message = Message::new("mbid").header("mb-retries", header.clone());
        publisher.publish("index", message).await.unwrap();
        let (seen, summary) = consume(&client, INDEX, profile, LATER, always).await;
        assert_eq!((seen.len(), summary.parked), (deliveries, 1), "{header:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn where_nothing_is_tried_again_a_message_still_has_the_retries_it_says() {
    let profile = CoverArt::new().interval(SECOND).max_retries(0);
    let (_broker, client) = scene(&profile).await;
    let publisher = client.publisher("cover-art-archive").build().await.unwrap();
    publisher.publish("index", Message::new("mine").header("mb-retries", 2)).await.unwrap();
    publisher.publish("index", "any").await.unwrap();
    let (seen, summary) = consume(&client, INDEX, profile, LATER, always).await;
    let count = |body: &str| seen.iter().filter(|seen| seen.body == body).count();
    assert_eq!((count("mine"), count("any"), summary.parked), (3, 1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_step_that_fails_may_double_a_message_and_never_loses_it() {
    let faults: [fn(&leveret_broker::Broker); 3] = [
        |broker| broker.faults().nack_publishes(1),
        |broker| broker.faults().return_publishes(1),
        |broker| broker.faults().cut_all_connections(),
    ];
    for fault in faults {
        let profile = CoverArt::new().interval(SECOND).max_retries(2);
        let (broker, client) = scene(&profile).await;
        let publisher = client.publisher("cover-art-archive").build().await.unwrap();
        publisher.publish("index", "mbid").await.unwrap();
        let faulty = broker.clone();
        let once = Mutex::new(true);
        let fate = move |_: &Seen| {
            if std::mem::take(&mut *once.lock().unwrap()) {
                fault(&faulty);
            }
            Err(Failure::retry("no"))
        };
        let (_, summary) = consume(&client, INDEX, profile, LATER, fate).await;
        assert!(summary.parked >= 1, "{summary:?}");
        assert_eq!(take(&client, FAILED).await.body(), "mbid");
    }
}

#[tokio::test(start_paused = true)]
async fn what_came_under_another_key_or_with_copies_finds_back_alone() {
    let profile = CoverArt::new().max_retries(2);
    let (broker, client) = scene(&profile).await;
    let publisher = client.publisher("").build().await.unwrap();
    let copies = Array::from_values([Value::from("move")]).unwrap();
    let message = Message::new("mbid").header("CC", Value::Array(copies)).expires_in(10 * SECOND);
    publisher.publish(INDEX, message).await.unwrap();
    let (seen, _) = consume(&client, INDEX, profile, DAY, always).await;
    assert_eq!(times(&seen, 4 * HOUR), [(1, 0), (2, 1), (3, 2)], "not after ten seconds");
    assert!(seen.iter().all(|seen| seen.incoming.routing_key() == INDEX));
    assert_eq!(depth(&broker, "cover-art-archive.move"), Some(0));
    let parked = take(&client, FAILED).await;
    assert_eq!(text(&parked, "x-leveret-expiration"), "10000");
    assert!(parked.header("x-leveret-cc").is_some());
    assert_eq!(parked.header("x-leveret-return"), None, "by that exchange it would not get back");
}

#[tokio::test(start_paused = true)]
async fn a_permanent_error_fails_at_once_and_its_message_begins_anew_when_it_is_published_again() {
    let profile = CoverArt::new().interval(SECOND);
    let (_broker, client) = scene(&profile).await;
    let publisher = client.publisher("cover-art-archive").build().await.unwrap();
    publisher.publish("index", "mbid").await.unwrap();
    let fate = |seen: &Seen| match seen.attempt {
        1 => Err(Failure::retry("first")),
        _ => Err(Failure::permanent("second")),
    };
    let (seen, _) = consume(&client, INDEX, profile.clone(), LATER, fate).await;
    assert_eq!(seen.len(), 2);
    let parked = take(&client, FAILED).await;
    let again = Message::with_properties("mbid", parked.properties().into_owned());
    publisher.publish("index", again).await.unwrap();
    parked.ack().unwrap();
    let (seen, _) = consume(&client, INDEX, profile, LATER, always).await;
    assert_eq!(seen.len(), 5);
}

#[tokio::test(start_paused = true)]
async fn the_list_of_errors_does_not_grow_for_ever() {
    let profile = CoverArt::new().interval(SECOND).max_retries(40);
    let (_broker, client) = scene(&profile).await;
    let publisher = client.publisher("cover-art-archive").build().await.unwrap();
    publisher.publish("index", "mbid").await.unwrap();
    let fate = |seen: &Seen| Err(Failure::retry(format!("error {}", seen.attempt)));
    consume(&client, INDEX, profile, LATER, fate).await;
    let errors = exceptions(take(&client, FAILED).await.header("mb-exceptions"));
    assert_eq!((errors.len(), errors[0].as_str(), errors[9].as_str()), (10, "error 1", "error 41"));
}
