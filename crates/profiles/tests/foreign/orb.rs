//! An instance of Orb: its subscriber, and its redelivery handler.

use std::time::Duration;

use leveret::Queue;
use leveret_profiles::Orb;
use leveret_testkit::eventually;
use serde_json::json;

use super::program::Program;
use crate::clients::everywhere;
use crate::{
    SOON, Said, WAIT, connect, consumer, counted, expected, handler, jobs, soon, until_depth,
};

const INBOX: &str = "orb.inbox";

fn orb() -> Orb {
    Orb::new().initial_interval(WAIT).max_interval(2 * WAIT)
}

/// All are handled, each of them once, and nothing is left anywhere.
fn check(said: &[String], jobs: &[String]) {
    assert_eq!(counted(said, "handled "), expected(jobs, |_| 1));
}

#[tokio::test]
async fn orbs_subscriber_reads_what_the_redelivery_service_sends_back() {
    everywhere(async |url| {
        let client = connect(url).await;
        client.apply(&orb().topology(Queue::new(INBOX)).unwrap()).await.unwrap();
        let jobs = jobs(0);
        let serving = async {
            let settings = json!({"queue": INBOX, "publish": jobs, "subscribes": true});
            let program = Program::start("orb.py", url, settings).await;
            let handled = |said: &[String]| counted(said, "handled ").len() == jobs.len();
            let program = program.until("all are handled", handled).await;
            check(&program.end().await, &jobs);
        };
        let redelivered = orb().redelivery(&client).run_until(serving).await.unwrap();
        // One, two and three failures, of five messages each; the first of them is sent back at once.
        assert_eq!((redelivered.retried, redelivered.parked), (30 + 15, 0));
    })
    .await;
}

#[tokio::test]
async fn orbs_redelivery_handler_sends_back_what_a_consumer_rejects() {
    everywhere(async |url| {
        let client = connect(url).await;
        let jobs = jobs(0);
        let settings = json!({"queue": INBOX, "redelivers": true, "initial": 40, "longest": 80});
        let program = Program::start("orb.py", url, settings).await;
        let said = Said::alone();
        let publisher = client.publisher("orb").build().await.unwrap();
        publisher.publish_batch(jobs.iter().map(|job| (INBOX, job.clone()))).await.unwrap();
        let handled = async {
            let all = |_: &[String]| said.handled() == jobs.len();
            let program = program.until("all are handled", all).await;
            assert_eq!(counted(&program.end().await, "redelivered ").len(), 15);
        };
        let runner = consumer(&client, INBOX, orb(), &said);
        let summary = runner.run_until(handled).await.unwrap();
        check(&said.all(), &jobs);
        assert_eq!((summary.handled, summary.parked), (20, 0));
    })
    .await;
}

#[tokio::test]
async fn both_sides_share_the_inbox_and_the_redelivery_queue() {
    everywhere(async |url| {
        let client = connect(url).await;
        client.apply(&orb().topology(Queue::new(INBOX)).unwrap()).await.unwrap();
        let (jobs, said) = (jobs(0), Said::beside());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let service = tokio::spawn(orb().redelivery(&client).run_until(stopped));
        let settings = json!({
            "queue": INBOX, "publish": jobs, "subscribes": true, "redelivers": true, "initial": 40, "longest": 80,
        });
        let handled = async {
            let program = Program::start("orb.py", url, settings).await;
            let all = |theirs: &[String]| said.together(theirs, 1) == jobs.len();
            program.until("all are handled", all).await.end().await
        };
        let runner = consumer(&client, INBOX, orb(), &said);
        let mut theirs = Vec::new();
        runner.run_until(async { theirs = handled.await }).await.unwrap();
        drop(stop);
        let redelivered = soon("the end", service).await.unwrap().unwrap();
        assert_eq!(redelivered.parked, 0);
        check(&said.with(&theirs), &jobs);
        for queue in [INBOX, "orb.redelivery", "orb.wait", "orb.parked"] {
            until_depth(&client, queue, 0).await;
        }
    })
    .await;
}

/// Each subscriber of both pools takes the message that it handles, and leaves those that wait to the others.
#[tokio::test]
async fn pools_of_subscribers_share_messages_that_wait() {
    const POOL: usize = 4;
    everywhere(async |url| {
        let client = connect(url).await;
        client.apply(&orb().topology(Queue::new(INBOX)).unwrap()).await.unwrap();
        let (jobs, said): (Vec<_>, _) =
            ((0..40).map(|n| format!("0 {n}")).collect(), Said::beside());
        let publisher = client.publisher("orb").build().await.unwrap();
        publisher.publish_batch(jobs.iter().map(|job| (INBOX, job.clone()))).await.unwrap();
        let rest = jobs.len() - POOL;
        let mut theirs = Vec::new();
        let done = async {
            let delivered = async || counted(&said.all(), "delivered ").len() == POOL;
            eventually(SOON, "a message in each subscriber", delivered).await;
            let settings = json!({"queue": INBOX, "subscribes": true, "pool": POOL});
            let program = Program::start("orb.py", url, settings).await;
            let all = |theirs: &[String]| said.together(theirs, rest) == jobs.len();
            theirs = program.until("all are handled", all).await.end().await;
        };
        let runner = client.consumer(INBOX).retry(orb()).subscribers(POOL).handle(handler(&said));
        runner.run_until(done).await.unwrap();
        check(&said.with(&theirs), &jobs);
        assert_eq!((said.handled(), counted(&theirs, "handled ").len()), (POOL, rest));
    })
    .await;
}

/// Orb's programs refuse a message with any header that is neither text nor a list.
#[tokio::test]
async fn orbs_programs_take_delayed_messages() {
    const DELAY: Duration = Duration::from_millis(700);
    everywhere(async |url| {
        let client = connect(url).await;
        client.apply(&orb().topology(Queue::new(INBOX)).unwrap()).await.unwrap();
        let by_queue = client.publisher("").build().await.unwrap();
        let by_exchange = client.publisher("orb").build().await.unwrap();
        let settings = |redelivers: bool| {
            json!({
                "queue": INBOX, "subscribes": true, "redelivers": redelivers, "initial": 40, "longest": 80,
            })
        };
        let handled = async |redelivers, jobs: [&str; 2]| {
            let program = Program::start("orb.py", url, settings(redelivers)).await;
            let all = |said: &[String]| counted(said, "handled ").len() == jobs.len();
            let said = program.until("all are handled", all).await.end().await;
            check(&said, &jobs.map(str::to_owned));
        };
        by_queue.publish_in(INBOX, "0 by queue", DELAY).await.unwrap();
        by_exchange.publish_in(INBOX, "2 by exchange", DELAY).await.unwrap();
        handled(true, ["0 by queue", "2 by exchange"]).await;

        by_queue.publish_in(INBOX, "3 by queue", DELAY).await.unwrap();
        by_exchange.publish_in(INBOX, "3 by exchange", DELAY).await.unwrap();
        let serving = handled(false, ["3 by queue", "3 by exchange"]);
        let redelivered = orb().redelivery(&client).run_until(serving).await.unwrap();
        // Of three failures each, the first one is sent back at once.
        assert_eq!((redelivered.retried, redelivered.parked), (2 * (3 + 2), 0));
    })
    .await;
}
