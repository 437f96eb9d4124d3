//! A database that is killed and restarted while messages are handled.

use std::time::Duration;

use leveret::inbox::Remember;
use leveret::{Client, Failure, Message, Queue, RetryPolicy, Topology};
use leveret_broker::Broker;
use leveret_sql::{Inbox, Schema, Tx};
use leveret_testkit::eventually;
use leveret_testkit::postgres::Postgres;
use sqlx::postgres::PgPoolOptions;
use tokio::time::{sleep, timeout};

const MESSAGES: i64 = 300;
const DEADLINE: Duration = Duration::from_secs(60);

async fn note(number: String, mut tx: Tx<sqlx::Postgres>) -> Result<(), Failure> {
    let number: i64 = number.parse()?;
    sqlx::query("INSERT INTO done VALUES ($1)").bind(number).execute(&mut *tx).await?;
    sleep(Duration::from_millis(20)).await;
    Ok(())
}

#[tokio::test]
async fn nothing_is_lost_doubled_or_parked_when_the_database_restarts() {
    let mut postgres = Postgres::start().await;
    let options = PgPoolOptions::new().max_connections(8).acquire_timeout(Duration::from_secs(2));
    let pool = options.connect(&postgres.url()).await.unwrap();
    Schema::default().migrate(&pool).await.unwrap();
    sqlx::query("CREATE TABLE done (number bigint)").execute(&pool).await.unwrap();
    let broker = Broker::builder().start().unwrap();
    let client = Client::builder().broker(&broker).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let publish = async |first: i64, last: i64| {
        for number in (first..last).chain(first..last) {
            let message = Message::new(number.to_string()).message_id(number.to_string());
            publisher.publish("q", message).await.unwrap();
        }
    };
    let retry = RetryPolicy::fixed(Duration::from_millis(200)).unlimited_retries();
    let runner = client.consumer("q").workers(8).retry(retry);
    let inbox = Inbox::new(pool.clone(), Remember::ids_for(Duration::from_secs(86_400)));
    let runner = runner.exactly_once(inbox).handle(note);
    let third = MESSAGES / 3;
    let stop = async {
        publish(0, third).await;
        postgres.kill().await;
        publish(third, 2 * third).await;
        postgres.start_again().await;
        publish(2 * third, MESSAGES).await;
        postgres.restart().await;
        eventually(DEADLINE, "all of them", async || {
            let count: i64 = sqlx::query_scalar("SELECT count(*) FROM done")
                .fetch_one(&pool)
                .await
                .map_err(|error| error.to_string())?;
            if count == MESSAGES { Ok(()) } else { Err(count.to_string()) }
        })
        .await;
        eventually(DEADLINE, "an empty queue", async || {
            let snapshot = broker.snapshot();
            let queues = &snapshot.virtual_host("/").unwrap().queues;
            queues.iter().all(|queue| queue.ready + queue.unsettled == 0)
        })
        .await;
    };
    let summary = timeout(3 * DEADLINE, runner.run_until(stop)).await.unwrap().unwrap();
    assert_eq!(summary.parked, 0, "{summary:?}");
    let distinct: i64 = sqlx::query_scalar("SELECT count(DISTINCT number) FROM done")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(distinct, MESSAGES);
    let all: i64 = sqlx::query_scalar("SELECT count(*) FROM done").fetch_one(&pool).await.unwrap();
    assert_eq!(all, MESSAGES);
}
