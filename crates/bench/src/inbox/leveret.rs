//! The job `consume`, done by Leveret.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leveret::inbox::Remember;
use leveret::{BatchOptions, Client, Failure as Failed, Incoming, Json, State, Summary};
use leveret_sql::{Inbox, Tx};
use sqlx::{PgPool, Postgres};
use tokio::sync::Notify;

use super::jobs::{Candidate, DEPOSIT, PREFETCH, QUEUE, Run};
use super::messages::copies;
use crate::client::{Failure, Measured, Meter, expect};

/// How long a batch waits for more: only the last one does.
const WITHIN: Duration = Duration::from_millis(5);

pub(super) async fn consume(run: Run) -> Result<Measured, Failure> {
    let client = Client::connect(&*run.broker_url()).await?;
    let pool = run.pool().await?;
    let meter = Meter::start();
    let summary = handle_all(&client, pool, run).await?;
    client.close().await;
    let measured = meter.stop(run.messages);
    check(run, summary)?;
    Ok(measured)
}

async fn handle_all(client: &Client, pool: PgPool, run: Run) -> Result<Summary, leveret::Error> {
    let tally = Tally::new(run.messages);
    let consumer = client.consumer(QUEUE).prefetch(PREFETCH).workers(run.workers as usize);
    let consumer = consumer.exactly_once(inbox(pool, run.candidate)).state(tally.clone());
    match run.candidate {
        Candidate::IdsInBatches | Candidate::HighWaterInBatches => {
            let noted = tally.clone();
            let handler = move |batch| deposit_all(batch, noted.clone());
            consumer.handle_batches(batches(run), handler).run_until(tally.is_full()).await
        }
        _ => consumer.handle(deposit).run_until(tally.is_full()).await,
    }
}

pub(super) fn inbox(pool: PgPool, candidate: Candidate) -> Inbox<Postgres> {
    const DAY: Duration = Duration::from_secs(86_400);
    let by_mark = candidate.has_marks();
    Inbox::new(pool, if by_mark { Remember::high_water() } else { Remember::ids_for(DAY) })
}

pub(super) fn batches(run: Run) -> BatchOptions {
    BatchOptions { size: run.job.batch(), within: WITHIN }
}

/// Each message was handled once, and each copy was known.
pub(super) fn check(run: Run, summary: Summary) -> Result<(), Failure> {
    expect("were handled", run.messages, summary.handled)?;
    expect("were known", copies(run.messages), summary.duplicates)
}

type Deposit = (i64, i64);

async fn deposit(
    Json(deposit): Json<Deposit>,
    State(tally): State<Tally>,
    mut tx: Tx<Postgres>,
) -> Result<(), Failed> {
    execute(deposit, &mut tx).await?;
    tally.add(1);
    Ok(())
}

/// One statement for each, as if they came one by one.
async fn deposit_all(batch: Vec<Incoming>, tally: Tally) -> Result<(), Failed> {
    let mut tx = Tx::<Postgres>::of(&batch)?;
    for incoming in &batch {
        execute(serde_json::from_slice(incoming.body())?, &mut tx).await?;
    }
    tally.add(batch.len());
    Ok(())
}

async fn execute((account, cents): Deposit, tx: &mut Tx<Postgres>) -> sqlx::Result<()> {
    sqlx::query(DEPOSIT).bind(cents).bind(account).execute(&mut **tx).await.map(drop)
}

/// Counts messages up to a number.
#[derive(Clone)]
pub(super) struct Tally(Arc<Counted>);

struct Counted {
    missing: AtomicU64,
    full: Notify,
}

impl Tally {
    pub(super) fn new(messages: u64) -> Tally {
        Tally(Arc::new(Counted { missing: AtomicU64::new(messages), full: Notify::new() }))
    }

    pub(super) fn add(&self, messages: usize) {
        let messages = messages as u64;
        if self.0.missing.fetch_sub(messages, Ordering::Relaxed) == messages {
            self.0.full.notify_one();
        }
    }

    pub(super) async fn is_full(&self) {
        self.0.full.notified().await;
    }
}
