//! Several consumers of one queue in which messages wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leveret::{
    BatchOptions, Client, ConsumerBuilder, Failure, Incoming, Publisher, Queue, Retry, State,
    Topology,
};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{self, Vhost};
use tokio::sync::Barrier;

use crate::support::client::{SOON, client, soon};

const SECOND: Duration = Duration::from_secs(1);

async fn two(vhost: &Vhost) -> (Client, Client) {
    (client(vhost).await, client(vhost).await)
}

/// A place where messages of a round meet: a handler goes on once so many are at work at the same time.
#[derive(Clone)]
struct Round {
    all_at_work: Arc<Barrier>,
    handled: Arc<AtomicU32>,
}

impl Round {
    fn of(number: usize) -> Self {
        Round { all_at_work: Arc::new(Barrier::new(number)), handled: Arc::default() }
    }

    async fn meet(&self, messages: usize) {
        self.all_at_work.wait().await;
        self.handled.fetch_add(messages as u32, Ordering::SeqCst);
    }

    async fn until_handled(&self, messages: u32) {
        eventually(SOON, format!("{messages} messages to be handled"), async || {
            let handled = self.handled.load(Ordering::SeqCst);
            if handled == messages { Ok(()) } else { Err(handled.to_string()) }
        })
        .await;
    }
}

async fn filled(client: &Client, queue: Queue, messages: u32) {
    let name = queue.name().to_owned();
    soon("a queue", client.apply(&Topology::new().queue(queue))).await.unwrap();
    let publisher = soon("a publisher", client.publisher("").build()).await.unwrap();
    let batch = (0..messages).map(|number| (name.as_str(), number.to_string()));
    soon("confirms", publisher.publish_batch(batch)).await.unwrap();
}

/// Consumers of `q`, each of which handles so many messages at a time, share what waits there: all are busy all the time.
async fn are_all_busy(consumers: Vec<(ConsumerBuilder, usize)>, messages: u32) {
    let round = Round::of(consumers.iter().map(|(_, at_a_time)| at_a_time).sum());
    let handler = async |State(round): State<Round>| round.meet(1).await;
    let running = consumers.into_iter().map(|(consumer, _)| {
        let runner = consumer.state(round.clone()).handle(handler);
        let round = round.clone();
        runner.run_until(async move { round.until_handled(messages).await })
    });
    let summaries = soon("the end", futures_util::future::join_all(running)).await;
    let handled: u64 = summaries.into_iter().map(|summary| summary.unwrap().handled).sum();
    assert_eq!(handled, u64::from(messages));
}

/// A pool works on as many messages at a time as it has subscribers, however few wait.
#[tokio::test]
async fn a_pool_handles_as_many_messages_at_a_time_as_it_has_subscribers() {
    let vhost = rabbitmq::vhost().await;
    let client = &client(&vhost).await;
    for (messages, workers) in [(70, 1), (7, 1), (42, 2)] {
        filled(client, Queue::quorum("q"), messages).await;
        let pool = client.consumer("q").subscribers(7).workers(workers);
        are_all_busy(vec![(pool, 7 * workers)], messages).await;
    }
}

/// No other program can read an exclusive queue, but the subscribers of its pool can. Its failed messages wait in place.
#[tokio::test]
async fn a_pool_of_an_exclusive_queue_is_busy() {
    let vhost = rabbitmq::vhost().await;
    let client = &client(&vhost).await;
    filled(client, Queue::classic("own").exclusive(), 70).await;
    are_all_busy(vec![(client.consumer("own").subscribers(7), 7)], 70).await;
    filled(client, Queue::quorum("q"), 70).await;
    let pool = client.consumer("q").subscribers(7).retry(Retry::in_place(Duration::ZERO));
    are_all_busy(vec![(pool, 7)], 70).await;
}

/// Messages that go back to the head of their queue after a while do not keep the others from being handled.
#[tokio::test]
async fn messages_that_fail_in_place_keep_no_others_waiting() {
    let vhost = rabbitmq::vhost().await;
    let client = &client(&vhost).await;
    for (pause, bad) in
        [(Duration::from_millis(1), 1), (Duration::from_millis(200), 1), (SECOND, 4)]
    {
        filled(client, Queue::classic("q"), 0).await;
        let publisher = soon("a publisher", client.publisher("").build()).await.unwrap();
        let bodies = std::iter::repeat_n("bad", bad).chain(["good"; 20]);
        let batch = bodies.map(|body| ("q", body));
        soon("confirms", publisher.publish_batch(batch)).await.unwrap();
        let round = Round::of(1);
        let handler = async |State(round): State<Round>, body: String| match body.as_str() {
            "bad" => Err("not now"),
            _ => {
                round.meet(1).await;
                Ok(())
            }
        };
        let consumer = client.consumer("q").retry(Retry::in_place(pause)).drain(Duration::ZERO);
        let all_good = round.until_handled(20);
        let runner = consumer.state(round.clone()).handle(handler);
        let summary = soon("the end", runner.run_until(all_good)).await.unwrap();
        assert_eq!(summary.handled, 20);
        soon("a delete", client.delete_queue("q", leveret::amqp::DeleteQueue::default()))
            .await
            .unwrap();
    }
}

/// Two programs share what waited before they began.
#[tokio::test]
async fn waiting_messages_are_shared_by_two_clients() {
    let vhost = rabbitmq::vhost().await;
    let (one, other) = &two(&vhost).await;
    for workers in [1, 4] {
        filled(one, Queue::quorum("q"), 40).await;
        let consumer = |client: &Client| (client.consumer("q").workers(workers), workers);
        are_all_busy(vec![consumer(one), consumer(other)], 40).await;
    }
}

#[tokio::test]
async fn waiting_requests_are_shared_by_two_instances_of_a_service() {
    let vhost = rabbitmq::vhost().await;
    let (one, other) = &two(&vhost).await;
    let round = Round::of(32);
    let service = |client: &Client| {
        let meet = async |State(round): State<Round>| round.meet(1).await;
        client.service("sums").method("add", meet).state(round.clone())
    };
    soon("a service", service(one).declare()).await.unwrap();
    let rpc = soon("a caller", one.rpc("sums").build()).await.unwrap();
    for _ in 0..64 {
        soon("a request", rpc.cast("add", "")).await.unwrap();
    }
    let running = [one, other].map(|client| {
        let round = round.clone();
        service(client).run_until(async move { round.until_handled(64).await })
    });
    for summary in soon("the end", futures_util::future::join_all(running)).await {
        assert_eq!(summary.unwrap().handled, 32);
    }
}

/// Of a subscription to events that both keep together.
#[tokio::test]
async fn waiting_events_are_shared_by_two_subscribers() {
    let vhost = rabbitmq::vhost().await;
    let (one, other) = &two(&vhost).await;
    let round = Round::of(2);
    let mut running = Vec::new();
    let events = one.events("shop");
    let subscription =
        |events: &leveret::Events| events.subscribe("stock", ["order.*"]).state(round.clone());
    soon("a queue", subscription(&events).declare()).await.unwrap();
    for number in 0..20 {
        soon("an event", events.publish("order.new", number.to_string())).await.unwrap();
    }
    for client in [one, other] {
        let events = client.events("shop");
        let round = round.clone();
        let runner = subscription(&events).handle(async |State(round): State<Round>| {
            round.meet(1).await;
        });
        running.push(runner.run_until(async move { round.until_handled(20).await }));
    }
    for summary in soon("the end", futures_util::future::join_all(running)).await {
        assert_eq!(summary.unwrap().handled, 10);
    }
}

#[tokio::test]
async fn waiting_batches_are_shared_by_two_clients() {
    let vhost = rabbitmq::vhost().await;
    let (one, other) = &two(&vhost).await;
    filled(one, Queue::quorum("q"), 20).await;
    let round = Round::of(2);
    let running = [one, other].map(|client| {
        let options = BatchOptions { size: 5, within: Duration::from_secs(5) };
        let (meeting, round) = (round.clone(), round.clone());
        let handler = move |batch: Vec<Incoming>| {
            let meeting = meeting.clone();
            async move { meeting.meet(batch.len()).await }
        };
        let runner = client.consumer("q").handle_batches(options, handler);
        runner.run_until(async move { round.until_handled(20).await })
    });
    for summary in soon("the end", futures_util::future::join_all(running)).await {
        assert_eq!(summary.unwrap().handled, 10);
    }
}

/// Messages that cannot be parked, since the lot is full, do not keep the good ones behind them from a consumer with default
/// settings: all its workers go on.
#[tokio::test]
async fn messages_that_cannot_be_parked_do_not_stop_a_consumer() {
    let vhost = rabbitmq::vhost().await;
    let client = &client(&vhost).await;
    for (queue, workers, bad) in [
        (Queue::classic("classic"), 1, 1),
        (Queue::quorum("quorum"), 1, 1),
        (Queue::quorum("several"), 1, 3),
        (Queue::quorum("workers"), 2, 2),
        (Queue::quorum("fewer"), 4, 3),
    ] {
        let name = queue.name().to_owned();
        let lot = format!("{name}.parked");
        let full = Queue::quorum(lot.as_str()).argument("x-overflow", "reject-publish");
        filled(client, full.max_length(1), 0).await;
        soon("a queue", client.apply(&Topology::new().queue(queue))).await.unwrap();
        let publisher = soon("a publisher", client.publisher("").build()).await.unwrap();
        fill_up(&publisher, &lot).await;
        let bodies = std::iter::repeat_n("bad", bad).chain(["good"; 8]);
        let batch = bodies.map(|body| (name.as_str(), body));
        soon("confirms", publisher.publish_batch(batch)).await.unwrap();
        let round = Round::of(workers);
        let handler = async |State(round): State<Round>, body: String| match body.as_str() {
            "bad" => Err(Failure::permanent("it cannot be handled")),
            _ => {
                round.meet(1).await;
                Ok(())
            }
        };
        let runner = client.consumer(&name).workers(workers).drain(Duration::ZERO);
        let runner = runner.state(round.clone()).handle(handler);
        let all_good = round.until_handled(8);
        let summary = soon("the end", runner.run_until(all_good)).await.unwrap();
        assert_eq!((summary.handled, summary.parked), (8, 0), "{name}");
    }
}

/// Publishes until the queue refuses more: a quorum queue takes some beyond its limit.
async fn fill_up(publisher: &Publisher, queue: &str) {
    eventually(SOON, format!("{queue} to be full"), async || {
        soon("a confirm", publisher.publish(queue, "in the way")).await.is_err()
    })
    .await;
}
