//! The jobs, done by hand: ids are inserted into a table, in the transaction of the work.

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::BasicAckOptions;
use leveret::Incoming;
use sqlx::PgPool;

use super::messages::copies;
use super::{DEPOSIT, PREFETCH, QUEUE, Run};
use crate::by_hand;
use crate::meter::{Failure, Measured, Meter, expect};

const ADD: &str = "INSERT INTO by_hand (id) VALUES ($1) ON CONFLICT DO NOTHING";
const ADD_ALL: &str = "INSERT INTO by_hand (id) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING";

/// A transaction for each message.
pub(super) async fn consume(run: Run) -> Result<Measured, Failure> {
    let connection = by_hand::connect(run.setting.port).await?;
    let channel = connection.create_channel().await?;
    let pool = run.setting.pool().await?;
    let meter = Meter::start();
    let consumer = by_hand::consume(&channel, QUEUE, Some(PREFETCH)).await?;
    let deliveries = consumer.take((run.messages + copies(run.messages)) as usize);
    let start = |delivery| tokio::spawn(handle(pool.clone(), delivery));
    let mut handling = deliveries.map(start).buffer_unordered(run.setting.workers as usize);
    let mut new = 0;
    while let Some(handled) = handling.next().await {
        new += u64::from(handled??);
    }
    by_hand::close(&connection).await;
    let measured = meter.stop(run.messages);
    expect("were handled", run.messages, new)?;
    Ok(measured)
}

/// Handles a message, if it is new, and says whether it was.
async fn handle(pool: PgPool, delivery: lapin::Result<Delivery>) -> Result<bool, Failure> {
    let delivery = delivery?;
    let id = delivery.properties.message_id().as_ref().ok_or("a message has no id")?;
    let (account, cents): (i64, i64) = serde_json::from_slice(&delivery.data)?;
    let mut transaction = pool.begin().await?;
    let added = sqlx::query(ADD).bind(id.as_str()).execute(&mut *transaction).await?;
    let is_new = added.rows_affected() == 1;
    if is_new {
        sqlx::query(DEPOSIT).bind(cents).bind(account).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    delivery.ack(BasicAckOptions::default()).await?;
    Ok(is_new)
}

/// All ids with one statement, which is a transaction.
pub(super) async fn remember(pool: &PgPool, batch: &[Incoming]) -> sqlx::Result<()> {
    let id = |incoming: &Incoming| incoming.properties().message_id.map(|id| id.to_string());
    let ids: Vec<String> = batch.iter().filter_map(id).collect();
    sqlx::query(ADD_ALL).bind(ids).execute(pool).await.map(drop)
}
