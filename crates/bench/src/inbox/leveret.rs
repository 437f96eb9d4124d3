//! The job `consume`, done by Leveret.

use std::time::Duration;

use leveret::inbox::Remember;
use leveret::{BatchOptions, Client, Failure as Failed, Incoming, Json, State, Summary};
use leveret_sql::{Inbox, Tx};
use sqlx::{PgPool, Postgres};

use super::messages::copies;
use super::{Candidate, DEPOSIT, Job, PREFETCH, QUEUE, Run};
use crate::by_hand::uri;
use crate::countdown::Countdown;
use crate::meter::{Failure, Measured, Meter, expect};

/// How long a batch waits for more: only the last one does.
const WITHIN: Duration = Duration::from_millis(5);

pub(super) async fn consume(run: Run) -> Result<Measured, Failure> {
    let client = Client::connect(&*uri(run.setting.port)).await?;
    let pool = run.setting.pool().await?;
    let meter = Meter::start();
    let summary = handle_all(&client, pool, run).await?;
    client.close().await;
    let measured = meter.stop(run.messages);
    check(run, summary)?;
    Ok(measured)
}

async fn handle_all(client: &Client, pool: PgPool, run: Run) -> Result<Summary, leveret::Error> {
    let handled = Countdown::new(run.messages);
    let consumer = client.consumer(QUEUE).prefetch(PREFETCH).workers(run.setting.workers as usize);
    let consumer = consumer.exactly_once(inbox(pool, run.candidate)).state(handled.clone());
    match run.candidate {
        Candidate::IdsInBatches | Candidate::HighWaterInBatches => {
            let noted = handled.clone();
            let handler = move |batch| deposit_all(batch, noted.clone());
            consumer.handle_batches(batches(run), handler).run_until(handled.done()).await
        }
        _ => consumer.handle(deposit).run_until(handled.done()).await,
    }
}

pub(super) fn inbox(pool: PgPool, candidate: Candidate) -> Inbox<Postgres> {
    const DAY: Duration = Duration::from_secs(86_400);
    let by_mark = candidate.has_marks();
    Inbox::new(pool, if by_mark { Remember::high_water() } else { Remember::ids_for(DAY) })
}

pub(super) fn batches(run: Run) -> BatchOptions {
    let size = if run.job == Job::Consume { 100 } else { 1000 };
    BatchOptions { size, within: WITHIN }
}

/// Each message was handled once, and each copy was known.
pub(super) fn check(run: Run, summary: Summary) -> Result<(), Failure> {
    expect("were handled", run.messages, summary.handled)?;
    expect("were known", copies(run.messages), summary.duplicates)
}

type Deposit = (i64, i64);

async fn deposit(
    Json(deposit): Json<Deposit>,
    State(handled): State<Countdown>,
    mut tx: Tx<Postgres>,
) -> Result<(), Failed> {
    execute(deposit, &mut tx).await?;
    handled.add(1);
    Ok(())
}

/// One statement for each, as if they came one by one.
async fn deposit_all(batch: Vec<Incoming>, handled: Countdown) -> Result<(), Failed> {
    let mut tx = Tx::<Postgres>::of(&batch)?;
    for incoming in &batch {
        execute(serde_json::from_slice(incoming.body())?, &mut tx).await?;
    }
    handled.add(batch.len() as u64);
    Ok(())
}

async fn execute((account, cents): Deposit, tx: &mut Tx<Postgres>) -> sqlx::Result<()> {
    sqlx::query(DEPOSIT).bind(cents).bind(account).execute(&mut **tx).await.map(drop)
}
