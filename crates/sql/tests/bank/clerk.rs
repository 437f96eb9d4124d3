//! A clerk: a process that makes transfers, sends the receipts, and is killed.

use std::fs::File;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use leveret::inbox::Remember;
use leveret::{Client, Failure, Json, Queue, RetryPolicy, State};
use leveret_sql::{Inbox, Outbox, Outgoing, Tx};
use leveret_testkit::ScratchFolder;
use leveret_testkit::process::{Ending, GuardedProcess};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::chance;
use crate::database::{Db, pool_of};
use crate::dying::{Dying, PASSES, POINT, POINTS, dies_at};

const DATABASE: &str = "LEVERET_TEST_BANK_DATABASE";
const BROKER: &str = "LEVERET_TEST_BANK_BROKER";

/// So many of each process, for either queue.
pub(super) const WORKERS: usize = 2;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Transfer {
    pub(super) number: usize,
    pub(super) from: i32,
    pub(super) to: i32,
    pub(super) cents: i64,
}

/// What is told to the owner of an account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Receipt {
    pub(super) account: i32,
    /// Counts what has changed the account, from 1 on.
    pub(super) place: i64,
    pub(super) balance: i64,
    pub(super) transfer: usize,
}

/// The balance of whoever pays is the reply: it depends on what went before, so it would be another one the next time.
async fn transfer(
    Json(transfer): Json<Transfer>,
    mut tx: Tx<Db>,
    State(outbox): State<Outbox>,
) -> Result<Json<i64>, Failure> {
    dies_at("before the work");
    let Transfer { number, from, to, cents } = transfer;
    let mut balance = 0;
    // Always the lower account first: who locks in another order waits for ever, as far as it depends on them.
    let mut steps = [(from, -cents), (to, cents)];
    steps.sort_unstable();
    let sql = "UPDATE accounts SET cents = cents + $2, place = place + 1 WHERE number = $1 \
               RETURNING cents, place";
    for (account, cents) in steps {
        let change = sqlx::query_as(sql).bind(account).bind(cents);
        let (now, place): (i64, i64) = change.fetch_one(&mut *tx).await?;
        let receipt = Receipt { account, place, balance: now, transfer: number };
        let receipt = Outgoing::new("", "receipts", serde_json::to_vec(&receipt)?);
        outbox.write(&mut *tx, receipt.ordered_by(account.to_string())).await?;
        if account == from {
            balance = now;
        }
    }
    dies_at("after the work");
    Ok(Json(balance))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a bank clerk, for the other test to kill"]
async fn clerk() {
    let url = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let pool = pool_of(&url(DATABASE)).await;
    let client = Client::connect(&*url(BROKER)).await.unwrap();
    let outbox = Outbox::default();
    let service = |queue: &str, remember: Remember| {
        let inbox = Dying(Inbox::new(pool.clone(), remember));
        // Errors are for the clerk, and not for who asks: the request is tried again until it works.
        let retry = RetryPolicy::fixed(Duration::from_millis(200)).unlimited_retries();
        let service = client.service(queue).queue(Queue::quorum(queue)).workers(WORKERS);
        let service = service.state(outbox.clone()).retry(retry).retry_calls();
        service.exactly_once(inbox).method("transfer", transfer)
    };
    let by_id = service("by-id", Remember::ids_for(Duration::from_secs(86_400)));
    let numbered = service("numbered", Remember::high_water());
    // With little patience, so that what a killed clerk had in hand on SQLite is not waited for for long.
    let relay = outbox.relay(&client, &pool).patience(Duration::from_secs(1));
    let relay = async { relay.build().await.unwrap().run().await };
    let (one, other, third) = tokio::join!(by_id.run(), numbered.run(), relay);
    one.and(other).unwrap();
    third.unwrap();
}

/// Who starts clerks, and kills them.
pub(super) struct Killer {
    database: String,
    broker: String,
    stop: AtomicBool,
    started: AtomicUsize,
    /// Those that were killed at any time.
    pub(super) at_random: AtomicUsize,
    /// Those that died at each point.
    pub(super) at_points: Mutex<[usize; POINTS.len()]>,
}

impl Killer {
    pub(super) fn new(database: String, broker: String) -> Self {
        Killer {
            database,
            broker,
            stop: AtomicBool::default(),
            started: AtomicUsize::default(),
            at_random: AtomicUsize::default(),
            at_points: Mutex::default(),
        }
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Has one clerk after the other. The first ones die at one of the points each, which all come to in the beginning; later
    /// it is either that or any time.
    pub(super) async fn keep_killing(&self) {
        let folder = ScratchFolder::new();
        while !self.is_stopped() {
            let started = self.started.fetch_add(1, Ordering::Relaxed);
            let place = started % POINTS.len();
            if started < POINTS.len() || chance(2) == 0 {
                self.one_that_dies(place, &folder).await;
            } else {
                self.one_that_is_killed(&folder).await;
            }
        }
    }

    async fn one_that_dies(&self, place: usize, folder: &ScratchFolder) {
        let (point, passes) = (POINTS[place], chance(20));
        let mut clerk =
            self.start([format!("{POINT}={point}"), format!("{PASSES}={passes}")], folder);
        while !self.is_stopped() {
            if clerk.exit_status().is_some() {
                self.at_points.lock().unwrap()[place] += 1;
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn one_that_is_killed(&self, folder: &ScratchFolder) {
        let clerk = self.start([], folder);
        let end = Instant::now() + Duration::from_millis(500 + chance(3000) as u64);
        while Instant::now() < end && !self.is_stopped() {
            sleep(Duration::from_millis(50)).await;
        }
        drop(clerk);
        self.at_random.fetch_add(1, Ordering::Relaxed);
    }

    fn start(
        &self,
        more: impl IntoIterator<Item = String>,
        folder: &ScratchFolder,
    ) -> GuardedProcess {
        let mut command = vec!["env".to_owned()];
        command.push(format!("{DATABASE}={}", self.database));
        command.push(format!("{BROKER}={}", self.broker));
        command.extend(more);
        command.push(std::env::current_exe().unwrap().display().to_string());
        let test = ["--exact", "--ignored", "--nocapture", "bank::clerk::clerk"];
        command.extend(test.map(str::to_owned));
        let log = File::create(folder.path().join("log")).unwrap();
        GuardedProcess::start(command, Ending::Kill, log)
    }
}
