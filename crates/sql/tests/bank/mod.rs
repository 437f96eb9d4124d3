//! A bank: each transfer is asked for one to four times, in any order, by way of processes that are killed at every named point
//! and at random, a broker and a database that are restarted. In the end every balance is right to the cent, all replies to a
//! request are the same, and the owners of both accounts were told of it, in order.
//!
//! `LEVERET_BANK_TRANSFERS=100000` is its full size, on a RabbitMQ that is killed; by default it is small, and on the embedded
//! broker, which restarts at once.

mod books;
mod clerk;
mod house;

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leveret::inbox::Sequence;
use leveret::{Client, Message, Queue, Topology};
use leveret_sql::{Outbox, Schema};
use leveret_testkit::eventually;
use sqlx::Pool;
use tokio::time::{Instant, sleep, timeout};

use crate::database::{Database, Db, pool_of, table};
use crate::dying::POINTS;
use books::Books;
use clerk::{Killer, Transfer, WORKERS};
use house::House;

const ACCOUNTS: usize = 100;
const FIRST_BALANCE: i64 = 1_000_000;
/// Sixteen consumers: so many processes, with so many workers each for either queue.
const PROCESSES: usize = 16 / (2 * WORKERS);
const QUEUES: [&str; 2] = ["by-id", "numbered"];
const SENDERS: usize = 8;
const DEADLINE: Duration = Duration::from_secs(1800);
/// A request without a reply after this long is sent again: replies do not survive the restart of a broker.
const PATIENCE: Duration = Duration::from_secs(1);

/// How many transfers, if it was said.
fn asked_for() -> Option<usize> {
    std::env::var("LEVERET_BANK_TRANSFERS").ok().map(|count| count.parse().unwrap())
}

fn chance(below: usize) -> usize {
    (RandomState::new().hash_one(()) % below.max(1) as u64) as usize
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
        let transfer = Transfer { number, from: from as i32, to: to as i32, cents };
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

/// Sends each request one to four times, in no order, and those without a reply again and again.
async fn send(client: &Client, requests: &[(&'static str, Message)], books: &Books) {
    let publisher = client.publisher("").timeout(DEADLINE).build().await.unwrap();
    let mut copies: Vec<usize> =
        (0..requests.len()).flat_map(|number| std::iter::repeat_n(number, 1 + chance(4))).collect();
    for place in (1..copies.len()).rev() {
        copies.swap(place, chance(place + 1));
    }
    let sent = AtomicUsize::new(0);
    for some in copies.chunks(200) {
        let batch = some.iter().map(|number| requests[*number].clone());
        publisher.publish_batch(batch).await.unwrap();
        sent.fetch_add(some.len() * requests.len() / copies.len(), Ordering::Relaxed);
        // No faster than it is worked off, so that what breaks breaks in the middle of it.
        let patience = Instant::now() + PATIENCE;
        while books.replies().await + 1000 < sent.load(Ordering::Relaxed)
            && Instant::now() < patience
        {
            sleep(Duration::from_millis(20)).await;
        }
    }
    let mut known = 0;
    loop {
        sleep(PATIENCE).await;
        let replies = books.replies().await;
        if replies > known {
            known = replies;
            continue;
        }
        let missing = books.missing(requests.len()).await;
        let missing: Vec<_> = missing.iter().map(|number| requests[*number].clone()).collect();
        publisher.publish_batch(missing).await.unwrap();
    }
}

/// How often each account has changed, and what is on it.
async fn accounts(pool: &Pool<Db>) -> Vec<(i64, i64)> {
    let sql = "SELECT place, cents FROM accounts ORDER BY number";
    sqlx::query_as(sql).fetch_all(pool).await.unwrap()
}

async fn open_bank(pool: &Pool<Db>) {
    Schema::default().migrate(pool).await.unwrap();
    let sql = "CREATE TABLE accounts (number integer PRIMARY KEY, cents bigint NOT NULL, place bigint NOT NULL)";
    sqlx::query(sql).execute(pool).await.unwrap();
    for number in 0..ACCOUNTS as i32 {
        let account = sqlx::query("INSERT INTO accounts VALUES ($1, $2, 0)");
        account.bind(number).bind(FIRST_BALANCE).execute(pool).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_balance_is_right_whatever_is_killed_and_however_often_it_is_asked() {
    let began = Instant::now();
    let count = asked_for().unwrap_or(1_000);
    let (mut database, mut house) = tokio::join!(Database::new(), async {
        match asked_for() {
            Some(_) => House::rabbitmq().await,
            None => House::embedded().await,
        }
    });
    let pool = pool_of(&database.url()).await;
    open_bank(&pool).await;
    let client = Client::connect(&*house.url()).await.unwrap();
    let queues = QUEUES.into_iter().chain(["receipts"]).map(Queue::quorum);
    let topology = queues.fold(Topology::new(), Topology::queue).queue(Queue::classic("answers"));
    client.apply(&topology).await.unwrap();

    let (transfers, requests) = requests(count).await;
    let (books, killer) = (Books::default(), Killer::new(database.url(), house.url()));
    let (database_url, broker_url) = (database.url(), house.url());
    let until = async |share: usize| {
        eventually(DEADLINE, format!("replies to {share} requests"), async || {
            let known = books.replies().await;
            if known >= share { Ok(()) } else { Err(known.to_string()) }
        })
        .await;
    };
    let story = async {
        until(count / 3).await;
        database.restart().await;
        until(count * 2 / 3).await;
        house.restart().await;
        until(count).await;
        killer.stop();
    };
    let clerks = (0..PROCESSES).map(|_| killer.keep_killing());
    let all = async { tokio::join!(story, futures_util::future::join_all(clerks)) };
    let read = async { tokio::join!(books.read_replies(&client), books.read_receipts(&client)) };
    let traffic = async { tokio::join!(send(&client, &requests, &books), read) };
    tokio::select! {
        _ = all => {}
        _ = traffic => unreachable!("it goes on until the end"),
    };
    check(&pool, &transfers).await;

    // What is asked once more is answered as before, and nothing of it is done.
    let before = accounts(&pool).await;
    let publisher = client.publisher("").build().await.unwrap();
    let some: Vec<_> = requests.iter().step_by(7).cloned().collect();
    publisher.publish_batch(some).await.unwrap();
    let last = Killer::new(database_url, broker_url);
    let emptied = async {
        eventually(DEADLINE, "empty queues, and all receipts", async || {
            all_is_sent(&client, &pool, &books, 2 * count).await
        })
        .await;
        last.stop();
    };
    let again = async { tokio::join!(emptied, last.keep_killing()) };
    let read = async { tokio::join!(books.read_replies(&client), books.read_receipts(&client)) };
    tokio::select! {
        _ = again => {}
        _ = read => unreachable!("it goes on until the end"),
    }
    assert_eq!(accounts(&pool).await, before);
    books_are_right(&books, &before, count).await;
    for queue in QUEUES {
        let parked = timeout(PATIENCE, client.inspect_queue(&format!("{queue}.parked"))).await;
        assert!(!matches!(parked, Ok(Ok(found)) if found.messages > 0), "something was parked");
    }
    let (replies, receipts) = books.repeated().await;
    let at_random = killer.at_random.load(Ordering::Relaxed);
    let at_points = *killer.at_points.lock().unwrap();
    assert!(at_points.iter().all(|deaths| *deaths > 0), "{at_points:?} of {POINTS:?}");
    assert!(replies > 0, "no copy has got a reply");
    eprintln!(
        "{count} transfers in {:?}: {at_random} clerks killed at random, {at_points:?} {POINTS:?}; \
         {replies} replies and {receipts} receipts came again",
        began.elapsed()
    );
}

/// Whether nothing is left to be done or sent.
async fn all_is_sent(
    client: &Client,
    pool: &Pool<Db>,
    books: &Books,
    receipts: usize,
) -> Result<(), String> {
    for queue in QUEUES {
        let found = client.inspect_queue(queue).await.map_err(|error| error.to_string())?;
        if found.messages > 0 {
            return Err(format!("{} in {queue}", found.messages));
        }
    }
    let backlog = Outbox::default().backlog(pool).await.map_err(|error| error.to_string())?;
    let come = books.receipts().await;
    match (backlog.waiting, backlog.set_aside) == (0, 0) && come >= receipts {
        true => Ok(()),
        false => Err(format!("{backlog:?}, {come} receipts")),
    }
}

async fn check(pool: &Pool<Db>, transfers: &[Transfer]) {
    let mut expected = vec![(0, FIRST_BALANCE); ACCOUNTS];
    for Transfer { from, to, cents, .. } in transfers {
        for (account, cents) in [(from, -cents), (to, *cents)] {
            let (place, balance) = &mut expected[*account as usize];
            *place += 1;
            *balance += cents;
        }
    }
    assert_eq!(accounts(pool).await, expected);
    let sql = format!("SELECT count(*) FROM {}", table("inbox_marks"));
    let marks: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(pool).await.unwrap();
    assert_eq!(marks as usize, SENDERS, "one row a sender");
}

/// Both accounts of each transfer have a receipt for it, once, and the last one of each tells what is on it.
async fn books_are_right(books: &Books, accounts: &[(i64, i64)], transfers: usize) {
    assert_eq!(books.of_transfers(transfers).await, vec![2; transfers]);
    for (number, account) in accounts.iter().enumerate().filter(|(_, account)| account.0 > 0) {
        assert_eq!(books.told(number as i32).await, Some(*account), "account {number}");
    }
}
