//! The inbox, the same on either database.

#![allow(dead_code, unreachable_pub)]

mod batches;
mod counting;
mod crashes;
pub mod handling;
pub mod remembering;

use std::time::Duration;

use leveret::inbox::Remember;
use leveret::{Client, Failure, Filter, Json, Message, Publisher, Queue, Topology};
use leveret_broker::Broker;
use leveret_sql::{Inbox, Tx};
use leveret_testkit::eventually;
use serde::{Deserialize, Serialize};
use sqlx::Pool;

use crate::database::{Database, Db, Lang, schema};

/// How long anything may take before it counts as hanging.
pub const SOON: Duration = Duration::from_secs(60);
pub const DAY: Duration = Duration::from_secs(86_400);

/// A database with our tables and one of the application's, a broker, and a client with the queue `q`.
pub struct Scene {
    pub broker: Broker,
    pub client: Client,
    pub publisher: Publisher,
    pub pool: Pool<Db>,
    pub database: Database,
}

impl Scene {
    pub async fn new() -> Self {
        let database = Database::new().await;
        let pool = database.pool().await;
        schema().migrate(&pool).await.unwrap();
        let sql = "CREATE TABLE effects (name TEXT NOT NULL, amount BIGINT NOT NULL)";
        sqlx::query(sql).execute(&pool).await.unwrap();
        let broker = Broker::builder().start().unwrap();
        let client = Client::builder().broker(&broker).connect().await.unwrap();
        client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
        let publisher = client.publisher("").build().await.unwrap();
        Scene { broker, client, publisher, pool, database }
    }

    pub fn inbox(&self, remember: Remember) -> Inbox<Db, Lang> {
        Inbox::in_schema(self.pool.clone(), remember, &schema())
    }

    /// Of one connection, to the same database.
    pub async fn small_pool(&self) -> Pool<Db> {
        let options = self.pool.options().clone().max_connections(1);
        options.connect_with((*self.pool.connect_options()).clone()).await.unwrap()
    }

    pub fn by_id(&self) -> Inbox<Db, Lang> {
        self.inbox(Remember::ids_for(DAY))
    }

    pub async fn publish(&self, id: &str, effect: &Effect) {
        let message = Message::new(serde_json::to_vec(effect).unwrap()).message_id(id);
        self.publisher.publish("q", message).await.unwrap();
    }

    /// How often something was done.
    pub async fn effects(&self, name: &str) -> i64 {
        let sql = "SELECT COUNT(*) FROM effects WHERE name = $1";
        sqlx::query_scalar(sql).bind(name).fetch_one(&self.pool).await.unwrap()
    }

    pub async fn count(&self, table: &str) -> i64 {
        let sql = sqlx::AssertSqlSafe(format!("SELECT COUNT(*) FROM {table}"));
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// One of our tables.
    pub fn table(&self, name: &str) -> String {
        crate::database::table(name)
    }

    /// How many messages are remembered one by one.
    pub async fn records(&self) -> i64 {
        self.count(&self.table("inbox")).await + self.count(&self.table("inbox_replies")).await
    }

    pub async fn marks(&self) -> i64 {
        self.count(&self.table("inbox_marks")).await
    }

    pub async fn until_effects(&self, name: &str, count: i64) {
        eventually(SOON, format!("{count} times {name}"), async || {
            let found = self.effects(name).await;
            if found == count { Ok(()) } else { Err(found.to_string()) }
        })
        .await;
    }

    /// Until nothing is left in the queue, or on the way from it.
    pub async fn until_empty(&self, queue: &str) {
        eventually(SOON, format!("an empty {queue}"), async || {
            let snapshot = self.broker.snapshot();
            let found = snapshot.virtual_host("/").and_then(|host| host.queue(queue));
            found.is_some_and(|queue| queue.ready + queue.unsettled == 0)
        })
        .await;
    }

    pub async fn until_depth(&self, queue: &str, messages: usize) {
        eventually(SOON, format!("{messages} in {queue}"), async || {
            let snapshot = self.broker.snapshot();
            let found = snapshot.virtual_host("/").and_then(|host| host.queue(queue));
            found.is_some_and(|queue| queue.ready == messages)
        })
        .await;
    }

    /// The kinds and texts of what is parked.
    pub async fn parked(&self) -> Vec<(String, String)> {
        let lot = self.client.parking_lot("q.parked");
        let all = lot.list(&Filter::new(), 1000).await.unwrap();
        let story = |text: &Option<String>| text.clone().unwrap_or_default();
        all.iter().map(|one| (story(&one.story().kind), story(&one.story().error))).collect()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Effect {
    pub name: String,
    pub amount: i64,
}

pub fn effect(name: &str) -> Effect {
    Effect { name: name.to_owned(), amount: 1 }
}

/// Does it, with the transaction it was given.
pub async fn apply(effect: &Effect, tx: &mut Tx<Db>) -> Result<(), Failure> {
    sqlx::query("INSERT INTO effects (name, amount) VALUES ($1, $2)")
        .bind(&effect.name)
        .bind(effect.amount)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

/// A handler.
pub async fn handle(Json(effect): Json<Effect>, mut tx: Tx<Db>) -> Result<(), Failure> {
    apply(&effect, &mut tx).await
}
