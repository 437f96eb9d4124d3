//! The job, done by hand with sqlx and lapin: rows are locked, published with confirms and deleted, in one transaction.

use lapin::{BasicProperties, Channel, Confirmation};
use sqlx::{PgPool, Row as _};

use super::Run;
use crate::by_hand::{self, MANDATORY};
use crate::meter::{Failure, Measured, Meter, expect};

const TAKE: &str = "SELECT id, routing_key, message_id, body FROM by_hand ORDER BY id LIMIT $1 \
                    FOR UPDATE SKIP LOCKED";
const DELETE: &str = "DELETE FROM by_hand WHERE id = ANY($1)";

/// So many rows at a time.
pub(crate) async fn run(run: Run, at_once: i64) -> Result<Measured, Failure> {
    let connection = by_hand::connect(run.setting.port).await?;
    let channel = by_hand::confirm_channel(&connection).await?;
    let pool = run.setting.postgres().await?;
    let meter = Meter::start();
    let mut sent = 0;
    while sent < run.messages {
        let more = relay(&pool, &channel, at_once).await?;
        if more == 0 {
            break;
        }
        sent += more;
    }
    let measured = meter.stop(run.messages);
    expect("were sent", run.messages, sent)?;
    Ok(measured)
}

async fn relay(pool: &PgPool, channel: &Channel, at_once: i64) -> Result<u64, Failure> {
    let mut transaction = pool.begin().await?;
    let rows = sqlx::query(TAKE).bind(at_once).fetch_all(&mut *transaction).await?;
    let mut confirms = Vec::with_capacity(rows.len());
    let mut ids: Vec<i64> = Vec::with_capacity(rows.len());
    for row in &rows {
        let (key, message_id): (&str, &str) =
            (row.try_get("routing_key")?, row.try_get("message_id")?);
        let properties =
            BasicProperties::default().with_delivery_mode(2).with_message_id(message_id.into());
        let body: &[u8] = row.try_get("body")?;
        let publish = channel.basic_publish("".into(), key.into(), MANDATORY, body, properties);
        confirms.push(publish.await?);
        ids.push(row.try_get("id")?);
    }
    for confirm in confirms {
        if !matches!(confirm.await?, Confirmation::Ack(None)) {
            return Err("a message was not confirmed".into());
        }
    }
    sqlx::query(DELETE).bind(&ids).execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(ids.len() as u64)
}
