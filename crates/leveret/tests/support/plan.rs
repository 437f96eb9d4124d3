//! Messages that fail as often as their plan says: at the end each is where its plan ends.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::{
    Attempt, Client, Failure, Incoming, Message, Queue, RetryPolicy, State, Summary, Topology,
};
use leveret_testkit::eventually;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long anything may take before it counts as hanging.
const HANGS: Duration = Duration::from_secs(400);
const WORKERS: usize = 16;
const MAX_RETRIES: u32 = 5;

/// What is to become of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Handled by this attempt.
    Acked { attempt: u32 },
    /// Parked after so many failures.
    Parked { failures: u32 },
}

/// A plan of its own for each message, by its number: it fails 0 to 7 times, and every ninth gives up on the way.
fn plan(number: usize) -> End {
    let fails = (number % 8) as u32;
    if number % 9 == 4 && fails > 0 {
        let gives_up = 1 + (number / 72) as u32 % fails;
        return End::Parked { failures: gives_up.min(MAX_RETRIES + 1) };
    }
    if fails > MAX_RETRIES {
        End::Parked { failures: MAX_RETRIES + 1 }
    } else {
        End::Acked { attempt: fails + 1 }
    }
}

fn number_of(id: Option<&str>) -> usize {
    id.and_then(|id| id.parse().ok()).expect("a message with a number as its id")
}

/// What was seen of each message.
#[derive(Debug)]
struct Seen {
    acked: Vec<AtomicUsize>,
    /// Attempts that no plan has.
    wrong: Mutex<Vec<String>>,
}

async fn follow_plan(
    incoming: Incoming,
    Attempt(attempt): Attempt,
    State(seen): State<Arc<Seen>>,
) -> Result<(), Failure> {
    let properties = incoming.properties();
    let number = number_of(properties.message_id.as_ref().and_then(|id| id.to_str().ok()));
    let end = plan(number);
    let last = match end {
        End::Acked { attempt } => attempt,
        End::Parked { failures } => failures,
    };
    if attempt > last {
        seen.wrong.lock().unwrap().push(format!("{number}: attempt {attempt}, planned {end:?}"));
    }
    match end {
        End::Acked { attempt: last } if attempt >= last => {
            seen.acked[number].fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        End::Parked { failures } if attempt >= failures && failures <= MAX_RETRIES => {
            Err(Failure::permanent("by plan").kind("planned"))
        }
        _ => Err(Failure::retry("by plan")),
    }
}

/// A consumer at work on messages with plans.
pub struct Planned {
    messages: usize,
    client: Client,
    seen: Arc<Seen>,
    stop: watch::Sender<bool>,
    running: JoinHandle<Result<Summary, leveret::Error>>,
}

impl Planned {
    /// Publishes them all, and begins to handle them.
    pub async fn begin(client: Client, queue: Queue, messages: usize, wait: Duration) -> Planned {
        let name = queue.name().to_owned();
        client.apply(&Topology::new().queue(queue)).await.unwrap();
        let seen = Arc::new(Seen {
            acked: (0..messages).map(|_| AtomicUsize::new(0)).collect(),
            wrong: Mutex::default(),
        });
        let (stop, mut stopped) = watch::channel(false);
        let policy = RetryPolicy::linear(wait).max_retries(MAX_RETRIES);
        let runner = client
            .consumer(name.as_str())
            .prefetch(1000)
            .workers(WORKERS)
            .retry(policy)
            .state(Arc::clone(&seen))
            .handle(follow_plan);
        let running = tokio::spawn(async move {
            runner.run_until(async { drop(stopped.wait_for(|stop| *stop).await) }).await
        });
        let publisher = client.publisher("").timeout(HANGS).build().await.unwrap();
        let all = (0..messages)
            .map(|number| (name.as_str(), Message::new("planned").message_id(number.to_string())));
        publisher.publish_batch(all).await.unwrap();
        Planned { messages, client, seen, stop, running }
    }

    /// Waits until so many of a hundred have come to a good end.
    pub async fn progress(&self, percent: usize) {
        let acked = |count: &&AtomicUsize| count.load(Ordering::Relaxed) > 0;
        let planned = (0..self.messages).filter(|n| matches!(plan(*n), End::Acked { .. })).count();
        eventually(HANGS, format!("{percent} % of the messages"), async || {
            let done = self.seen.acked.iter().filter(acked).count();
            if done * 100 >= planned * percent {
                return Ok(());
            }
            Err(format!("{done} of {planned}; {}", self.depths().await))
        })
        .await;
    }

    /// How many messages are where, for whoever looks for those that do not come.
    async fn depths(&self) -> String {
        let mut depths = String::new();
        for queue in self.client.topology().queues() {
            let info = self.client.inspect_queue(queue.name()).await;
            let found = info.map_or("?".to_owned(), |info| format!("{info:?}"));
            depths.push_str(&format!("{found}, "));
        }
        format!("{depths} health {:?}", self.client.health())
    }

    /// Waits until nothing is left to do, and compares with the plans. Says how many came twice.
    pub async fn end(self, queue: &str) -> usize {
        self.progress(100).await;
        let lot = format!("{queue}.parked");
        let planned = (0..self.messages).filter(|n| matches!(plan(*n), End::Parked { .. })).count();
        let mut parked: BTreeMap<usize, Vec<i64>> = BTreeMap::new();
        let all_parked = async {
            let mut parking =
                self.client.consumer(lot.as_str()).prefetch(1000).stream().await.unwrap();
            while parked.len() < planned {
                let message = parking.next().await.expect("the stream goes on").unwrap();
                let properties = message.properties();
                let id = properties.message_id.as_ref().and_then(|id| id.to_str().ok());
                let attempts = message.header("x-leveret-attempts");
                let attempts = attempts.and_then(|attempts| attempts.as_str()?.parse().ok());
                let attempts: i64 = attempts.expect("a count of attempts");
                parked.entry(number_of(id)).or_default().push(attempts);
                let _ = message.ack();
            }
        };
        let in_time = tokio::time::timeout(HANGS, all_parked).await.is_ok();
        assert!(in_time, "{} messages are parked, and should be {planned}", parked.len());
        self.stop.send_replace(true);
        let summary = self.running.await.unwrap().unwrap();
        assert_eq!(*self.seen.wrong.lock().unwrap(), Vec::<String>::new(), "{summary:?}");
        let mut twice = 0;
        for number in 0..self.messages {
            let acked = self.seen.acked[number].load(Ordering::Relaxed);
            let parked = parked.get(&number).map_or(&[][..], Vec::as_slice);
            twice += (acked + parked.len()).saturating_sub(1);
            match plan(number) {
                End::Acked { .. } => assert!(acked > 0 && parked.is_empty(), "message {number}"),
                End::Parked { failures } => {
                    assert_eq!(acked, 0, "message {number} was acked, and should be parked");
                    assert!(!parked.is_empty(), "message {number} is lost");
                    let right = parked.iter().all(|n| *n == i64::from(failures));
                    assert!(right, "message {number}: {parked:?}, planned {failures}");
                }
            }
        }
        println!("{} messages by plan, {twice} came twice: {summary:?}", self.messages);
        twice
    }
}
