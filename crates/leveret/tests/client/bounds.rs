//! Times that are nothing or without end, wherever the client takes one: each is kept, or refused with a reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leveret::inbox::{MemoryInbox, Remember};
use leveret::{
    Client, Error, ErrorKind, Failure, Filter, Incoming, Json, Message, Next, Queue, Retry,
    RetryPolicy, Topology,
};
use tokio::time::{Instant, sleep, timeout};

use crate::services::{Running, double};
use crate::{PATIENCE, broker, builder_of, client_with, soon};

const EXTREMES: [Duration; 4] =
    [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(u64::MAX), Duration::MAX];

/// A time is not what was asked for: that has to be said as one of these.
fn is_reasoned(error: &Error) -> bool {
    use ErrorKind::{Broker, Invalid, TimedOut, Unreachable};
    matches!(error.kind(), Broker | Invalid | TimedOut | Unreachable)
}

fn check<T>(what: &str, time: Duration, outcome: Result<T, Error>) {
    if let Err(error) = outcome {
        assert!(is_reasoned(&error), "{what} {time:?}: {error} ({:?})", error.kind());
    }
}

#[tokio::test(start_paused = true)]
async fn connecting_takes_any_time() {
    let broker = broker();
    for time in EXTREMES {
        let builder = builder_of(&broker).timeout(time).give_up_after(time).check_every(time);
        let client = soon("an answer", builder.connect()).await;
        if let Ok(client) = client {
            let topology = Topology::new().queue(Queue::classic("q"));
            check("the client's timeout", time, soon("an answer", client.apply(&topology)).await);
            soon("closing", client.close()).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn queues_and_messages_expire_at_any_time() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    for (number, time) in EXTREMES.into_iter().enumerate() {
        for (what, queue) in [
            ("ttl", Queue::classic(format!("ttl {number}")).message_ttl(time)),
            ("expires", Queue::classic(format!("expires {number}")).expires(time)),
        ] {
            let topology = Topology::new().queue(queue);
            check(what, time, soon("an answer", client.apply(&topology)).await);
        }
        let message = Message::new("1").expires_in(time);
        check("expiration", time, soon("an outcome", publisher.publish("q", message)).await);
        let delayed = soon("an outcome", publisher.publish_in("q", "2", time)).await;
        check("a delay", time, delayed);
    }
    assert!(soon("an answer", client.inspect_queue("q")).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn consumers_wait_for_any_time() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    for time in EXTREMES {
        let mut deliveries = client.consumer("q").missing_for(time).stream().await.unwrap();
        let next = timeout(PATIENCE, deliveries.next_within(time)).await;
        assert!(matches!(next, Err(_) | Ok(Next::TimedOut)), "{time:?}: {next:?}");
    }
}

/// What a policy with this time makes of a message whose handler always fails.
async fn fail_with(client: &Client, time: Duration, retry: impl Into<Retry>, what: &str) {
    let publisher = client.publisher("").build().await.unwrap();
    soon("an outcome", publisher.publish("q", "1")).await.unwrap();
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let handler = move |_: Incoming| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Err::<(), _>(Failure::retry("no")) }
    };
    let runner = client.consumer("q").retry(retry).drain(time.min(PATIENCE / 2)).handle(handler);
    // One that is tried again at once leaves paused time no moment to pass.
    let stop = async {
        for _ in 0..20_000 {
            if calls.load(Ordering::Relaxed) > 5 {
                return;
            }
            tokio::task::yield_now().await;
        }
        sleep(Duration::from_secs(2)).await;
    };
    check(what, time, soon(what, runner.run_until(stop)).await.map(drop));
    soon("purging", client.purge_queue("q")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn policies_take_any_time() {
    let broker = broker();
    for time in EXTREMES {
        let client = client_with(&broker, Queue::classic("q")).await;
        let second = Duration::from_secs(1);
        for (what, policy) in [
            ("fixed", RetryPolicy::fixed(time).max_retries(2)),
            ("linear", RetryPolicy::linear(time).max_retries(2)),
            ("exponential", RetryPolicy::exponential(time, 2.0).max_retries(2)),
            ("steps", RetryPolicy::steps([second, time])),
            ("capped", RetryPolicy::exponential(second, 2.0).capped(time).max_retries(2)),
            ("max_age", RetryPolicy::fixed(second).max_age(time)),
        ] {
            fail_with(&client, time, policy, what).await;
        }
        fail_with(&client, time, Retry::in_place(time), "in_place").await;
        let publisher = client.publisher("").build().await.unwrap();
        soon("an outcome", publisher.publish("q", "1")).await.unwrap();
        let handler =
            move |_: Incoming| async move { Err::<(), _>(Failure::retry_after(time, "no")) };
        let policy = RetryPolicy::fixed(second).max_retries(2);
        let runner = client.consumer("q").retry(policy).handle(handler);
        let stop = sleep(Duration::from_secs(2));
        check("retry_after", time, soon("the end", runner.run_until(stop)).await.map(drop));
        soon("closing", client.close()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn calls_and_pools_take_any_time() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    for time in EXTREMES {
        let service = client.service("numbers").drain(time).method("double", double);
        let service = Running::start(service).await;
        let rpc = client.rpc("numbers").timeout(time).build().await.unwrap();
        for call in [
            rpc.call::<Json<u64>>("double", Json(1u64)),
            rpc.call("double", Json(1u64)).timeout(time),
            rpc.call("double", Json(1u64)).timeout(PATIENCE).resend_after(time),
        ] {
            check("a call", time, soon("a reply", call).await.map(drop));
        }
        let stream = rpc.stream::<Json<u64>>("double", Json(1u64)).timeout(time);
        check("a stream", time, soon("replies", stream).await.map(drop));
        let news = client.events("news");
        let gathering = news.gather::<String>("topic", "x").within(time);
        let _ = timeout(PATIENCE, gathering.stream()).await;
        let pool = soon("an answer", client.channel_pool().size(1).timeout(time).build()).await;
        if let Ok(pool) = pool {
            check("a pool", time, soon("a channel", pool.borrow()).await.map(drop));
        }
        drop(service);
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_remembered_and_parked_is_so_for_any_time() {
    let broker = broker();
    let client = client_with(&broker, Queue::quorum("lot")).await;
    for time in EXTREMES {
        for remember in [Remember::ids_for(time), Remember::until_released(time)] {
            let inbox = MemoryInbox::new(remember.replies_for(time));
            let publisher = client.publisher("").build().await.unwrap();
            soon("an outcome", publisher.publish("lot", "1")).await.unwrap();
            let consumer = client.consumer("lot").exactly_once(inbox);
            let runner = consumer.handle(async |_: Incoming| {});
            let stop = sleep(Duration::from_secs(1));
            check("an inbox", time, soon("the end", runner.run_until(stop)).await.map(drop));
        }
        let lot = client.parking_lot("lot");
        for filter in [Filter::new().older_than(time), Filter::new().newer_than(time)] {
            check("a filter", time, soon("a list", lot.list(&filter, 10)).await);
        }
        // It goes on until it is dropped, and lets others have their turn.
        let began = Instant::now();
        let watching = timeout(Duration::from_secs(10), lot.watch(1, time)).await;
        assert!(watching.is_err() && began.elapsed() >= Duration::from_secs(10));
    }
}
