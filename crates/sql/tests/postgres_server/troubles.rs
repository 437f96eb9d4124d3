//! A database that goes away, and comes back.

use std::time::Duration;

use leveret_sql::{Outgoing, RelayMonitor};
use leveret_testkit::eventually;
use leveret_testkit::postgres::Postgres;
use sqlx::postgres::PgPoolOptions;

use crate::support::outbox::Stage;

const DEADLINE: Duration = Duration::from_secs(60);

/// It would look for messages in an hour; so what finds them is that it listens again.
#[tokio::test]
async fn a_relay_goes_on_when_its_database_is_back() {
    let mut postgres = Postgres::start().await;
    let options = PgPoolOptions::new().acquire_timeout(Duration::from_secs(1));
    let stage = Stage::new(options.connect(&postgres.url()).await.unwrap()).await;
    let relay = stage.relay().poll_every(Duration::from_secs(3600));
    let relay = relay.patience(Duration::from_secs(1)).build().await.unwrap();
    let monitor = relay.monitor();
    let story = async {
        is_told(&stage, &monitor, "before").await;

        postgres.stop().await;
        eventually(DEADLINE, "the relay to stop listening", || {
            std::future::ready(!monitor.health().is_listening)
        })
        .await;
        postgres.start_again().await;
        is_told(&stage, &monitor, "after").await;

        postgres.kill().await;
        postgres.start_again().await;
        is_told(&stage, &monitor, "at last").await;
    };
    assert_eq!(relay.run_until(story).await.unwrap().sent, 3);
}

/// A message that is written once the relay listens is sent; and that is noted, or it would be sent again.
async fn is_told(stage: &Stage, monitor: &RelayMonitor, text: &str) {
    let listens = || std::future::ready(monitor.health().is_listening);
    eventually(DEADLINE, "the relay to listen", listens).await;
    eventually(DEADLINE, "the database to take a message", async || {
        let mut transaction = stage.pool.begin().await?;
        let outgoing = Outgoing::new("", "q", text.to_owned());
        let written = stage.outbox.write(&mut *transaction, outgoing).await;
        written.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
        transaction.commit().await
    })
    .await;
    assert_eq!(stage.texts("q", 1).await, [text]);
    eventually(DEADLINE, "the row to be gone", async || stage.backlog().await == (0, 0)).await;
}

/// It does not answer, which is worse than being gone.
#[tokio::test]
async fn a_database_that_does_not_answer_is_given_up_in_time() {
    let postgres = Postgres::start().await;
    let options = PgPoolOptions::new().acquire_timeout(Duration::from_secs(1));
    let stage = Stage::new(options.connect(&postgres.url()).await.unwrap()).await;
    let relay = stage.relay().poll_every(Duration::from_millis(20));
    let relay = relay.patience(Duration::from_secs(1)).build().await.unwrap();
    let monitor = relay.monitor();
    let story = async {
        eventually(DEADLINE, "a healthy relay", || {
            std::future::ready(monitor.health().is_healthy())
        })
        .await;
        postgres.suspend().await;
        eventually(DEADLINE, "the relay to notice", || {
            std::future::ready(monitor.health().database.is_some())
        })
        .await;
        postgres.resume();
        stage.write([Outgoing::new("", "q", "hello")]).await;
        assert_eq!(stage.texts("q", 1).await, ["hello"]);
        eventually(DEADLINE, "a healthy relay again", || {
            std::future::ready(monitor.health().is_healthy())
        })
        .await;
    };
    relay.run_until(story).await.unwrap();
}
