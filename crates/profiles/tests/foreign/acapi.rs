//! Programs by the documents of ACAPI: a worker of Sneakers, repliers and callers, events.

use std::collections::BTreeSet;
use std::time::Duration;

use leveret::{ErrorKind, ExchangeKind, Queue, Replies};
use leveret_profiles::{Acapi, AcapiSite, AcapiTraffic};
use serde_json::json;
use tokio::sync::oneshot;

use super::program::Program;
use crate::clients::everywhere;
use crate::{Said, WAIT, connect, consumer, counted, expected, failures, jobs, soon, until_depth};

const QUEUE: &str = "dc0.preprod.q.app.jobs";

const KEY: &str = "resource.policy";

/// A program that replies to requests for policies.
async fn replier(url: &str, queue: &str) -> Program {
    let settings = json!({"program": "replier", "queue": queue, "key": KEY, "interval": 40});
    Program::start("acapi.py", url, settings).await
}

fn site() -> AcapiSite {
    AcapiSite::new("dc0", "preprod")
}

#[tokio::test]
async fn a_reply_without_a_correlation_id_belongs_to_the_call_whose_queue_it_comes_to() {
    everywhere(async |url| {
        let client = connect(url).await;
        client.apply(&site().topology()).await.unwrap();
        let program = replier(url, "policies").await;
        // The queue of the replier can be called directly, too.
        let direct = client.rpc("policies").replies(Replies::QueuePerCall);
        for rpc in [site().requests(&client), direct] {
            let rpc = rpc.build().await.unwrap();
            let calls = (0..20).map(|number| {
                let rpc = rpc.clone();
                let call = async move {
                    rpc.call::<String>("resource.policy", format!("policy {number}")).await
                };
                tokio::spawn(call)
            });
            for (number, call) in calls.collect::<Vec<_>>().into_iter().enumerate() {
                let reply = soon("a reply", call).await.unwrap().unwrap();
                assert_eq!(reply, format!("POLICY {number}"));
            }
            // It may also have an id that means something else.
            let call = rpc.call::<String>("resource.policy", "with an id");
            assert_eq!(soon("a reply", call).await.unwrap(), "WITH AN ID");
            let call = rpc.call::<String>("resource.policy", "again");
            let call = call.resend_after(Duration::from_secs(600));
            assert_eq!(soon("a reply", call).await.unwrap(), "AGAIN");
            assert_eq!((rpc.in_flight(), rpc.stray_replies()), (0, 0));
        }
        program.end().await;
    })
    .await;
}

#[tokio::test]
async fn repliers_of_both_sides_share_a_queue() {
    everywhere(async |url| {
        let client = connect(url).await;
        let site = site();
        client.apply(&site.topology()).await.unwrap();
        let name = site.queue_name("ledger", "policies");
        let program = replier(url, &name).await;
        let ours = async || "ours";
        let service = site.serve(&client, "ledger", "policies", [KEY], ours).await.unwrap();
        // Theirs has a dead-letter exchange.
        let refused = service.declare().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
        let requests = site.exchange_name(&ExchangeKind::Topic, AcapiTraffic::Requests);
        let queue = Queue::new(&name).dead_letter_to(format!("{name}-retry")).bind(requests, KEY);
        let service = service.queue(queue).retry(Acapi::new().interval(WAIT));
        service.declare().await.unwrap();
        let rpc = site.requests(&client).build().await.unwrap();
        let both_reply = async {
            let mut replies = BTreeSet::new();
            while replies.len() < 2 {
                replies.insert(rpc.call::<String>(KEY, "theirs").await.unwrap());
            }
            replies
        };
        let mut replies = BTreeSet::new();
        let calling = async { replies = soon("replies of both", both_reply).await };
        service.run_until(calling).await.unwrap();
        assert_eq!(replies, BTreeSet::from(["THEIRS".to_owned(), "ours".to_owned()]));
        program.end().await;
    })
    .await;
}

#[tokio::test]
async fn a_caller_that_says_nothing_but_where_the_reply_goes_is_served() {
    everywhere(async |url| {
        let client = connect(url).await;
        let policy = async |id: String| format!("the policy {id}");
        let site = site();
        let service = site.serve(&client, "ledger", "policies", ["resource.policy"], policy);
        let service = service.await.unwrap();
        service.declare().await.unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let service = tokio::spawn(service.run_until(stopped));
        let requests: Vec<_> = (0..10).map(|number| number.to_string()).collect();
        let settings = json!({"program": "caller", "key": "resource.policy", "requests": requests});
        let program = Program::start("acapi.py", url, settings).await;
        let all = |said: &[String]| said.iter().filter(|line| line.contains("->")).count() == 10;
        let said = program.until("all are replied to", all).await.end().await;
        for request in &requests {
            assert!(said.contains(&format!("{request} -> the policy {request}")), "{said:?}");
        }
        drop(stop);
        assert_eq!(soon("the end", service).await.unwrap().unwrap().handled, 10);
    })
    .await;
}

#[tokio::test]
async fn workers_of_both_sides_share_a_queue_and_its_retries() {
    everywhere(async |url| {
        let client = connect(url).await;
        let profile = Acapi::new().interval(WAIT).max_retries(3);
        client.apply(&profile.topology(Queue::new(QUEUE)).unwrap()).await.unwrap();
        let (jobs, said) = (jobs(4), Said::beside());
        let settings = json!({
            "program": "worker", "queue": QUEUE, "interval": 40, "max_retries": 3, "publish": jobs,
        });
        let mut theirs = Vec::new();
        let done = async {
            let program = Program::start("acapi.py", url, settings).await;
            let all = |theirs: &[String]| said.together(theirs, 1) == jobs.len() - 4;
            let program = program.until("all that can be are handled", all).await;
            until_depth(&client, &format!("{QUEUE}-error"), 4).await;
            theirs = program.end().await;
        };
        let runner = consumer(&client, QUEUE, profile, &said);
        runner.run_until(done).await.unwrap();
        // Both sides write the same form into what they give up.
        let given_up = expected(&jobs, |job| usize::from(failures(job) > 3));
        let given_up = given_up.into_iter().map(|(job, count)| (format!("{job} after 4"), count));
        assert_eq!(counted(&theirs, "failed "), given_up.collect::<Vec<_>>());
        let both = said.with(&theirs);
        let deliveries = |job: &str| (failures(job) + 1).min(4);
        assert_eq!(counted(&both, "delivered "), expected(&jobs, deliveries));
    })
    .await;
}

#[tokio::test]
async fn events_of_both_sides_are_heard_by_both() {
    everywhere(async |url| {
        let client = connect(url).await;
        let events = site().events(&client);
        let ours = site().subscribe_queue(&events, Queue::new("ours"), ["info.#"]).unwrap();
        ours.declare().await.unwrap();
        let settings = json!({
            "program": "listener", "queue": "theirs", "pattern": "info.*", "publish": ["their event"],
        });
        let program = Program::start("acapi.py", url, settings).await;
        events.publish("info.changed", "our event").await.unwrap();
        let mut heard = Vec::new();
        let mut deliveries = ours.stream().await.unwrap();
        for _ in 0..2 {
            let delivery = soon("an event", deliveries.next()).await.unwrap().unwrap();
            heard.push(String::from_utf8_lossy(delivery.body()).into_owned());
            delivery.ack().unwrap();
        }
        heard.sort();
        assert_eq!(heard, ["our event", "their event"]);
        let both = |said: &[String]| counted(said, "heard ").len() == 2;
        program.until("both are heard", both).await.end().await;
    })
    .await;
}
