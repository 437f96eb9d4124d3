//! What errors of a program's own types mean, said once for a consumer or a service.

use std::error::Error as _;
use std::fmt;
use std::future::pending;
use std::io;
use std::time::Duration;

use leveret::amqp::{Connection, Options};
use leveret::inbox::{MemoryInbox, Remember};
use leveret::{
    BatchOptions, BatchOutcome, BoxError, Client, ClientEvent, ConnectLimits, ConsumerBuilder, End,
    Error, ErrorKind, Failure, Filter, Incoming, Json, Queue, Replier, RetryPolicy, State, Verdict,
};

use crate::{broker, client_of, client_with, soon};

/// As thiserror writes it: an error of std, with a cause.
#[derive(Debug)]
enum BillError {
    Declined(std::num::ParseIntError),
    Offline,
}

impl fmt::Display for BillError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BillError::Declined(_) => "the card was declined",
            BillError::Offline => "the bank does not answer",
        })
    }
}

impl std::error::Error for BillError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BillError::Declined(cause) => Some(cause),
            BillError::Offline => None,
        }
    }
}

/// An error around one of the above.
#[derive(Debug)]
struct Wrapped(BillError);

impl fmt::Display for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot bill")
    }
}

impl std::error::Error for Wrapped {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

fn declined() -> BillError {
    BillError::Declined("x".parse::<u8>().unwrap_err())
}

fn classified(client: &Client) -> ConsumerBuilder {
    let policy = RetryPolicy::fixed(Duration::from_secs(60)).max_retries(1);
    client.consumer("cards").retry(policy).classify(|error: &BillError| match error {
        BillError::Declined(_) => Verdict::Permanent.kind("declined"),
        BillError::Offline => Verdict::Retry.into(),
    })
}

async fn with_cards<const N: usize>(cards: [&'static str; N]) -> Client {
    let client = client_with(&broker(), Queue::quorum("cards")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for card in cards {
        publisher.publish("cards", card).await.unwrap();
    }
    client
}

/// Completes when so many messages have been parked.
fn parked(client: &Client, count: usize) -> impl Future<Output = ()> + use<> {
    let mut events = client.watch();
    async move {
        for _ in 0..count {
            let mut event = async || events.next().await.expect("the client is there");
            while !matches!(event().await, ClientEvent::Parked { .. }) {}
        }
    }
}

/// What is in the parking lot: body, kind, reason.
async fn lot(client: &Client) -> Vec<(String, String, String)> {
    let lot = client.parking_lot("cards.parked");
    let messages = lot.list(&Filter::default(), 10).await.unwrap();
    let mut told: Vec<_> = messages
        .iter()
        .map(|message| {
            let story = message.story();
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            let body = String::from_utf8_lossy(message.body()).into_owned();
            (body, text(&story.kind), text(&story.reason))
        })
        .collect();
    told.sort();
    told
}

fn told<const N: usize>(expected: [(&str, &str, &str); N]) -> Vec<(String, String, String)> {
    let owned = |(a, b, c): (&str, &str, &str)| (a.to_owned(), b.to_owned(), c.to_owned());
    expected.map(owned).into()
}

async fn bill(card: String) -> Result<(), Failure> {
    match card.as_str() {
        "plain" => Err(declined())?,
        "wrapped" => Err(Wrapped(declined()))?,
        "chosen" => Err(Failure::retry(declined()).kind("chosen")),
        _ => Err(BillError::Offline)?,
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_is_classified_wherever_it_stands_in_the_chain() {
    let client = with_cards(["plain", "wrapped", "chosen", "offline"]).await;
    let all_parked = parked(&client, 4);
    let summary = classified(&client).handle(bill).run_until(all_parked).await.unwrap();
    assert_eq!((summary.parked, summary.retried), (4, 2));
    let expected = told([
        ("chosen", "chosen", "exhausted"),
        ("offline", "BillError", "exhausted"),
        ("plain", "declined", "permanent"),
        ("wrapped", "declined", "permanent"),
    ]);
    assert_eq!(lot(&client).await, expected);
}

#[tokio::test(start_paused = true)]
async fn a_handler_may_return_the_error_itself() {
    let client = with_cards(["plain"]).await;
    let handler = async || Err::<(), _>(declined());
    let all_parked = parked(&client, 1);
    classified(&client).handle(handler).run_until(all_parked).await.unwrap();
    assert_eq!(lot(&client).await, told([("plain", "declined", "permanent")]));
    let messages = client.parking_lot("cards.parked").list(&Filter::default(), 1).await.unwrap();
    let error = messages[0].story().error.as_deref();
    assert_eq!(error, Some("the card was declined: invalid digit found in string"));
}

/// Causes that an error's text includes are in no `source()`, so that they are printed once. They are classified all the same.
#[tokio::test]
async fn an_error_is_classified_behind_texts_that_include_it() {
    let url = "amqp://127.0.0.1:1";
    let refused = Connection::open(&Options::from_uri(url).unwrap()).await.unwrap_err();
    assert!(refused.source().is_none(), "{refused}");
    let limits = ConnectLimits { max_retries: 0, within: Duration::from_secs(60) };
    let connecting = Client::builder().endpoint(url).unwrap().connect_limits(limits).connect();
    let unreachable = connecting.await.unwrap_err();
    let client = with_cards(["plain", "engine", "client"]).await;
    let handler = async |card: String, State((refused, unreachable)): State<Errors>| {
        Err::<(), Failure>(match card.as_str() {
            "plain" => io::Error::from(io::ErrorKind::ConnectionRefused).into(),
            "engine" => refused.into(),
            _ => unreachable.into(),
        })
    };
    let all_parked = parked(&client, 3);
    let consumer = client
        .consumer("cards")
        .classify(|_: &io::Error| Verdict::Permanent.kind("refused"))
        .state::<Errors>((refused, unreachable));
    soon("to be parked", consumer.handle(handler).run_until(all_parked)).await.unwrap();
    let expected = told([
        ("client", "refused", "permanent"),
        ("engine", "refused", "permanent"),
        ("plain", "refused", "permanent"),
    ]);
    assert_eq!(lot(&client).await, expected);
}

/// The same error, of the engine and of the client.
type Errors = (leveret::amqp::Error, Error);

#[tokio::test(start_paused = true)]
async fn an_error_within_one_of_the_system_is_classified() {
    let client = with_cards(["plain"]).await;
    let all_parked = parked(&client, 1);
    let runner = classified(&client).handle(async || Err::<(), _>(io::Error::other(declined())));
    soon("to be parked", runner.run_until(all_parked)).await.unwrap();
    assert_eq!(lot(&client).await, told([("plain", "declined", "permanent")]));
}

#[tokio::test(start_paused = true)]
async fn without_a_kind_of_its_own_a_classified_error_has_the_name_of_its_type() {
    let client = with_cards(["plain", "wrapped", "own"]).await;
    let consumer = client.consumer("cards").classify(|_: &BillError| Verdict::Permanent);
    let handler = async |card: String| {
        let error: BoxError = match card.as_str() {
            "plain" => declined().into(),
            "wrapped" => Wrapped(declined()).into(),
            _ => Failure::from(Wrapped(declined())).into(),
        };
        Err::<(), _>(error)
    };
    let all_parked = parked(&client, 3);
    consumer.handle(handler).run_until(all_parked).await.unwrap();
    let expected = told([
        ("own", "Wrapped", "permanent"),
        ("plain", "BillError", "permanent"),
        ("wrapped", "BillError", "permanent"),
    ]);
    assert_eq!(lot(&client).await, expected);
}

#[tokio::test(start_paused = true)]
async fn panics_are_classified_of_a_message_and_of_a_batch() {
    fn consumer(client: &Client) -> ConsumerBuilder {
        client.consumer("cards").classify(|error: &Error| match error.kind() {
            ErrorKind::Panicked => Verdict::Permanent.kind("bug"),
            _ => Verdict::Retry.into(),
        })
    }
    let expected = told([("one", "bug", "permanent")]);
    let client = with_cards(["one"]).await;
    let all_parked = parked(&client, 1);
    let runner = consumer(&client).handle(async || -> () { panic!("a bug") });
    soon("to be parked", runner.run_until(all_parked)).await.unwrap();
    assert_eq!(lot(&client).await, expected);
    let client = with_cards(["one"]).await;
    let all_parked = parked(&client, 1);
    let options = BatchOptions { size: 1, within: Duration::from_millis(10) };
    let runner = consumer(&client).handle_batches(options, async |_| -> () { panic!("a bug") });
    soon("to be parked", runner.run_until(all_parked)).await.unwrap();
    assert_eq!(lot(&client).await, expected);
}

#[tokio::test(start_paused = true)]
async fn errors_of_a_layer_are_classified() {
    let client = with_cards(["slow"]).await;
    let consumer = client
        .consumer("cards")
        .classify(|_: &tower::timeout::error::Elapsed| Verdict::Permanent.kind("slow"))
        .layer(tower::timeout::TimeoutLayer::new(Duration::from_secs(1)));
    let all_parked = parked(&client, 1);
    consumer.handle(pending::<()>).run_until(all_parked).await.unwrap();
    assert_eq!(lot(&client).await, told([("slow", "slow", "permanent")]));
}

#[tokio::test(start_paused = true)]
async fn errors_of_a_batch_are_classified() {
    let client = with_cards(["one", "two"]).await;
    let handler = async |batch: Vec<Incoming>| {
        BatchOutcome::Each(batch.iter().map(|_| Err(declined().into())).collect())
    };
    let options = BatchOptions { size: 2, within: Duration::from_millis(10) };
    let all_parked = parked(&client, 2);
    classified(&client).handle_batches(options, handler).run_until(all_parked).await.unwrap();
    let expected = told([("one", "declined", "permanent"), ("two", "declined", "permanent")]);
    assert_eq!(lot(&client).await, expected);
}

#[tokio::test(start_paused = true)]
async fn a_caller_is_told_the_kind_of_a_classified_error() {
    let client = client_of(&broker()).await;
    let service = client
        .service("bills")
        .classify(|_: &BillError| Verdict::Permanent.kind("declined"))
        .method("bill", async || Err::<(), _>(declined()));
    service.declare().await.unwrap();
    let bills = client.rpc("bills").build().await.unwrap();
    let calling = async {
        let error = bills.call::<()>("bill", "").await.unwrap_err();
        assert_eq!(error.remote().unwrap().kind, "declined");
    };
    service.run_until(calling).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_consumer_whose_handler_takes_a_state_that_was_not_given_does_not_begin() {
    let client = with_cards(["plain"]).await;
    let handler = async |State(_): State<u32>, body: String| drop(body);
    let error =
        client.consumer("cards").state("text").handle(handler).run_until(pending::<()>()).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("State<u32>"), "{error}");
    let given = client.consumer("cards").state(1_u32).handle(handler);
    assert_eq!(given.run_until(std::future::ready(())).await.unwrap().failed, 0);
}

#[tokio::test(start_paused = true)]
async fn a_service_whose_method_takes_a_state_that_was_not_given_does_not_begin() {
    let client = client_of(&broker()).await;
    let method = async |State(factor): State<u32>, Json(number): Json<u32>| Json(number * factor);
    let service = client.service("sums").method("times", method);
    assert_eq!(service.declare().await.unwrap_err().kind(), ErrorKind::Invalid);
    let error = service.declare().await.unwrap_err().to_string();
    assert!(error.contains("call .state(value) with a u32 on the service"), "{error}");
    // It may be given after the method.
    service.state(2_u32).declare().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_takes_a_replier_that_there_cannot_be_does_not_begin() {
    let client = with_cards(["plain"]).await;
    let runner = client.consumer("cards").handle(async |_: Replier| {});
    let error = soon("a refusal", runner.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("Client::service"), "{error}");
    let service = client.service("sums").method("count", async |_: Replier| End);
    service.declare().await.unwrap();
    let inbox = MemoryInbox::new(Remember::ids_for(Duration::from_secs(60)));
    let error = service.exactly_once(inbox).declare().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("leave out exactly_once"), "{error}");
}
