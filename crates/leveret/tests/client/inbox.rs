//! Handling messages exactly once, where the clock is in the test's hands, and what an inbox refuses.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use leveret::inbox::{Doing, Inbox, MemoryInbox, Opened, Remember, Sequence, release};
use leveret::{
    BatchOptions, BoxError, ErrorKind, Incoming, Message, Queue, Replier, RetryPolicy, State,
    Summary,
};
use leveret_testkit::{ScratchFolder, eventually};
use tokio::time::{Instant, sleep};

use crate::services::Running;
use crate::{PATIENCE, broker, client_of, client_with, depth, soon};

const HOUR: Duration = Duration::from_secs(3600);

fn by_id() -> MemoryInbox {
    MemoryInbox::new(Remember::ids_for(HOUR))
}

async fn count(State(count): State<Arc<AtomicU32>>) {
    count.fetch_add(1, Ordering::SeqCst);
}

#[tokio::test(start_paused = true)]
async fn ids_are_forgotten_after_their_time_and_old_messages_are_not_handled_then() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let handled = Arc::<AtomicU32>::default();
    let inbox = by_id();
    let dated = Sequence::fresh("s").stamp(Message::new("dated").message_id("dated")).await;
    let dated = dated.unwrap();
    let undated = Message::new("undated").message_id("undated");
    let runner = client.consumer("q").state(Arc::clone(&handled));
    let stop = async {
        for (wait, expected) in [(0, 2), (1800, 2), (1700, 2)] {
            sleep(Duration::from_secs(wait)).await;
            publisher.publish("q", dated.clone()).await.unwrap();
            publisher.publish("q", undated.clone()).await.unwrap();
            eventually(PATIENCE, "an empty queue", async || depth(&broker, "q") == Some(0)).await;
            assert_eq!((handled.load(Ordering::SeqCst), inbox.len()), (expected, 2));
        }
        // A little later than an hour, because clocks differ.
        sleep(Duration::from_secs(300)).await;
        assert!(inbox.is_empty());
        publisher.publish("q", dated.clone()).await.unwrap();
        publisher.publish("q", undated.clone()).await.unwrap();
        eventually(PATIENCE, "a parked one", async || depth(&broker, "q.parked") == Some(1)).await;
        eventually(PATIENCE, "the other", async || handled.load(Ordering::SeqCst) == 3).await;
    };
    let summary = runner.exactly_once(inbox.clone()).handle(count).run_until(stop).await.unwrap();
    assert_eq!((summary.handled, summary.duplicates, summary.parked), (3, 4, 1), "{summary:?}");
}

#[tokio::test(start_paused = true)]
async fn a_message_without_a_timestamp_can_be_refused() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", Message::new("undated").message_id("1")).await.unwrap();
    let inbox = MemoryInbox::new(Remember::ids_for(HOUR).require_timestamp());
    let runner = client.consumer("q").exactly_once(inbox).handle(async || {});
    let stop = eventually(PATIENCE, "a parked one", async || depth(&broker, "q.parked") == Some(1));
    assert_eq!(runner.run_until(stop).await.unwrap().parked, 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_given_an_id_is_given_a_timestamp_by_which_late_copies_are_found() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let handled = Arc::<AtomicU32>::default();
    // Long after the publisher has begun, and with a pause of its keeper.
    for pause in [2 * HOUR, Duration::ZERO] {
        sleep(pause).await;
        publisher.publish("q", "undated").await.unwrap();
    }
    let mut stream = client.consumer("q").stream().await.unwrap();
    let mut copies = Vec::new();
    for _ in 0..2 {
        let delivery = soon("a message", stream.next()).await.unwrap().unwrap();
        let properties = delivery.properties().into_owned();
        assert!(properties.message_id.is_some() && properties.timestamp.is_some());
        copies.push(Message::with_properties(delivery.body().clone(), properties));
        delivery.ack().unwrap();
    }
    drop(stream);
    let runner = client.consumer("q").state(Arc::clone(&handled)).exactly_once(by_id());
    let stop = async {
        for copy in &copies {
            publisher.publish("q", copy.clone()).await.unwrap();
        }
        eventually(PATIENCE, "both", async || handled.load(Ordering::SeqCst) == 2).await;
        sleep(2 * HOUR).await;
        for copy in copies {
            publisher.publish("q", copy).await.unwrap();
        }
        eventually(PATIENCE, "both", async || depth(&broker, "q.parked") == Some(2)).await;
    };
    let summary = runner.handle(count).run_until(stop).await.unwrap();
    assert_eq!((summary.handled, summary.parked), (2, 2), "{summary:?}");
}

/// An empty id is no id: otherwise all messages that have one would be copies of the first.
#[tokio::test(start_paused = true)]
async fn what_has_an_empty_id_or_a_sender_without_a_name_is_not_taken_for_a_copy() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for _ in 0..2 {
        publisher.publish("q", Message::new("").message_id("")).await.unwrap();
    }
    let runner = client.consumer("q").exactly_once(by_id()).handle(async || {});
    let stop = eventually(PATIENCE, "two parked", async || depth(&broker, "q.parked") == Some(2));
    assert_eq!(runner.run_until(stop).await.unwrap().duplicates, 0);

    let numbered = |sender: &str| {
        Message::new("")
            .header("leveret-sender", sender.to_owned())
            .header("leveret-sequence", 1i64)
    };
    for sender in ["", "a\0b", &"x".repeat(256), &"x".repeat(255)] {
        publisher.publish("q", numbered(sender)).await.unwrap();
    }
    let inbox = MemoryInbox::new(Remember::high_water());
    let runner = client.consumer("q").exactly_once(inbox).handle(async || {});
    let stop = eventually(PATIENCE, "five parked", async || depth(&broker, "q.parked") == Some(5));
    assert_eq!(runner.run_until(stop).await.unwrap().parked, 3);
    let folder = ScratchFolder::new();
    for sender in ["", "a\0b", &"x".repeat(256)] {
        let refused = Sequence::open(sender, folder.path().join("numbers")).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_inbox_holds_messages_until_others_are_forgotten() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    // Without timestamps: they wait for longer than they are remembered.
    let of = |number: u32| ("q", Message::new("x").message_id(number.to_string()));
    publisher.publish_batch((0..5).map(of)).await.unwrap();
    let handled = Arc::<AtomicU32>::default();
    let minute = Duration::from_secs(60);
    let inbox = MemoryInbox::new(Remember::ids_for(minute)).most(2);
    let runner = client.consumer("q").workers(3).state(Arc::clone(&handled));
    let began = Instant::now();
    let stop = async {
        eventually(PATIENCE, "two", async || handled.load(Ordering::SeqCst) == 2).await;
        sleep(minute).await;
        assert_eq!(handled.load(Ordering::SeqCst), 2);
        eventually(10 * minute, "all", async || handled.load(Ordering::SeqCst) == 5).await;
    };
    let summary = runner.exactly_once(inbox.clone()).handle(count).run_until(stop).await.unwrap();
    assert!(began.elapsed() >= 4 * minute, "{:?}", began.elapsed());
    assert_eq!((summary.handled, summary.parked), (5, 0), "{summary:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_released_in_the_batch_in_which_it_is_handled_is_forgotten() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish("q", Message::new("x").message_id("1")).await.unwrap();
    publisher.publish("q", release(["1"])).await.unwrap();
    let inbox = MemoryInbox::new(Remember::until_released(HOUR));
    let options = BatchOptions { size: 2, within: HOUR };
    let runner = client.consumer("q").exactly_once(inbox.clone());
    let runner = runner.handle_batches(options, async |_: Vec<Incoming>| {});
    let stop = eventually(PATIENCE, "a record", async || inbox.len() == 1);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.released), (1, 1), "{summary:?}");
    sleep(2 * HOUR).await;
    assert!(inbox.is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_old_copy_is_a_duplicate_as_long_as_it_is_remembered() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    let of_age = |id: &str, minutes: u64| {
        let age = Duration::from_secs(60 * minutes);
        Message::new("x").message_id(id).timestamp(SystemTime::now() - age)
    };
    let options = BatchOptions { size: 3, within: HOUR };
    for has_batches in [false, true] {
        for message in [of_age("1", 50), of_age("1", 70), of_age("2", 70)] {
            publisher.publish("q", message).await.unwrap();
        }
        let runner = client.consumer("q").exactly_once(by_id());
        let parked = if has_batches { 2 } else { 1 };
        let stop = eventually(PATIENCE, "a parked one", async || {
            depth(&broker, "q.parked") == Some(parked) && depth(&broker, "q") == Some(0)
        });
        let running = async {
            match has_batches {
                true => {
                    let handler = async |_: Vec<Incoming>| {};
                    runner.handle_batches(options, handler).run_until(stop).await
                }
                false => runner.handle(async || {}).run_until(stop).await,
            }
        };
        let summary = soon("the end", running).await.unwrap();
        let counts = (summary.handled, summary.duplicates, summary.parked);
        assert_eq!(counts, (1, 1, 1), "{summary:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_copy_waits_for_the_first_one_and_is_handled_if_that_fails() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for body in ["first", "copy", "another copy"] {
        let message = Message::new(body).message_id("1");
        publisher.publish("q", message).await.unwrap();
    }
    let order = Arc::new(Mutex::new(Vec::<String>::new()));
    let handler = async |body: String, State(order): State<Arc<Mutex<Vec<String>>>>| {
        order.lock().unwrap().push(format!("{body} begins"));
        sleep(Duration::from_secs(5)).await;
        order.lock().unwrap().push(format!("{body} ends"));
        match body.as_str() {
            "first" => Err("no"),
            _ => Ok(()),
        }
    };
    let runner = client.consumer("q").workers(3).state(Arc::clone(&order));
    let runner = runner.retry(RetryPolicy::never()).exactly_once(by_id()).handle(handler);
    let stop = async {
        eventually(PATIENCE, "four lines", async || order.lock().unwrap().len() == 4).await;
        sleep(Duration::from_secs(10)).await;
    };
    let summary = runner.run_until(stop).await.unwrap();
    let order = order.lock().unwrap();
    assert_eq!(order[..2], ["first begins", "first ends"]);
    assert!(order[2].ends_with("copy begins") && order[3].ends_with("copy ends"), "{order:?}");
    let Summary { handled, parked, duplicates, .. } = summary;
    assert_eq!((handled, parked, duplicates), (1, 1, 1), "{summary:?}");
}

/// An inbox that cannot be asked for a time.
struct Away {
    inbox: MemoryInbox,
    until: Instant,
    asked: Arc<AtomicU32>,
}

impl Inbox for Away {
    fn open<'a>(&'a self, incoming: &'a Incoming) -> Doing<'a, Opened> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match Instant::now() < self.until {
            true => Box::pin(async { Err::<Opened, BoxError>("the database is away".into()) }),
            false => self.inbox.open(incoming),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn while_the_inbox_is_away_messages_wait_and_no_attempt_is_counted() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..3).map(|_| ("q", "x"))).await.unwrap();
    let asked = Arc::<AtomicU32>::default();
    // Longer than a message is held, so that it goes back to its queue meanwhile.
    let until = Instant::now() + Duration::from_secs(100);
    let away = Away { inbox: by_id(), until, asked: Arc::clone(&asked) };
    let attempts = Arc::<AtomicU32>::default();
    let handler = async |incoming: Incoming, State(attempts): State<Arc<AtomicU32>>| {
        attempts.fetch_add(incoming.attempt(), Ordering::SeqCst);
    };
    let runner = client.consumer("q").workers(3).retry(RetryPolicy::never());
    let runner = runner.state(Arc::clone(&attempts)).exactly_once(away).handle(handler);
    let stop = eventually(10 * PATIENCE, "all", async || attempts.load(Ordering::SeqCst) == 3);
    let summary = runner.run_until(stop).await.unwrap();
    assert_eq!((summary.handled, summary.parked), (3, 0), "{summary:?}");
    assert!((10..200).contains(&asked.load(Ordering::SeqCst)), "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_exactly_once_is_refused() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let consumer = || client.consumer("q").exactly_once(by_id());
    let runners = [
        consumer().auto_ack().handle(async || {}),
        consumer().at_most_once().handle(async || {}),
        consumer().deduplicate(HOUR).handle(async || {}),
    ];
    for runner in runners {
        let error = soon("a refusal", runner.run()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("exactly once"), "{error}");
    }
    let service = client.service("s").exactly_once(by_id()).transactional();
    let error = soon("a refusal", service.method("m", async || {}).run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_method_that_sends_several_replies_is_refused() {
    let broker = broker();
    let client = client_of(&broker).await;
    let service = client.service("s").exactly_once(by_id());
    let service = service.method("m", async |mut replier: Replier| replier.send("one").await);
    let error = soon("a refusal", service.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("one reply"), "{error}");
}

fn number_of(message: &Message) -> String {
    let debug = format!("{message:?}");
    let (_, rest) = debug.split_once("leveret-sequence").expect("a number");
    rest.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect()
}

#[tokio::test]
async fn a_sequence_goes_on_where_it_was_closed_and_beyond_where_it_was_not() {
    let folder = ScratchFolder::new();
    let path = folder.path().join("jobs.sequence");
    let numbers = Sequence::open("shop", &path).await.unwrap();
    let taken = Sequence::open("shop", &path).await.unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::Invalid, "{taken}");
    for expected in 1..=3 {
        let message = numbers.stamp("x").await.unwrap();
        assert_eq!(number_of(&message), expected.to_string());
    }
    let clone = numbers.clone();
    numbers.close().await.unwrap();
    assert_eq!(clone.stamp("x").await.unwrap_err().kind(), ErrorKind::Closed);

    let numbers = Sequence::open("shop", &path).await.unwrap();
    assert_eq!(
        (numbers.uncertain(), number_of(&numbers.stamp("x").await.unwrap())),
        (None, "4".to_owned())
    );
    // A crash: nothing is written any more.
    drop(numbers);
    let numbers = Sequence::open("shop", &path).await.unwrap();
    assert_eq!(numbers.uncertain(), Some(4..=1003));
    for number in 1004..3010 {
        assert_eq!(number_of(&numbers.stamp("x").await.unwrap()), number.to_string());
    }
    drop(numbers);
    let other = Sequence::open("another shop", &path).await.unwrap_err();
    assert!(other.to_string().contains("another shop"), "{other}");
    std::fs::write(&path, "nonsense").unwrap();
    assert_eq!(Sequence::open("shop", &path).await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn batches_have_one_commit_and_what_spoils_one_is_alone_with_it() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for inbox in [by_id(), MemoryInbox::new(Remember::high_water())] {
        let numbers = Sequence::fresh("s");
        for number in 0..30 {
            let message = numbers.stamp(if number == 7 { "spoilt" } else { "fine" }).await.unwrap();
            publisher.publish_batch([("q", message.clone()), ("q", message)]).await.unwrap();
        }
        let calls = Arc::new(Mutex::new(Vec::<usize>::new()));
        let noted = Arc::clone(&calls);
        let handler = move |batch: Vec<Incoming>| {
            noted.lock().unwrap().push(batch.len());
            async move {
                match batch.iter().any(|incoming| incoming.body() == "spoilt") {
                    true => Err("one is spoilt"),
                    false => Ok(()),
                }
            }
        };
        let options = BatchOptions { size: 20, within: Duration::from_secs(1) };
        let runner = client.consumer("q").retry(RetryPolicy::never()).exactly_once(inbox.clone());
        let runner = runner.handle_batches(options, handler);
        let stop = async {
            eventually(PATIENCE, "an empty queue", async || depth(&broker, "q") == Some(0)).await;
            sleep(Duration::from_secs(10)).await;
        };
        let summary = runner.run_until(stop).await.unwrap();
        // Both copies of the one that fails are parked: neither was handled.
        let Summary { handled, duplicates, parked, .. } = summary;
        assert_eq!((handled, duplicates, parked), (29, 29, 2), "{summary:?}");
        // Ten new ones in each batch, and the first batch one by one after that.
        let mut calls = std::mem::take(&mut *calls.lock().unwrap());
        calls.sort_unstable();
        assert_eq!(calls, [vec![1; 11], vec![10; 3]].concat());
        client.parking_lot("q.parked").purge().run().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_is_sent_again_after_twice_the_time_until_somebody_answers() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("silent")).await;
    let rpc = client.rpc("silent").build().await.unwrap();
    let began = Instant::now();
    let asking = rpc.call::<String>("m", "question").resend_after(Duration::from_secs(1));
    let answering = async {
        let mut requests = client.consumer("silent").stream().await.unwrap();
        let publisher = client.publisher("").build().await.unwrap();
        let mut ids = std::collections::BTreeSet::new();
        for expected in [0, 1, 3, 7] {
            let request = requests.next().await.unwrap().unwrap();
            assert_eq!(began.elapsed().as_secs(), expected);
            let properties = request.properties();
            ids.insert(properties.message_id.unwrap().to_string());
            if expected == 7 {
                let reply = Message::new("answer");
                let reply = reply.correlation_id(properties.correlation_id.unwrap().to_string());
                let address = properties.reply_to.unwrap().to_string();
                let _ = publisher.publish(&address, reply).await;
            }
            request.ack().unwrap();
        }
        assert_eq!(ids.len(), 1, "the same message");
    };
    let (answer, ()) = soon("an answer", async { tokio::join!(asking, answering) }).await;
    assert_eq!(answer.unwrap(), "answer");
    let call = rpc.call::<()>("m", "").resend_after(Duration::from_secs(1));
    let error = call.timeout(Duration::from_secs(20)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(depth(&broker, "silent"), Some(5), "after 0, 1, 3, 7 and 15 seconds");
    assert_eq!(rpc.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_again_and_again_is_done_once_and_answered() {
    let broker = broker();
    let client = client_of(&broker).await;
    let handled = Arc::<AtomicU32>::default();
    let slowly = async |State(handled): State<Arc<AtomicU32>>| {
        sleep(Duration::from_secs(5)).await;
        leveret::Json(handled.fetch_add(1, Ordering::SeqCst) + 1)
    };
    let service = client.service("s").state(Arc::clone(&handled)).method("m", slowly);
    let service = Running::start(service.exactly_once(by_id())).await;
    let rpc = client.rpc("s").build().await.unwrap();
    for number in 1..=3 {
        let call = rpc.call::<leveret::Json<u32>>("m", "").resend_after(Duration::from_secs(1));
        let leveret::Json(answer) = soon("an answer", call).await.unwrap();
        assert_eq!(answer, number);
    }
    sleep(Duration::from_secs(1)).await;
    let summary = soon("the end", service.stop()).await;
    assert_eq!((summary.handled, summary.duplicates), (3, 6), "{summary:?}");
}
