//! What is printed of an error, as a whole or with its causes one by one, says each thing once.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use leveret::amqp::{Connection, Options};
use leveret::{Client, ConnectLimits, Error, Failure, Queue, Replies, Topology};

use crate::{broker, client_with, soon};

/// Walks along the causes: each says something that was not said before.
#[track_caller]
fn says_all_once(error: &(dyn StdError + 'static)) {
    let mut said = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        assert!(!said.contains(&text), "{text:?} was said before, in {said:?}");
        said = format!("{said}: {text}");
        next = cause.source();
    }
    let mut parts: Vec<&str> = said.split(": ").map(str::trim).collect();
    let count = parts.len();
    parts.sort_unstable();
    parts.dedup();
    assert_eq!(parts.len(), count, "{said:?} says something twice");
}

#[tokio::test]
async fn an_error_of_connecting_says_everything_once() {
    let broker = broker();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let limits = ConnectLimits { max_retries: 1, within: Duration::from_secs(60) };
    let urls = [
        "amqp://127.0.0.1:1".to_owned(),
        "amqp://127.0.0.1:1?connection_name=mine".to_owned(),
        "amqp://no.such.host.invalid".to_owned(),
        format!("amqp://guest:wrong@{address}"),
        format!("amqp://guest:guest@{address}/missing"),
        format!("amqps://guest:guest@{address}?connection_timeout=2000"),
        "amqps://127.0.0.1:1?cacertfile=/no/such/file".to_owned(),
    ];
    for url in &urls {
        let options = Options::from_uri(url).unwrap();
        let error = soon("an answer", Connection::open(&options)).await.unwrap_err();
        says_all_once(&error);
        assert_eq!(error.to_string().matches("cannot connect to").count(), 1, "{error}");
        let client = Client::builder().endpoint(url).unwrap().connect_limits(limits);
        let error = soon("an answer", client.connect()).await.unwrap_err();
        says_all_once(&error);
        assert_eq!(error.to_string().matches("cannot connect to").count(), 1, "{error}");
    }
    let two = [urls[0].as_str(), urls[3].as_str()];
    let two = Client::builder().endpoint(two).unwrap().connect_limits(limits);
    says_all_once(&soon("an answer", two.connect()).await.unwrap_err());
    says_all_once(&Client::connect("amqp://host:port").await.unwrap_err());
    says_all_once(&Options::from_uri("amqp://host:port").unwrap_err());
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_call_to_the_broker_says_everything_once() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let mut errors: Vec<Error> = Vec::new();
    let publisher = client.publisher("").timeout(Duration::from_secs(2)).build().await.unwrap();
    let unroutable = publisher.publish("nowhere", "1").await.unwrap_err();
    assert_eq!(unroutable.to_string().matches("NO_ROUTE").count(), 1, "{unroutable}");
    errors.push(unroutable);
    broker.faults().nack_publishes(1);
    errors.push(publisher.publish("q", "1").await.unwrap_err());
    errors.push(
        client.publisher("missing").build().await.unwrap().publish("q", "1").await.unwrap_err(),
    );
    errors.push(publisher.publish(&"k".repeat(256), "1").await.unwrap_err());
    errors.push(client.inspect_queue("missing").await.unwrap_err());
    errors.push(client.consumer("missing").stream().await.unwrap_err());
    errors.push(client.inspect_queue(&"q".repeat(256)).await.unwrap_err());
    let conflicting =
        Topology::new().queue(Queue::quorum("q")).queue(Queue::classic("q").max_length(1));
    errors.push(client.apply(&conflicting).await.unwrap_err());
    errors.push(Topology::from_toml("queue = 1").unwrap_err());
    errors.push(Topology::read("/no/such/file.toml").unwrap_err());
    let caller = client.rpc("missing").replies(Replies::Queue).timeout(Duration::from_secs(2));
    errors.push(caller.build().await.unwrap().call::<String>("add", "1").await.unwrap_err());
    publisher.publish("q", "1").await.unwrap();
    let delivery = client.get("q", Default::default()).await.unwrap().unwrap();
    broker.faults().block("low on memory");
    let _ = publisher.publish("q", "the last").await;
    errors.push(publisher.publish("q", "2").await.unwrap_err());
    client.close().await;
    errors.push(publisher.publish("q", "3").await.unwrap_err());
    errors.push(delivery.ack().unwrap_err());
    for error in &errors {
        says_all_once(error);
    }
}

#[derive(Debug)]
struct Outer(io::Error);

impl std::fmt::Display for Outer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the order cannot be booked")
    }
}

impl StdError for Outer {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.0)
    }
}

#[test]
fn causes_that_a_text_leaves_out_are_still_found() {
    let failure = Failure::from(Outer(io::Error::other("the disk is full")));
    let error: leveret::BoxError = failure.into();
    assert_eq!(error.to_string(), "the order cannot be booked");
    assert_eq!(error.source().unwrap().to_string(), "the disk is full");
    says_all_once(&*error);
}

#[test]
fn the_error_behind_an_error_can_be_had() {
    let error = Topology::read("/no/such/file.toml").unwrap_err();
    let behind = error.get_ref().and_then(|behind| behind.downcast_ref::<io::Error>());
    assert_eq!(behind.map(io::Error::kind), Some(io::ErrorKind::NotFound), "{error:?}");
}
