//! A bank: each transfer is asked for one to four times, in any order, by way of processes that are killed at random, a broker
//! and a database that are restarted. In the end every balance is right to the cent, and all replies to a request are the same.
//!
//! `LEVERET_BANK_TRANSFERS=100000` is its full size, on a RabbitMQ that is killed; by default it is small, and on the embedded
//! broker, which restarts at once.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use leveret::inbox::{Remember, Sequence};
use leveret::{Client, Delivery, Failure, Json, Message, Queue, Topology};
use leveret_broker::Broker;
use leveret_sql::{Inbox, Schema, Tx};
use leveret_testkit::postgres::Postgres;
use leveret_testkit::process::{Ending, GuardedProcess};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use leveret_testkit::{ScratchFolder, eventually};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgPool, PgPoolOptions};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};

const ACCOUNTS: usize = 100;
const FIRST_BALANCE: i64 = 1_000_000;
/// Sixteen consumers: so many processes, with so many workers each for either queue.
const PROCESSES: usize = 4;
const WORKERS: usize = 2;
const SENDERS: usize = 8;
const DEADLINE: Duration = Duration::from_secs(900);
/// A request without a reply after this long is sent again: replies do not survive the restart of a broker.
const PATIENCE: Duration = Duration::from_secs(1);

const DATABASE: &str = "LEVERET_TEST_BANK_DATABASE";
const BROKER: &str = "LEVERET_TEST_BANK_BROKER";

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Transfer {
    from: i32,
    to: i32,
    cents: i64,
}

/// How many transfers, if it was said.
fn asked_for() -> Option<usize> {
    std::env::var("LEVERET_BANK_TRANSFERS").ok().map(|count| count.parse().unwrap())
}

/// The broker that is restarted.
enum House {
    Embedded(Broker, String),
    RabbitMq(Box<RabbitNode>),
}

impl House {
    async fn start() -> Self {
        match asked_for() {
            Some(_) => House::RabbitMq(Box::new(RabbitNode::start(Version::under_test()).await)),
            None => {
                let broker = Broker::builder().start().unwrap();
                let address = broker.listen("127.0.0.1:0").await.unwrap();
                House::Embedded(broker, format!("amqp://{address}"))
            }
        }
    }

    fn url(&self) -> String {
        match self {
            House::Embedded(_, url) => url.clone(),
            House::RabbitMq(broker) => broker.url(),
        }
    }

    async fn restart(&mut self) {
        match self {
            House::Embedded(broker, _) => broker.restart().await,
            House::RabbitMq(broker) => {
                broker.kill().await;
                broker.start_again().await;
            }
        }
    }
}

fn chance(below: usize) -> usize {
    (RandomState::new().hash_one(()) % below.max(1) as u64) as usize
}

/// The balance of whoever pays is the reply: it depends on what went before, so it would be another one the next time.
async fn transfer(
    Json(transfer): Json<Transfer>,
    mut tx: Tx<sqlx::Postgres>,
) -> Result<Json<i64>, Failure> {
    let Transfer { from, to, cents } = transfer;
    let mut balance = 0;
    // Always the lower account first: who locks in another order waits for ever, as far as it depends on them.
    let mut steps = [(from, -cents), (to, cents)];
    steps.sort_unstable();
    for (account, cents) in steps {
        let sql = "UPDATE accounts SET cents = cents + $2 WHERE number = $1 RETURNING cents";
        let now: i64 =
            sqlx::query_scalar(sql).bind(account).bind(cents).fetch_one(&mut *tx).await?;
        if account == from {
            balance = now;
        }
    }
    Ok(Json(balance))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a bank clerk, for the other test to kill"]
async fn clerk() {
    let url = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let pool = loop {
        // It may be down just now.
        let options = PgPoolOptions::new().max_connections(2 * WORKERS as u32);
        match options.acquire_timeout(Duration::from_secs(2)).connect(&url(DATABASE)).await {
            Ok(pool) => break pool,
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    };
    let client = Client::connect(&*url(BROKER)).await.unwrap();
    let service = |queue: &str, remember: Remember| {
        let inbox = Inbox::new(pool.clone(), remember);
        // Errors are for the clerk, and not for who asks: the request is tried again until it works.
        let retry = leveret::RetryPolicy::fixed(Duration::from_millis(200)).unlimited_retries();
        let service = client.service(queue).queue(Queue::quorum(queue)).workers(WORKERS);
        service.retry(retry).retry_calls().exactly_once(inbox).method("transfer", transfer)
    };
    let by_id = service("by-id", Remember::ids_for(Duration::from_secs(86_400)));
    let numbered = service("numbered", Remember::high_water());
    let (one, other) = tokio::join!(by_id.run(), numbered.run());
    one.and(other).unwrap();
}

/// All requests, each with the queue it goes to.
async fn requests(count: usize) -> (Vec<Transfer>, Vec<(&'static str, Message)>) {
    let senders: Vec<_> = (0..SENDERS).map(|_| Sequence::fresh("sender")).collect();
    let mut transfers = Vec::new();
    let mut requests = Vec::new();
    for number in 0..count {
        let from = chance(ACCOUNTS);
        let to = (from + 1 + chance(ACCOUNTS - 1)) % ACCOUNTS;
        let cents = 1 + chance(1000) as i64;
        let transfer = Transfer { from: from as i32, to: to as i32, cents };
        let message = Message::new(serde_json::to_vec(&transfer).unwrap())
            .reply_to("answers")
            .kind("transfer")
            .correlation_id(number.to_string());
        transfers.push(transfer);
        requests.push(match number % 2 {
            0 => ("by-id", message.message_id(format!("transfer {number}"))),
            _ => ("numbered", senders[number / 2 % SENDERS].stamp(message).await.unwrap()),
        });
    }
    (transfers, requests)
}

/// The replies to each request: their bytes, and how many there were.
type Replies = Mutex<HashMap<usize, ((Vec<u8>, Vec<u8>), usize)>>;

async fn read(client: &Client, replies: &Replies) {
    let mut stream = client.consumer("answers").prefetch(1000).stream().await.unwrap();
    while let Some(delivery) = stream.next().await {
        let delivery: Delivery = delivery.unwrap();
        let number = delivery.properties().correlation_id.unwrap().to_string().parse().unwrap();
        let image = (delivery.raw_properties().as_bytes().to_vec(), delivery.body().to_vec());
        let mut replies = replies.lock().await;
        let (first, count) = replies.entry(number).or_insert_with(|| (image.clone(), 0));
        assert_eq!(*first, image, "replies to request {number}");
        *count += 1;
        drop(replies);
        // What cannot be acked any more comes again, and is the same.
        let _ = delivery.ack();
    }
}

async fn keep_killing(database: &str, broker: &str, stop: &AtomicBool) -> usize {
    let folder = ScratchFolder::new();
    let mut kills = 0;
    while !stop.load(Ordering::Relaxed) {
        let command = [
            "env".to_owned(),
            format!("{DATABASE}={database}"),
            format!("{BROKER}={broker}"),
            std::env::current_exe().unwrap().display().to_string(),
            "--exact".to_owned(),
            "--ignored".to_owned(),
            "--nocapture".to_owned(),
            "postgres_server::bank::clerk".to_owned(),
        ];
        let log = File::create(folder.path().join("log")).unwrap();
        let clerk = GuardedProcess::start(command, Ending::Kill, log);
        let end = Instant::now() + Duration::from_millis(500 + chance(3000) as u64);
        while Instant::now() < end && !stop.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(50)).await;
        }
        drop(clerk);
        kills += 1;
    }
    kills
}

/// Sends each request one to four times, in no order, and those without a reply again and again.
async fn send(
    client: &Client,
    requests: &[(&'static str, Message)],
    sent: &AtomicUsize,
    replies: &Replies,
) {
    let publisher = client.publisher("").timeout(DEADLINE).build().await.unwrap();
    let mut copies: Vec<usize> =
        (0..requests.len()).flat_map(|number| std::iter::repeat_n(number, 1 + chance(4))).collect();
    for place in (1..copies.len()).rev() {
        copies.swap(place, chance(place + 1));
    }
    for some in copies.chunks(200) {
        let batch = some.iter().map(|number| requests[*number].clone());
        publisher.publish_batch(batch).await.unwrap();
        sent.fetch_add(some.len() * requests.len() / copies.len(), Ordering::Relaxed);
        // No faster than it is worked off, so that what breaks breaks in the middle of it.
        let patience = Instant::now() + PATIENCE;
        while replies.lock().await.len() + 1000 < sent.load(Ordering::Relaxed)
            && Instant::now() < patience
        {
            sleep(Duration::from_millis(20)).await;
        }
    }
    sent.store(requests.len(), Ordering::Relaxed);
    let mut known = 0;
    loop {
        sleep(PATIENCE).await;
        let replies = replies.lock().await;
        if replies.len() > known {
            known = replies.len();
            continue;
        }
        let missing = (0..requests.len()).filter(|number| !replies.contains_key(number));
        let missing: Vec<_> = missing.map(|number| requests[number].clone()).collect();
        drop(replies);
        publisher.publish_batch(missing).await.unwrap();
    }
}

async fn balances(pool: &PgPool) -> Vec<i64> {
    let sql = "SELECT cents FROM accounts ORDER BY number";
    sqlx::query_scalar(sql).fetch_all(pool).await.unwrap()
}

async fn open_bank(pool: &PgPool) {
    Schema::default().migrate(pool).await.unwrap();
    let sql = "CREATE TABLE accounts (number integer PRIMARY KEY, cents bigint NOT NULL)";
    sqlx::query(sql).execute(pool).await.unwrap();
    let sql = "INSERT INTO accounts SELECT n, $2 FROM generate_series(0, $1 - 1) n";
    let accounts = sqlx::query(sql).bind(ACCOUNTS as i32).bind(FIRST_BALANCE);
    accounts.execute(pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_balance_is_right_whatever_is_killed_and_however_often_it_is_asked() {
    let count = asked_for().unwrap_or(2_000);
    let (mut postgres, mut house) = tokio::join!(Postgres::start(), House::start());
    let options = PgPoolOptions::new().max_connections(4).acquire_timeout(Duration::from_secs(5));
    let pool = options.connect(&postgres.url()).await.unwrap();
    open_bank(&pool).await;
    let client = Client::connect(&*house.url()).await.unwrap();
    let queues = ["by-id", "numbered"].into_iter().map(Queue::quorum);
    let topology = queues.fold(Topology::new(), Topology::queue).queue(Queue::classic("answers"));
    client.apply(&topology).await.unwrap();

    let (transfers, requests) = requests(count).await;
    let (replies, sent, stop) = (Replies::default(), AtomicUsize::new(0), AtomicBool::new(false));
    let (database, broker) = (postgres.url(), house.url());
    let until = async |share: usize| {
        eventually(DEADLINE, format!("replies to {share} requests"), async || {
            let known = replies.lock().await.len();
            if known >= share { Ok(()) } else { Err(known.to_string()) }
        })
        .await;
    };
    let story = async {
        until(count / 3).await;
        postgres.kill().await;
        postgres.start_again().await;
        until(count * 2 / 3).await;
        house.restart().await;
        until(count).await;
        stop.store(true, Ordering::Relaxed);
    };
    let clerks = (0..PROCESSES).map(|_| keep_killing(&database, &broker, &stop));
    let clerks = futures_util::future::join_all(clerks);
    let all = async { tokio::join!(story, clerks) };
    let traffic =
        async { tokio::join!(send(&client, &requests, &sent, &replies), read(&client, &replies)) };
    let kills: usize = tokio::select! {
        (_, kills) = all => kills.iter().sum(),
        _ = traffic => unreachable!("it goes on until the end"),
    };
    check(&pool, &transfers).await;

    // What is asked once more is answered as before, and nothing of it is done.
    let before = balances(&pool).await;
    let stop = AtomicBool::new(false);
    let publisher = client.publisher("").build().await.unwrap();
    let some: Vec<_> = requests.iter().step_by(7).cloned().collect();
    publisher.publish_batch(some).await.unwrap();
    let emptied = async {
        eventually(DEADLINE, "empty queues", async || {
            for queue in ["by-id", "numbered"] {
                let found = client.inspect_queue(queue).await.map_err(|error| error.to_string())?;
                if found.messages > 0 {
                    return Err(format!("{} in {queue}", found.messages));
                }
            }
            Ok(())
        })
        .await;
        stop.store(true, Ordering::Relaxed);
    };
    let again = async { tokio::join!(emptied, keep_killing(&database, &broker, &stop)) };
    tokio::select! {
        _ = again => {}
        () = read(&client, &replies) => {}
    }
    assert_eq!(balances(&pool).await, before);
    let parked = timeout(PATIENCE, client.inspect_queue("by-id.parked")).await;
    assert!(!matches!(parked, Ok(Ok(found)) if found.messages > 0), "something was parked");
    let repeats: usize = replies.lock().await.values().map(|(_, count)| count - 1).sum();
    assert!(kills > PROCESSES && repeats > 0, "{kills} kills, {repeats} repeats");
    eprintln!("{count} transfers, {kills} kills, {repeats} replies repeated");
}

async fn check(pool: &PgPool, transfers: &[Transfer]) {
    let mut expected = vec![FIRST_BALANCE; ACCOUNTS];
    for Transfer { from, to, cents } in transfers {
        expected[*from as usize] -= cents;
        expected[*to as usize] += cents;
    }
    assert_eq!(balances(pool).await, expected);
    let marks: i64 = sqlx::query_scalar("SELECT count(*) FROM leveret.inbox_marks")
        .fetch_one(pool)
        .await
        .unwrap();
    assert_eq!(marks as usize, SENDERS, "one row a sender");
}
