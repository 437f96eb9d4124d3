//! Programs by the documents of ACAPI, the Cover Art Archive, Chandra and Orb, written with pika, share queues with this client:
//! on the embedded broker, and on the RabbitMQ at hand.

#[path = "../../broker/tests/foreign/clients.rs"]
#[allow(dead_code)]
mod clients;

mod foreign {
    mod acapi;
    mod chandra;
    mod cover_art;
    mod orb;
    mod program;
}

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use leveret::{Client, Failure, Incoming, Retry, Runner};
use leveret_testkit::eventually;
use tokio::sync::watch;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(60);

/// How long messages wait here before they are tried again.
const WAIT: Duration = Duration::from_millis(40);

async fn soon<F: IntoFuture>(what: &str, future: F) -> F::Output {
    timeout(SOON, future).await.unwrap_or_else(|_| panic!("{what} did not happen in {SOON:?}"))
}

async fn connect(url: &str) -> Client {
    soon("a client", Client::connect(url)).await.unwrap()
}

/// What a consumer of this side says, in the words of the programs of the other side.
#[derive(Clone)]
struct Said {
    lines: Arc<Mutex<Vec<String>>>,
    /// Whether the consumer may go on to handle messages.
    goes_on: watch::Sender<bool>,
}

impl Said {
    fn alone() -> Self {
        Said { lines: Arc::default(), goes_on: watch::Sender::new(true) }
    }

    /// Handles nothing until the other side has: [`together`](Self::together) finds out. A consumer that takes more messages
    /// than it handles would leave none for it.
    fn beside() -> Self {
        Said { lines: Arc::default(), goes_on: watch::Sender::new(false) }
    }

    fn say(&self, words: String) {
        self.lines.lock().unwrap().push(words);
    }

    fn all(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    fn handled(&self) -> usize {
        counted(&self.all(), "handled ").len()
    }

    /// How many messages both sides have handled. Once the other side has handled so many of them, this one goes on.
    fn together(&self, theirs: &[String], first: usize) -> usize {
        let theirs = counted(theirs, "handled ").len();
        if theirs >= first {
            self.goes_on.send_replace(true);
        }
        theirs + self.handled()
    }

    /// What both sides have said, if each of them has handled messages.
    fn with(&self, theirs: &[String]) -> Vec<String> {
        let handled = (self.handled(), counted(theirs, "handled ").len());
        assert!(handled.0 > 0 && handled.1 > 0, "the sides have handled {handled:?} messages");
        [self.all(), theirs.to_vec()].concat()
    }
}

/// A consumer that lets as many deliveries of a message fail as its body says, before the blank.
fn consumer(client: &Client, queue: &str, retry: impl Into<Retry>, said: &Said) -> Runner {
    client.consumer(queue).retry(retry).handle(handler(said))
}

fn handler(said: &Said) -> impl Fn(Incoming) -> BoxFuture<'static, Result<(), Failure>> + use<> {
    let said = said.clone();
    move |incoming| {
        let said = said.clone();
        Box::pin(async move {
            let body = String::from_utf8_lossy(incoming.body()).into_owned();
            let wanted: u32 = body.split(' ').next().unwrap().parse().unwrap();
            said.say(format!("delivered {body}"));
            if incoming.attempt() <= wanted {
                return Err(Failure::retry("ours").kind("early"));
            }
            let _ = said.goes_on.subscribe().wait_for(|goes_on| *goes_on).await;
            said.say(format!("handled {body}"));
            Ok(())
        })
    }
}

/// Messages that fail up to three times before they are handled, and some that always fail.
fn jobs(always_failing: usize) -> Vec<String> {
    let handled = (0..20).map(|number| format!("{} {number}", number % 4));
    handled.chain((0..always_failing).map(|number| format!("9 {number}"))).collect()
}

/// How often something was said on both sides, in order of what.
fn counted(said: &[String], beginning: &str) -> Vec<(String, usize)> {
    let mut counts = std::collections::BTreeMap::new();
    for what in said.iter().filter_map(|line| line.strip_prefix(beginning)) {
        *counts.entry(what.trim().to_owned()).or_default() += 1;
    }
    counts.into_iter().collect()
}

/// Each message as often as it is to be.
fn expected(jobs: &[String], times: impl Fn(&str) -> usize) -> Vec<(String, usize)> {
    let mut all: Vec<_> = jobs.iter().map(|job| (job.clone(), times(job))).collect();
    all.retain(|(_, times)| *times > 0);
    all.sort();
    all
}

/// How many deliveries fail before a message is handled.
fn failures(job: &str) -> usize {
    job.split(' ').next().unwrap().parse().unwrap()
}

async fn until_depth(client: &Client, queue: &str, messages: u32) {
    eventually(SOON, format!("{messages} messages in {queue}"), async || {
        let found = client.inspect_queue(queue).await.map_err(|error| error.to_string())?.messages;
        if found == messages { Ok(()) } else { Err(found.to_string()) }
    })
    .await;
}
