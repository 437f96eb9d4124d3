//! What goes wrong around messages that are tried again.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::GetOptions;
use leveret::{
    Attempt, BatchOptions, ErrorKind, Incoming, Message, Queue, RetryPolicy, Summary, Topology,
};
use leveret_broker::{Broker, Permissions};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::{broker, broker_with_users, client_of, client_of_user, client_with, depth, soon};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_told_to_stop_while_it_starts_does() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    broker.faults().freeze();
    let began = Instant::now();
    let runner = client.consumer("q").retry(RetryPolicy::default()).handle(async || ());
    assert_eq!(runner.run_until(sleep(SECOND)).await.unwrap(), Summary::default());
    let options = BatchOptions { size: 10, within: SECOND };
    let batches = client.consumer("q").handle_batches(options, async |_| ());
    assert_eq!(batches.run_until(sleep(SECOND)).await.unwrap(), Summary::default());
    let service = client.service("numbers").method("add", async || ());
    assert_eq!(service.run_until(sleep(SECOND)).await.unwrap(), Summary::default());
    let service = client.service("numbers").method("add", async || ()).transactional();
    assert_eq!(service.run_until(sleep(SECOND)).await.unwrap(), Summary::default());
    assert!(began.elapsed() < 6 * SECOND, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_message_that_is_too_old_is_parked() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", "job").await.unwrap();
    let (sender, mut seen) = mpsc::channel(100);
    let began = Instant::now();
    let handler = move || {
        let sender = sender.clone();
        async move {
            sender.send(began.elapsed().as_secs() / 60).await.unwrap();
            Err::<(), _>("not yet")
        }
    };
    // It would be 70 minutes old at its eighth delivery.
    let policy = RetryPolicy::fixed(10 * MINUTE).unlimited_retries().max_age(65 * MINUTE);
    let runner = client.consumer("q").retry(policy).handle(handler);
    let summary = runner.run_until(sleep(3 * HOUR)).await.unwrap();
    assert_eq!((summary.failed, summary.retried, summary.parked), (7, 6, 1));
    let mut at = Vec::new();
    while let Ok(minutes) = seen.try_recv() {
        at.push(minutes);
    }
    assert_eq!(at, [0, 10, 20, 30, 40, 50, 60]);
    let parked = client.get("q.parked", GetOptions::default()).await.unwrap().unwrap();
    assert_eq!(parked.header("x-leveret-reason").unwrap().as_str(), Some("too-old"));
}

#[tokio::test(start_paused = true)]
async fn of_two_with_one_key_the_one_that_waits_is_passed_over_once_the_other_is_done() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", Message::new("first").message_id("7")).await.unwrap();
    let handled = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let handled = Arc::clone(&handled);
        move |incoming: Incoming, Attempt(attempt): Attempt| {
            let body = String::from_utf8_lossy(incoming.body()).into_owned();
            handled.lock().unwrap().push((body.clone(), attempt));
            async move { if body == "first" { Err("not yet") } else { Ok(()) } }
        }
    };
    let stop = async {
        sleep(SECOND).await;
        publisher.publish("q", Message::new("second").message_id("7")).await.unwrap();
        sleep(HOUR).await;
    };
    let consumer = client.consumer("q").retry(RetryPolicy::fixed(5 * SECOND));
    let runner = consumer.deduplicate(MINUTE).handle(handler);
    let summary = runner.run_until(stop).await.unwrap();
    assert_eq!((summary.handled, summary.retried, summary.duplicates), (1, 1, 1));
    let expected = [("first".to_owned(), 1), ("second".to_owned(), 1)];
    assert_eq!(*handled.lock().unwrap(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_message_that_failed_is_no_duplicate_of_itself() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", Message::new("job").message_id("7")).await.unwrap();
    let handler =
        async |Attempt(attempt): Attempt| if attempt < 4 { Err("not yet") } else { Ok(()) };
    let consumer = client.consumer("q").retry(RetryPolicy::fixed(SECOND));
    let runner = consumer.deduplicate(HOUR).handle(handler);
    let summary = runner.run_until(sleep(MINUTE)).await.unwrap();
    assert_eq!((summary.handled, summary.retried, summary.duplicates), (1, 3, 0));
}

#[tokio::test(start_paused = true)]
async fn a_long_name_works_up_to_the_limit_and_is_refused_at_the_start_beyond_it() {
    let broker = broker();
    let client = client_of(&broker).await;
    // The longest name that there is for a wait queue.
    let wait = Duration::from_millis(u64::from(u32::MAX) - 2);
    let policy = || RetryPolicy::fixed(wait).max_retries(1);
    let longest = "q".repeat(229);
    client.apply(&Topology::new().queue(Queue::quorum(longest.as_str()))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish(&longest, Message::new("job").priority(255)).await.unwrap();
    let runner = client.consumer(longest.as_str()).retry(policy());
    let summary = runner.handle(async || Err::<(), _>("no")).run_until(sleep(MINUTE)).await;
    assert_eq!(summary.unwrap().retried, 1);
    assert_eq!(depth(&broker, &format!("{longest}.wait.49d17h2m47s293ms.255")), Some(1));

    let too_long = "q".repeat(230);
    client.apply(&Topology::new().queue(Queue::classic(too_long.as_str()))).await.unwrap();
    let runner = client.consumer(too_long.as_str()).retry(policy()).handle(async || ());
    let error = soon("a refusal", runner.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("1 to 229 bytes"), "{error}");
}

/// The bodies of all messages in these queues.
fn bodies(broker: &Broker, queues: &[&str]) -> BTreeSet<String> {
    let peek = |queue: &&str| broker.peek("/", queue, usize::MAX).unwrap_or_default();
    let messages = queues.iter().flat_map(peek);
    messages.map(|message| String::from_utf8_lossy(&message.body).into_owned()).collect()
}

#[tokio::test(start_paused = true)]
async fn closing_in_the_midst_of_retries_loses_nothing() {
    for queue in [Queue::classic("q"), Queue::quorum("q")] {
        let broker = broker();
        let client = client_with(&broker, queue).await;
        let publisher = client.publisher("").build().await.unwrap();
        for n in 0..500 {
            publisher.publish("q", n.to_string()).await.unwrap();
        }
        let failed = Arc::new(AtomicU32::new(0));
        let handler = {
            let failed = Arc::clone(&failed);
            move || {
                failed.fetch_add(1, Ordering::Relaxed);
                async { Err::<(), _>("no") }
            }
        };
        let policy = RetryPolicy::steps([SECOND, MINUTE]);
        let runner = client.consumer("q").workers(8).retry(policy).handle(handler);
        let closing = async {
            while failed.load(Ordering::Relaxed) < 200 {
                tokio::task::yield_now().await;
            }
            client.close().await;
        };
        let (ended, ()) = tokio::join!(runner.run(), soon("the end", closing));
        let summary = ended.unwrap();
        assert!(summary.parked < 500, "it was in the midst of it: {summary:?}");
        let all = bodies(&broker, &["q", "q.wait.1s", "q.wait.1m", "q.parked"]);
        assert_eq!(all.len(), 500);
    }
}

#[tokio::test]
async fn where_nothing_may_be_declared_a_failed_message_stays_in_its_queue() {
    let permissions = Permissions { configure: "^q$".to_owned(), ..Permissions::all() };
    let (broker, address) = broker_with_users(permissions).await;
    let all = client_of_user(address, "all").await;
    let worker = client_of_user(address, "limited").await;
    for queue in [Queue::classic("q"), Queue::quorum("q")] {
        all.apply(&Topology::new().queue(queue)).await.unwrap();
        let publisher = all.publisher("").build().await.unwrap();
        publisher.publish("q", "job").await.unwrap();

        // Whoever names a policy hears of it at the start.
        let runner = worker.consumer("q").retry(RetryPolicy::default()).handle(async || ());
        let error = soon("a refusal", runner.run()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");

        let (sender, mut seen) = mpsc::channel(100);
        let handler = move || {
            let sender = sender.clone();
            async move {
                sender.send(()).await.unwrap();
                Err::<(), _>("no")
            }
        };
        let twice = async {
            soon("a delivery", seen.recv()).await.unwrap();
            soon("another one", seen.recv()).await.unwrap();
        };
        let consumer = worker.consumer("q").drain(SECOND);
        let summary = consumer.handle(handler).run_until(twice).await.unwrap();
        assert_eq!((summary.retried, summary.parked), (0, 0));
        let back = async {
            while depth(&broker, "q") != Some(1) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        soon("the message in its queue", back).await;
        all.delete_queue("q", Default::default()).await.unwrap();
    }
}
