//! Loss accounting: relays are processes that are killed at random, and what they stand between is restarted; and in the end
//! each message that was committed has come, in the order of its key, and none that was rolled back.
//!
//! `LEVERET_OUTBOX_ROWS=100000` is its full size.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leveret::{Backoff, Client, Queue, Topology};
use leveret_sql::{BuiltIn, Dialect, Outbox, Outgoing, RelayBuilder, Schema};
use leveret_testkit::process::{Ending, GuardedProcess};
use leveret_testkit::{ScratchFolder, eventually};
use sqlx::{AssertSqlSafe, Database, PgPool, Pool, Row as _, SqlitePool};
use tokio::sync::{Mutex, watch};
use tokio::time::{sleep, timeout};

const WRITERS: usize = 4;
const KEYS_OF_EACH: usize = 10;
const RELAYS: usize = 2;
const DEADLINE: Duration = Duration::from_secs(300);

/// What tells a relay's process where to go.
const DATABASE: &str = "LEVERET_TEST_RELAY_DATABASE";
const BROKER: &str = "LEVERET_TEST_RELAY_BROKER";

pub fn rows() -> usize {
    std::env::var("LEVERET_OUTBOX_ROWS").map_or(2_000, |rows| rows.parse().unwrap())
}

/// Some messages are written without a key.
fn has_order(key: &str) -> bool {
    !key.starts_with("none")
}

fn chance(below: usize) -> usize {
    (RandomState::new().hash_one(()) % below.max(1) as u64) as usize
}

/// The application's own table, which is written in the same transactions: the truth of what was committed.
pub trait Ledger: Database {
    async fn create(pool: &Pool<Self>);
    async fn note(connection: &mut Self::Connection, key: &str, number: usize) -> sqlx::Result<()>;
    /// How a transaction begins.
    const BEGIN: &str;
    /// How many messages of a key there are.
    async fn count(pool: &Pool<Self>, key: &str) -> sqlx::Result<i64>;
    /// Each key, and how many messages it has.
    async fn counts(pool: &Pool<Self>) -> HashMap<String, usize>;
}

macro_rules! ledger {
    ($($database:ty: $begin:literal)*) => {$(
        impl Ledger for $database {
            const BEGIN: &str = $begin;

            async fn create(pool: &Pool<Self>) {
                let sql = "CREATE TABLE ledger (key text, number bigint, PRIMARY KEY (key, number))";
                sqlx::raw_sql(sql).execute(pool).await.unwrap();
            }

            async fn note(
                connection: &mut Self::Connection,
                key: &str,
                number: usize,
            ) -> sqlx::Result<()> {
                let sql = format!("INSERT INTO ledger VALUES ('{key}', {number})");
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.map(drop)
            }

            async fn count(pool: &Pool<Self>, key: &str) -> sqlx::Result<i64> {
                let sql = "SELECT count(*) FROM ledger WHERE key = $1";
                sqlx::query_scalar(sql).bind(key).fetch_one(pool).await
            }

            async fn counts(pool: &Pool<Self>) -> HashMap<String, usize> {
                let sql = "SELECT key, count(*) AS n FROM ledger GROUP BY key";
                let rows = sqlx::query(sql).fetch_all(pool).await.unwrap();
                rows.iter().map(|row| (row.get("key"), row.get::<i64, _>("n") as usize)).collect()
            }
        }
    )*};
}

ledger! { sqlx::Postgres: "BEGIN" sqlx::Sqlite: "BEGIN IMMEDIATE" }

/// What is between a test and the relays.
pub struct Scene<D: Ledger> {
    pub pool: Pool<D>,
    pub database_url: String,
    pub broker_url: String,
    /// The test that is a relay: see [`be_a_relay`].
    pub relay_test: &'static str,
}

/// Runs it all; what is to be disturbed meanwhile is: once a third of the messages was written, and once two thirds were.
pub async fn nothing_is_lost<D: Ledger>(
    scene: Scene<D>,
    first: impl AsyncFnOnce(),
    second: impl AsyncFnOnce(),
) where
    BuiltIn: Dialect<D>,
{
    let rows = rows();
    Schema::default().migrate(&scene.pool).await.unwrap();
    D::create(&scene.pool).await;
    let client = connected(&scene.broker_url).await;
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let books = Arc::new(Books::default());
    let reading = tokio::spawn(read(client.clone(), Arc::clone(&books)));
    let writers = join_all((0..WRITERS).map(|one| write(&scene.pool, one, rows / WRITERS, &books)));
    let (stop, stopped) = watch::channel(false);
    let story = async {
        let written = |share| {
            let is_there = books.written.load(Ordering::Relaxed) >= share;
            std::future::ready(is_there)
        };
        eventually(DEADLINE, "a third to be written", || written(rows / 3)).await;
        first().await;
        eventually(DEADLINE, "two thirds to be written", || written(rows * 2 / 3)).await;
        second().await;
        let are_done = || std::future::ready(books.writers.load(Ordering::Relaxed) == WRITERS);
        eventually(DEADLINE, "all to be written", are_done).await;
        let counts = D::counts(&scene.pool).await;
        let all: usize = counts.values().sum();
        eventually(DEADLINE, format!("all {all} messages to come"), async || {
            let come = books.come.lock().await.len();
            if come >= all { Ok(()) } else { Err(format!("{come} have")) }
        })
        .await;
        stop.send_replace(true);
        counts
    };
    let relays = join_all((0..RELAYS).map(|_| keep_killing(&scene, stopped.clone())));
    let (counts, kills, _) = tokio::join!(story, relays, writers);
    reading.abort();
    books.check(&counts).await;
    let kills: usize = kills.iter().sum();
    assert!(kills > 0, "no relay was killed");
    eprintln!(
        "{} rows, {kills} kills, {} doubled",
        counts.values().sum::<usize>(),
        books.doubled()
    );
}

/// A client that is soon back when its broker is.
async fn connected(url: &str) -> Client {
    let backoff = Backoff { max: Duration::from_millis(500), ..Backoff::default() };
    Client::builder().endpoint(url).unwrap().backoff(backoff).connect().await.unwrap()
}

async fn join_all<T>(all: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<T> {
    futures_util::future::join_all(all).await
}

/// What was written and what has come.
#[derive(Default)]
struct Books {
    written: AtomicUsize,
    /// Writers that are done.
    writers: AtomicUsize,
    /// Each message once, in the order in which they came first.
    come: Mutex<Vec<(String, usize)>>,
    doubled: AtomicUsize,
}

impl Books {
    fn doubled(&self) -> usize {
        self.doubled.load(Ordering::Relaxed)
    }

    /// All that were committed have come, in order, and no other.
    async fn check(&self, counts: &HashMap<String, usize>) {
        let mut next: HashMap<String, usize> = HashMap::new();
        for (key, number) in self.come.lock().await.iter() {
            let next = next.entry(key.clone()).or_default();
            if has_order(key) {
                assert_eq!(number, next, "the next message of {key}");
            }
            assert!(number < &counts[key], "message {number} of {key} was rolled back");
            *next += 1;
        }
        assert_eq!(&next, counts);
    }
}

/// Takes what comes, through whatever happens to the broker.
async fn read(client: Client, books: Arc<Books>) {
    let mut known = HashSet::new();
    let mut deliveries = client.consumer("q").prefetch(1000).stream().await.unwrap();
    while let Some(delivery) = deliveries.next().await {
        let delivery = delivery.unwrap();
        let text = String::from_utf8(delivery.body().to_vec()).unwrap();
        let (key, number) = text.split_once(' ').unwrap();
        let message = (key.to_owned(), number.parse().unwrap());
        if known.insert(message.clone()) {
            books.come.lock().await.push(message);
        } else {
            books.doubled.fetch_add(1, Ordering::Relaxed);
        }
        // What cannot be acked any more comes again.
        let _ = delivery.ack();
    }
}

/// Writes transactions of a few messages each, of which one in ten is rolled back. All messages of a key are one writer's.
async fn write<D: Ledger>(pool: &Pool<D>, writer: usize, rows: usize, books: &Books)
where
    BuiltIn: Dialect<D>,
{
    // The whole of it takes some seconds, however much it is.
    let longest_pause = 200_000_000 / rows.max(1) / 4;
    let mut done = 0;
    while done < rows {
        let key = match chance(KEYS_OF_EACH + 1) {
            KEYS_OF_EACH => format!("none-{writer}"),
            key => format!("key-{writer}-{key}"),
        };
        let count = 1 + chance(10);
        match transaction(pool, &key, count).await {
            Ok(true) => {
                done += count;
                books.written.fetch_add(count, Ordering::Relaxed);
            }
            Ok(false) => {}
            // Whether it was committed is in the ledger.
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
        sleep(Duration::from_micros(chance(longest_pause) as u64)).await;
    }
    books.writers.fetch_add(1, Ordering::Relaxed);
}

/// Says whether it was committed.
async fn transaction<D: Ledger>(pool: &Pool<D>, key: &str, count: usize) -> sqlx::Result<bool>
where
    BuiltIn: Dialect<D>,
{
    let first = D::count(pool, key).await? as usize;
    let mut transaction = pool.begin_with(D::BEGIN).await?;
    let is_lost = chance(10) == 0;
    for number in first..first + count {
        D::note(&mut transaction, key, number).await?;
        let number = if is_lost { usize::MAX } else { number };
        let mut outgoing = Outgoing::new("", "q", format!("{key} {number}"));
        if has_order(key) {
            outgoing = outgoing.ordered_by(key);
        }
        let written = Outbox::default().write(&mut *transaction, outgoing).await;
        written.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
    }
    if is_lost {
        transaction.rollback().await?
    } else {
        transaction.commit().await?
    }
    Ok(!is_lost)
}

/// Runs a relay as a process, kills it and begins again, until it is told to stop. Says how often.
async fn keep_killing<D: Ledger>(scene: &Scene<D>, mut stopped: watch::Receiver<bool>) -> usize {
    let folder = ScratchFolder::new();
    let mut kills = 0;
    while !*stopped.borrow() {
        let command = [
            "env".to_owned(),
            format!("{DATABASE}={}", scene.database_url),
            format!("{BROKER}={}", scene.broker_url),
            std::env::current_exe().unwrap().display().to_string(),
            "--exact".to_owned(),
            "--ignored".to_owned(),
            "--nocapture".to_owned(),
            scene.relay_test.to_owned(),
        ];
        let log = File::create(folder.path().join("log")).unwrap();
        let relay = GuardedProcess::start(command, Ending::Kill, log);
        // Longer from one to the next, so that it comes to an end even where a process takes long to begin.
        let time = Duration::from_millis((300 + chance(1200) + 10 * kills) as u64);
        let _ = timeout(time, stopped.wait_for(|stopped| *stopped)).await;
        drop(relay);
        kills += 1;
    }
    kills
}

/// The process of a relay, until it is killed.
pub async fn be_a_relay() {
    let url = |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let client = connected(&url(BROKER)).await;
    let (database, outbox) = (url(DATABASE), Outbox::default());
    let relay: RelayBuilder = if database.starts_with("postgres") {
        let pool = loop {
            // It may be down just now.
            match PgPool::connect(&database).await {
                Ok(pool) => break pool,
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        };
        outbox.relay(&client, &pool)
    } else {
        outbox.relay(&client, &SqlitePool::connect(&database).await.unwrap())
    };
    // So that it is cut off with a few rows sent, and a few not.
    let relay = relay.batch(200).patience(Duration::from_secs(1)).build().await.unwrap();
    relay.run().await.unwrap();
}
