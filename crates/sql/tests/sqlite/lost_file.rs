//! A database whose file somebody has taken away.

use std::time::Duration;

use leveret::inbox::Remember;
use leveret::{Client, Message, Queue, Topology};
use leveret_broker::Broker;
use leveret_sql::{Inbox, Schema, Tx};
use leveret_testkit::{ScratchFolder, eventually};
use sqlx::{Sqlite, SqlitePool};
use tokio::time::timeout;

use crate::inbox::{DAY, SOON};

/// Much less than the half minute for which a message is held whose inbox cannot be asked.
const LATEST: Duration = Duration::from_secs(15);

#[tokio::test]
async fn a_consumer_whose_file_was_deleted_or_truncated_stops_within_its_drain() {
    for is_deleted in [true, false] {
        let folder = ScratchFolder::new();
        let path = folder.path().join("test.db");
        let url = format!("sqlite://{}?mode=rwc", path.display());
        let pool = SqlitePool::connect(&url).await.unwrap();
        Schema::default().migrate(&pool).await.unwrap();
        let broker = Broker::builder().start().unwrap();
        let client = Client::builder().broker(&broker).connect().await.unwrap();
        client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
        match is_deleted {
            true => std::fs::remove_file(&path).unwrap(),
            false => std::fs::write(&path, "").unwrap(),
        }
        let publisher = client.publisher("").build().await.unwrap();
        for id in ["1", "2", "3"] {
            publisher.publish("q", Message::new("").message_id(id)).await.unwrap();
        }
        let inbox = Inbox::new(pool.clone(), Remember::ids_for(DAY));
        let consumer = client.consumer("q").workers(3).drain(Duration::from_secs(1));
        let runner = consumer.exactly_once(inbox).handle(async |_: Tx<Sqlite>| {});
        let all_wait = eventually(SOON, "all to wait for the inbox", async || {
            let snapshot = broker.snapshot();
            let queue = snapshot.virtual_host("/").and_then(|host| host.queue("q"));
            queue.is_some_and(|queue| queue.unsettled == 3)
        });
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(runner.run_until(stopped));
        all_wait.await;
        drop(stop);
        let ended = timeout(LATEST, async {
            let summary = running.await.unwrap().unwrap();
            client.close().await;
            pool.close().await;
            summary
        });
        let summary = ended.await.expect("the consumer stops in time");
        assert_eq!((summary.handled, summary.abandoned), (0, 3), "{summary:?}");
    }
}
