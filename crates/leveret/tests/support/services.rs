//! Services that run beside a test.

// It is a part of two kinds of tests.
#![allow(dead_code, unreachable_pub)]

use std::time::Duration;

use leveret::{Client, Error, ErrorKind, Json, Rpc, ServiceBuilder, Summary};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

/// A service that runs until it is stopped; dropped, it crashes.
pub struct Running {
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<Summary, Error>>,
}

impl Running {
    /// Starts it. From now on requests find its queue.
    pub async fn start(service: ServiceBuilder) -> Self {
        service.declare().await.expect("a service that can be declared");
        Running::without_declaring(service)
    }

    /// The same, while the broker may be away.
    pub fn without_declaring(service: ServiceBuilder) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        Running { stop: Some(stop), task: tokio::spawn(service.run_until(stopped)) }
    }

    /// Tells it to stop, and says what it did.
    pub async fn stop(mut self) -> Summary {
        self.begin_stop();
        (&mut self.task).await.expect("no panic").expect("a service that ends well")
    }

    pub fn begin_stop(&mut self) {
        self.stop.take();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A method.
pub async fn double(Json(number): Json<u64>) -> Json<u64> {
    Json(2 * number)
}

/// How many calls are under way at a time in a storm, and from how many tasks.
pub const CALLS: u64 = 1000;
const TASKS: u64 = 8;

/// How long a method may take in a storm.
const SLOWEST: Duration = Duration::from_millis(300);

/// Takes its time, a different one for each number.
async fn double_slowly(Json(number): Json<u64>) -> Json<u64> {
    let part = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
    tokio::time::sleep(SLOWEST * part as u32 / 0x1_0000).await;
    Json(2 * number)
}

/// Runs a service in two instances, one that handles all in one task, and one with a task for each request that crashes again and again, until it is dropped.
pub fn crashing(client: &Client) -> JoinHandle<()> {
    let client = client.clone();
    let service = move || client.service("storm").workers(200).method("double", double_slowly);
    tokio::spawn(async move {
        let _steady = Running::without_declaring(service().in_one_task());
        loop {
            let crashes = Running::without_declaring(service());
            tokio::time::sleep(SLOWEST).await;
            drop(crashes);
        }
    })
}

/// Makes all calls at once, and gives the outcome of each.
pub async fn storm(rpc: &Rpc) -> Vec<(u64, Result<u64, Error>)> {
    let tasks = (0..TASKS).map(|task| {
        let rpc = rpc.clone();
        tokio::spawn(async move {
            let mut calls = JoinSet::new();
            for number in (0..CALLS).filter(|number| number % TASKS == task) {
                let rpc = rpc.clone();
                calls.spawn(async move {
                    let reply = rpc.call::<Json<u64>>("double", Json(number)).await;
                    (number, reply.map(|Json(doubled)| doubled))
                });
            }
            calls.join_all().await
        })
    });
    let mut outcomes = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        outcomes.extend(task.await.expect("no panic"));
    }
    outcomes
}

/// Checks that every call got its own reply or an error that says what happened, and gives how many got a reply.
pub fn each_its_own(outcomes: &[(u64, Result<u64, Error>)]) -> u64 {
    use ErrorKind::{Lost, Missing, TimedOut, Unroutable};
    assert_eq!(outcomes.len() as u64, CALLS);
    let mut replies = 0;
    for (number, outcome) in outcomes {
        match outcome {
            Ok(doubled) => {
                assert_eq!(*doubled, 2 * number);
                replies += 1;
            }
            Err(error) => {
                let is_known = matches!(error.kind(), Lost | Missing | TimedOut | Unroutable);
                assert!(is_known, "{error:?}");
            }
        }
    }
    replies
}
