//! Handling messages exactly once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use leveret::inbox::{
    Changes, Doing, Gaps, Inbox, MemoryInbox, Opened, Remember, Report, Sequence, Work, release,
};
use leveret::{
    Attempt, Client, ClientEvent, Delivery, Failure, Filter, Incoming, Json, Message, Publisher,
    Queue, RetryPolicy, State, Topology,
};
use leveret_testkit::{eventually, rabbitmq};
use tokio::sync::{Notify, mpsc};
use tokio::time::sleep;

use crate::support::client::{
    CONSUMING, SOON, client, client_with, cut, next, publisher, soon, until_depth, until_event,
    until_healthy,
};
use crate::support::services::Running;

const HOUR: Duration = Duration::from_secs(3600);

fn by_id() -> MemoryInbox {
    MemoryInbox::new(Remember::ids_for(HOUR))
}

fn high_water() -> MemoryInbox {
    MemoryInbox::new(Remember::high_water())
}

/// How often each was handled.
#[derive(Clone, Default)]
struct Tally(Arc<Mutex<BTreeMap<String, u32>>>);

impl Tally {
    fn add(&self, what: &str) -> u32 {
        let mut counts = self.0.lock().unwrap();
        let count = counts.entry(what.to_owned()).or_default();
        *count += 1;
        *count
    }

    fn total(&self) -> u32 {
        self.0.lock().unwrap().values().sum()
    }

    fn of(&self, what: &str) -> u32 {
        self.0.lock().unwrap().get(what).copied().unwrap_or_default()
    }
}

/// Counts what an inbox was asked for: a test knows by that when all copies have come.
#[derive(Clone)]
struct Counting {
    inbox: MemoryInbox,
    asked: Arc<AtomicU32>,
    known: Arc<AtomicU32>,
}

impl Counting {
    fn of(inbox: &MemoryInbox) -> Counting {
        Counting { inbox: inbox.clone(), asked: Arc::default(), known: Arc::default() }
    }

    async fn until_asked(&self, times: u32) {
        eventually(SOON, format!("{times} messages"), async || {
            let asked = self.asked.load(Ordering::SeqCst);
            if asked == times { Ok(()) } else { Err(asked.to_string()) }
        })
        .await;
    }

    async fn until_known(&self, times: u32) {
        eventually(SOON, format!("{times} copies of what was handled"), async || {
            let known = self.known.load(Ordering::SeqCst);
            if known == times { Ok(()) } else { Err(known.to_string()) }
        })
        .await;
    }
}

impl Inbox for Counting {
    fn open<'a>(&'a self, incoming: &'a Incoming) -> Doing<'a, Opened> {
        Box::pin(async {
            let opened = self.inbox.open(incoming).await?;
            self.asked.fetch_add(1, Ordering::SeqCst);
            if matches!(opened, Opened::Done(_)) {
                self.known.fetch_add(1, Ordering::SeqCst);
            }
            Ok(opened)
        })
    }
}

async fn count(body: String, State(tally): State<Tally>) {
    tally.add(&body);
}

async fn publish(publisher: &Publisher, id: &str, body: &str) {
    let message = Message::new(body.to_owned()).message_id(id);
    soon("an outcome", publisher.publish("q", message)).await.unwrap();
}

/// The kinds of what is parked.
async fn parked(client: &Client, queue: &str) -> Vec<String> {
    let lot = client.parking_lot(format!("{queue}.parked"));
    let all = soon("a list", lot.list(&Filter::new(), 1000)).await.unwrap();
    all.iter().map(|message| message.story().kind.clone().unwrap_or_default()).collect()
}

#[tokio::test]
async fn each_message_is_handled_once_however_many_workers_get_its_copies() {
    const MESSAGES: usize = 100;
    const COPIES: usize = 4;
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    // Copies are close to each other, so that they are at work at the same time.
    let messages = (0..MESSAGES * COPIES).map(|number| {
        let id = (number / (2 * COPIES)) * 2 + number % 2;
        ("q", Message::new(format!("{id}")).message_id(format!("id {id}")))
    });
    soon("outcomes", publisher.publish_batch(messages)).await.unwrap();
    let tally = Tally::default();
    let slowly = async |body: String, State(tally): State<Tally>, incoming: Incoming| {
        sleep(Duration::from_millis(3)).await;
        // One in three fails at first, after it was at work for a while.
        match tally.add(&body) {
            1 if body.len() == 1 && !incoming.redelivered() => Err(Failure::requeue("not now")),
            _ => Ok(()),
        }
    };
    let consumer = client.consumer("q").workers(16).subscribers(2).state(tally.clone());
    let inbox = by_id();
    let counting = Counting::of(&inbox);
    let runner = consumer.exactly_once(counting.clone()).handle(slowly);
    let stop = async {
        eventually(SOON, "all of them to be remembered", async || inbox.len() == MESSAGES).await;
        counting.until_known((MESSAGES * (COPIES - 1)) as u32).await;
    };
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!(summary.handled as usize, MESSAGES, "{summary:?}");
    assert_eq!(summary.duplicates as usize, MESSAGES * (COPIES - 1), "{summary:?}");
    for id in 0..MESSAGES {
        // Those that failed are handled until one succeeds, and then no more.
        let times = tally.of(&id.to_string());
        assert_eq!(times, if id < 10 { 2 } else { 1 }, "message {id}");
    }
}

#[tokio::test]
async fn what_failed_is_tried_again_and_what_has_nothing_left_to_do_is_done() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    for body in ["fails", "gone", "panics"] {
        publish(&publisher, body, body).await;
        publish(&publisher, body, body).await;
    }
    let tally = Tally::default();
    let handler = async |body: String, Attempt(attempt): Attempt, State(tally): State<Tally>| {
        tally.add(&body);
        match body.as_str() {
            "fails" if attempt < 3 => Err(Failure::retry("not yet")),
            "panics" if attempt < 3 => panic!("not yet"),
            "gone" => Err(Failure::done("it is gone already")),
            _ => Ok(()),
        }
    };
    let counting = Counting::of(&by_id());
    let runner = client
        .consumer("q")
        .retry(RetryPolicy::fixed(Duration::from_millis(100)).max_retries(5))
        .state(tally.clone())
        .exactly_once(counting.clone())
        .handle(handler);
    let summary = soon("the end", runner.run_until(counting.until_known(3))).await.unwrap();
    assert_eq!((summary.handled, summary.duplicates), (3, 3), "{summary:?}");
    // Both copies fail twice, and then one of them is handled.
    assert_eq!((tally.of("gone"), tally.of("fails"), tally.of("panics")), (1, 5, 5));
}

/// A request as any client may send it.
fn request(id: &str, body: &str) -> Message {
    let request = Message::new(body.to_owned()).message_id(id).correlation_id(format!("of {id}"));
    request.reply_to("answers").kind("m")
}

fn image(reply: &Delivery) -> (Vec<u8>, Vec<u8>) {
    (reply.raw_properties().as_bytes().to_vec(), reply.body().to_vec())
}

#[tokio::test]
async fn copies_of_a_request_get_the_same_reply_byte_for_byte() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("answers")).await;
    let publisher = publisher(&client).await;
    let tally = Tally::default();
    let method = async |body: String, State(tally): State<Tally>| {
        let count = tally.add(&body);
        let total = tally.total();
        match body.as_str() {
            "error" => Err(Failure::permanent(format!("no. {total}")).kind("declined")),
            "gone" => Err(Failure::done(format!("gone at {total}")).kind("gone")),
            _ => Ok(Message::new(format!("{body} {count}")).header("drawn", i64::from(total))),
        }
    };
    for remember in [Remember::ids_for(HOUR), Remember::until_released(HOUR)] {
        let service = client.service("numbers").workers(4).method("m", method);
        let service = service.state(tally.clone()).exactly_once(MemoryInbox::new(remember));
        let service = Running::start(service).await;
        let mut answers = client.consumer("answers").stream().await.unwrap();
        for body in ["value", "error", "gone", "value"] {
            let before = tally.total();
            let id = format!("{body} {before}");
            let mut replies = Vec::new();
            for _ in 0..3 {
                publisher.publish("numbers", request(&id, body)).await.unwrap();
                let reply = next(&mut answers).await;
                replies.push(image(&reply));
                reply.ack().unwrap();
            }
            assert_eq!(replies[0], replies[1]);
            assert_eq!(replies[0], replies[2]);
            assert_eq!(tally.total(), before + 1);
        }
        let summary = soon("the end", service.stop()).await;
        assert_eq!((summary.handled, summary.duplicates), (4, 8), "{summary:?}");
    }
}

#[tokio::test]
async fn a_failure_that_may_pass_is_told_and_not_recorded() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("answers")).await;
    let publisher = publisher(&client).await;
    let tally = Tally::default();
    let method = async |State(tally): State<Tally>| match tally.add("calls") {
        1 => Err(Failure::retry("not yet")),
        calls => Ok(calls.to_string()),
    };
    let service = client.service("s").state(tally.clone()).method("m", method);
    let service = Running::start(service.exactly_once(by_id())).await;
    let mut answers = client.consumer("answers").stream().await.unwrap();
    for expected in ["not yet", "2", "2"] {
        publisher.publish("s", request("1", "")).await.unwrap();
        let reply = next(&mut answers).await;
        assert_eq!(reply.body(), expected);
        assert_eq!(reply.header("leveret-error").is_some(), expected == "not yet");
        reply.ack().unwrap();
    }
    let summary = soon("the end", service.stop()).await;
    assert_eq!((tally.total(), summary.duplicates, summary.parked), (2, 1, 0), "{summary:?}");
}

#[tokio::test]
async fn numbered_requests_have_their_replies_for_a_while() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("answers")).await;
    let publisher = publisher(&client).await;
    let mut answers = client.consumer("answers").stream().await.unwrap();
    let moment = Duration::from_millis(1);
    for (time, is_known) in [(HOUR, true), (moment, false)] {
        let tally = Tally::default();
        let draw = async |State(tally): State<Tally>| Json(tally.add("drawn"));
        let inbox = MemoryInbox::new(Remember::high_water().replies_for(time));
        let service = client.service("tickets").state(tally.clone()).method("m", draw);
        let service = Running::start(service.exactly_once(inbox)).await;
        let numbers = Sequence::fresh("asker");
        let request = numbers.stamp(request("one", "")).await.unwrap();
        let mut replies = Vec::new();
        for _ in 0..2 {
            publisher.publish("tickets", request.clone()).await.unwrap();
            let reply = next(&mut answers).await;
            replies.push(image(&reply));
            reply.ack().unwrap();
            sleep(2 * moment).await;
        }
        if is_known {
            assert_eq!(replies[0], replies[1]);
        } else {
            // It is not done again, and not answered as if it had not been done.
            let second = String::from_utf8_lossy(&replies[1].1);
            assert!(second.contains("no longer known"), "{replies:?}");
        }
        assert_eq!(tally.total(), 1);
        assert_eq!(soon("the end", service.stop()).await.duplicates, 1);
    }
}

/// An inbox after whose first commit something breaks, before anybody hears of it.
struct BreaksAfterCommit {
    inbox: MemoryInbox,
    breaking: Arc<Breaking>,
}

#[derive(Default)]
struct Breaking {
    commits: AtomicU32,
    committed: Notify,
    broken: Notify,
}

struct BreakingWork(Box<dyn Work>, Arc<Breaking>);

impl Inbox for BreaksAfterCommit {
    fn open<'a>(&'a self, incoming: &'a Incoming) -> Doing<'a, Opened> {
        Box::pin(async {
            Ok(match self.inbox.open(incoming).await? {
                Opened::New(work) => {
                    Opened::New(Box::new(BreakingWork(work, Arc::clone(&self.breaking))))
                }
                other => other,
            })
        })
    }
}

impl Work for BreakingWork {
    fn commit(self: Box<Self>, changes: Changes, reply: Option<&Message>) -> Doing<'_, Report> {
        let reply = reply.cloned();
        Box::pin(async move {
            let BreakingWork(work, breaking) = *self;
            let report = work.commit(changes, reply.as_ref()).await?;
            if breaking.commits.fetch_add(1, Ordering::SeqCst) == 0 {
                breaking.committed.notify_one();
                breaking.broken.notified().await;
            }
            Ok(report)
        })
    }
}

#[tokio::test]
async fn what_was_committed_before_the_connection_broke_is_not_done_again() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    let (tally, breaking) = (Tally::default(), Arc::<Breaking>::default());
    let inbox = BreaksAfterCommit { inbox: by_id(), breaking: Arc::clone(&breaking) };
    let runner = client.consumer("q").state(tally.clone()).exactly_once(inbox).handle(count);
    let (acked, mut is_acked) = mpsc::channel::<()>(1);
    let running = tokio::spawn(runner.run_until(async move { is_acked.recv().await }));
    publish(&publisher, "1", "once").await;
    soon("a commit", breaking.committed.notified()).await;
    cut(&vhost, &client, CONSUMING).await;
    breaking.broken.notify_one();
    until_healthy(&client).await;
    publish(&publisher, "2", "and on").await;
    eventually(SOON, "the next one", async || tally.of("and on") == 1).await;
    until_depth(&client, "q", 0).await;
    drop(acked);
    let summary = soon("the end", running).await.unwrap().unwrap();
    assert_eq!((tally.of("once"), summary.duplicates), (1, 1), "{summary:?}");
}

#[tokio::test]
async fn a_reply_that_was_committed_goes_out_although_the_request_comes_again() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("answers")).await;
    let publisher = publisher(&client).await;
    let (tally, breaking) = (Tally::default(), Arc::<Breaking>::default());
    let inbox = BreaksAfterCommit { inbox: by_id(), breaking: Arc::clone(&breaking) };
    let draw = async |State(tally): State<Tally>| Json(tally.add("drawn"));
    let service = client.service("tickets").state(tally.clone()).method("m", draw);
    let service = Running::start(service.exactly_once(inbox)).await;
    publisher.publish("tickets", request("one", "")).await.unwrap();
    soon("a commit", breaking.committed.notified()).await;
    // The crash: the record is there, and neither reply nor ack went out.
    drop(service);
    let service = client.service("tickets").state(tally.clone()).method("m", draw);
    let inbox = BreaksAfterCommit { inbox: by_id(), breaking: Arc::clone(&breaking) };
    let mut answers = client.consumer("answers").stream().await.unwrap();
    // One that remembers nothing does it again: so the test can fail.
    let forgetful = Running::start(service.exactly_once(inbox)).await;
    let reply = next(&mut answers).await;
    assert_eq!(reply.body(), "2");
    reply.ack().unwrap();
    soon("the end", forgetful.stop()).await;

    let inbox = by_id();
    let breaking = Arc::<Breaking>::default();
    let service = || {
        let breaking = Arc::clone(&breaking);
        let service = client.service("tickets").state(tally.clone()).method("m", draw);
        service.exactly_once(BreaksAfterCommit { inbox: inbox.clone(), breaking })
    };
    let crashes = Running::start(service()).await;
    publisher.publish("tickets", request("two", "")).await.unwrap();
    soon("a commit", breaking.committed.notified()).await;
    drop(crashes);
    let goes_on = Running::start(service()).await;
    let reply = next(&mut answers).await;
    assert_eq!((reply.body().as_ref(), tally.total()), (b"3".as_ref(), 3));
    let summary = soon("the end", goes_on.stop()).await;
    assert_eq!((summary.handled, summary.duplicates), (0, 1), "{summary:?}");
}

#[tokio::test]
async fn what_nobody_can_tell_about_is_parked_with_the_reason() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    client.apply(&Topology::new().queue(Queue::classic("answers"))).await.unwrap();
    let publisher = publisher(&client).await;
    let tally = Tally::default();
    let two_hours_ago = SystemTime::now() - 2 * HOUR;
    let old = Message::new("old").message_id("1").timestamp(two_hours_ago);
    publisher.publish("q", old.clone()).await.unwrap();
    let young = Message::new("young").message_id("2").timestamp(SystemTime::now());
    publisher.publish("q", young).await.unwrap();
    publish(&publisher, "3", "nameless").await;
    let remember = Remember::ids_for(HOUR).known_by(|incoming| {
        let id = incoming.properties().message_id?;
        (id.as_bytes() != b"3").then(|| id.as_bytes().to_vec())
    });
    let consumer = || client.consumer("q").state(tally.clone());
    let runner = consumer().exactly_once(MemoryInbox::new(remember.clone())).handle(count);
    let summary = soon("the end", runner.run_until(until_depth(&client, "q.parked", 2))).await;
    let summary = summary.unwrap();
    assert_eq!((summary.handled, summary.parked), (1, 2), "{summary:?}");
    assert_eq!(parked(&client, "q").await, ["forgotten", "unidentified"]);
    assert_eq!((tally.total(), tally.of("young")), (1, 1));

    // As configured: without an id it is handled whenever it comes, and what is too old is let go.
    let policy = RetryPolicy::default()
        .rule(|facts| (facts.kind == "forgotten").then_some(leveret::Decision::Ack));
    let inbox = MemoryInbox::new(remember.handle_unidentified());
    publisher.publish("q", old).await.unwrap();
    publish(&publisher, "3", "nameless").await;
    publish(&publisher, "3", "nameless").await;
    let runner = consumer().retry(policy).exactly_once(inbox).handle(count);
    let stop = eventually(SOON, "both", async || tally.of("nameless") == 2);
    soon("the end", runner.run_until(stop)).await.unwrap();
    until_depth(&client, "q", 0).await;
    assert_eq!((tally.of("old"), parked(&client, "q").await.len()), (0, 2));

    // Who called is told, and it is parked as well.
    let service = client.service("s").method("m", async || {}).exactly_once(by_id());
    let _service = Running::start(service).await;
    let mut answers = client.consumer("answers").stream().await.unwrap();
    publisher.publish("s", request("1", "").timestamp(two_hours_ago)).await.unwrap();
    let answer = next(&mut answers).await;
    let kind = answer.header("leveret-error");
    assert_eq!(kind.as_ref().and_then(|kind| kind.as_str()), Some("forgotten"));
    until_depth(&client, "s.parked", 1).await;
}

#[tokio::test]
async fn numbers_may_come_in_any_order_and_a_gap_is_waited_for() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    let (tally, inbox) = (Tally::default(), high_water());
    let (one, other) = (Sequence::fresh("one"), Sequence::fresh("other"));
    let mut messages = Vec::new();
    for number in 1..=50 {
        for sequence in [&one, &other] {
            let body = format!("{} {number}", sequence.sender());
            messages.push(sequence.stamp(body).await.unwrap());
        }
    }
    let missing = messages.remove(0);
    // Far from their places, and some twice.
    let shuffled = (0..messages.len()).map(|place| messages[(place * 37) % messages.len()].clone());
    let mut sent: Vec<_> = shuffled.collect();
    sent.extend(messages.iter().step_by(3).cloned());
    let copies = sent.len() - messages.len();
    let all = sent.into_iter().map(|message| ("q", message));
    soon("outcomes", publisher.publish_batch(all)).await.unwrap();
    let runner = client.consumer("q").workers(8).state(tally.clone());
    let runner = runner.exactly_once(inbox.clone()).handle(count);
    let stop = async {
        eventually(SOON, "99 messages", async || tally.total() == 99).await;
        until_depth(&client, "q", 0).await;
        eventually(SOON, "all but the first", async || {
            let mark = inbox.high_water("q", one.sender()).unwrap();
            mark.missing() == [1..=1] && mark.highest() == 50
        })
        .await;
        let mark = inbox.high_water("q", other.sender()).unwrap();
        assert_eq!((mark.mark(), mark.missing()), (50, vec![]));
        soon("an outcome", publisher.publish("q", missing)).await.unwrap();
        eventually(SOON, "the mark of the first", async || {
            inbox.high_water("q", one.sender()).unwrap().mark() == 50
        })
        .await;
    };
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, tally.total()), (100, 100), "{summary:?}");
    assert_eq!(summary.duplicates as usize, copies);
    assert_eq!(inbox.len(), 2, "one mark for each sender");
}

#[tokio::test]
async fn numbers_are_given_up_by_their_sender_or_by_a_policy_and_that_is_told() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    let mut events = client.watch();
    let tally = Tally::default();
    let numbers = Sequence::fresh("shop");
    let mut messages = Vec::new();
    for number in 1..=10 {
        messages.push(numbers.stamp(format!("{number}")).await.unwrap());
    }
    let inbox = MemoryInbox::new(Remember::high_water().gaps(Gaps::GiveUpBehind(3)));
    let runner = client.consumer("q").state(tally.clone());
    let runner = runner.exactly_once(inbox.clone()).handle(count);
    let stop = async {
        for number in [1, 4, 6] {
            publisher.publish("q", messages[number - 1].clone()).await.unwrap();
        }
        // 3 is three behind 6, and 5 is not.
        let event = until_event(&mut events, "what is given up", |event| {
            matches!(event, ClientEvent::GivenUp { .. })
        });
        let event = event.await;
        let ClientEvent::GivenUp { queue, sender, from, to } = &event else { panic!("{event}") };
        assert_eq!((queue.as_str(), sender.as_str(), *from, *to), ("q", numbers.sender(), 2, 3));
        eventually(SOON, "the mark beyond what is given up", async || {
            let mark = inbox.high_water("q", numbers.sender()).unwrap();
            let found = (mark.mark(), mark.missing());
            if found == (4, vec![5..=5]) { Ok(()) } else { Err(format!("{found:?}")) }
        })
        .await;
        // What comes later is neither done nor forgotten about.
        publisher.publish("q", messages[1].clone()).await.unwrap();
        until_depth(&client, "q.parked", 1).await;
        // The sender says that 5 and 7 do not come.
        numbers.give_up(5..=5).await;
        numbers.give_up(7..=7).await;
        for _ in 0..2 {
            let message = numbers.stamp("says so").await.unwrap();
            publisher.publish("q", message).await.unwrap();
        }
        eventually(SOON, "a mark beyond them, and both messages that say so", async || {
            let mark = inbox.high_water("q", numbers.sender()).unwrap().mark();
            mark >= 7 && tally.of("says so") == 2
        })
        .await;
    };
    soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!(parked(&client, "q").await, ["given-up"]);
    assert_eq!(tally.of("2"), 0);
}

#[tokio::test]
async fn what_its_sender_has_released_is_forgotten_after_a_while() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    let publisher = publisher(&client).await;
    let inbox = MemoryInbox::new(Remember::until_released(Duration::from_secs(2)));
    let tally = Tally::default();
    let runner = client.consumer("q").state(tally.clone()).exactly_once(inbox.clone());
    let stop = async {
        for id in ["1", "2", "3", "1"] {
            publish(&publisher, id, id).await;
        }
        eventually(SOON, "three of them", async || inbox.len() == 3).await;
        // The broker may still have a copy.
        let copy = Message::new("2").message_id("2");
        let both = [("q", release(["1", "2", "unknown"])), ("q", copy)];
        soon("outcomes", publisher.publish_batch(both)).await.unwrap();
        eventually(SOON, "the third alone", async || inbox.len() == 1).await;
        until_depth(&client, "q", 0).await;
    };
    let summary = soon("the end", runner.handle(count).run_until(stop)).await.unwrap();
    assert_eq!((summary.handled, summary.duplicates, summary.released), (3, 2, 1), "{summary:?}");
    assert_eq!(tally.total(), 3);
}

#[tokio::test]
async fn a_message_that_two_queues_get_is_handled_once_in_each() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let queue = |name| Queue::classic(name).bind("amq.fanout", "");
    client.apply(&Topology::new().queue(queue("a")).queue(queue("b"))).await.unwrap();
    let publisher = client.publisher("amq.fanout").build().await.unwrap();
    for _ in 0..2 {
        let message = Message::new("news").message_id("1");
        soon("an outcome", publisher.publish("", message)).await.unwrap();
    }
    for (inbox, times) in [
        (MemoryInbox::new(Remember::ids_for(HOUR)), 2),
        (MemoryInbox::new(Remember::ids_for(HOUR).scope("both")), 1),
    ] {
        let tally = Tally::default();
        for queue in ["a", "b"] {
            publisher.publish("", Message::new("news").message_id("1")).await.unwrap();
            let waiting = client.inspect_queue(queue).await.unwrap().messages;
            let counting = Counting::of(&inbox);
            let runner = client.consumer(queue).state(tally.clone());
            let runner = runner.exactly_once(counting.clone()).handle(count);
            let all = counting.until_asked(waiting);
            soon("the end", runner.run_until(all)).await.unwrap();
        }
        assert_eq!(tally.total(), times);
    }
}
