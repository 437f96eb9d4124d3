//! Relays that are killed, on servers that are restarted.

use std::time::Duration;

use leveret_testkit::postgres::Postgres;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use sqlx::postgres::PgPoolOptions;

use crate::support::kills::{self, Scene};

#[tokio::test]
#[ignore = "a relay, for the other test to kill"]
async fn relay() {
    kills::be_a_relay().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_when_relays_are_killed_and_servers_restarted() {
    let (mut postgres, mut node) =
        tokio::join!(Postgres::start(), RabbitNode::start(Version::under_test()));
    let options = PgPoolOptions::new().acquire_timeout(Duration::from_secs(5));
    let scene = Scene {
        pool: options.connect(&postgres.url()).await.unwrap(),
        database_url: postgres.url(),
        broker_url: node.url(),
        relay_test: "postgres_server::kills::relay",
    };
    let database = async || {
        postgres.kill().await;
        postgres.start_again().await;
    };
    let broker = async || node.restart().await;
    kills::nothing_is_lost(scene, database, broker).await;
}
