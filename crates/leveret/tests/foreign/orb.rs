//! An instance of Orb: its subscriber, and its redelivery handler.

use leveret::{Orb, Queue};
use serde_json::json;

use crate::foreign::everywhere;
use crate::program::Program;
use crate::{Said, WAIT, connect, consumer, counted, expected, jobs, soon, until_depth};

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
        assert_eq!((redelivered.sent_back, redelivered.made_to_wait), (30, 15));
        assert_eq!(redelivered.parked, 0);
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
        let said = Said::default();
        let publisher = client.publisher("orb").build().await.unwrap();
        publisher.publish_batch(jobs.iter().map(|job| (INBOX, job.clone()))).await.unwrap();
        let handled = async {
            let all = |_: &[String]| counted(&said.all(), "handled ").len() == jobs.len();
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
        let (jobs, said) = (jobs(0), Said::default());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let service = tokio::spawn(orb().redelivery(&client).run_until(stopped));
        let settings = json!({
            "queue": INBOX, "publish": jobs, "subscribes": true, "redelivers": true, "initial": 40, "longest": 80,
        });
        let handled = async {
            let program = Program::start("orb.py", url, settings).await;
            let all = |theirs: &[String]| {
                let theirs = counted(theirs, "handled ").len();
                theirs + counted(&said.all(), "handled ").len() == jobs.len()
            };
            program.until("all are handled", all).await.end().await
        };
        let runner = consumer(&client, INBOX, orb(), &said);
        let mut theirs = Vec::new();
        runner.run_until(async { theirs = handled.await }).await.unwrap();
        drop(stop);
        let redelivered = soon("the end", service).await.unwrap().unwrap();
        assert_eq!(redelivered.parked, 0);
        check(&[said.all(), theirs].concat(), &jobs);
        for queue in [INBOX, "orb.redelivery", "orb.wait", "orb.parked"] {
            until_depth(&client, queue, 0).await;
        }
    })
    .await;
}
