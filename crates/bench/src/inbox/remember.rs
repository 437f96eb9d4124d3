//! The job `remember`: messages come over a broker in the same process, are remembered in batches, and nothing else is done with
//! them.

use std::time::Duration;

use leveret::{Client, Incoming, Queue, Summary, Topology};
use leveret_broker::Broker;
use sqlx::PgPool;
use tokio::time::sleep;

use super::leveret::{batches, check, inbox};
use super::messages::{Messages, copies};
use super::{Candidate, PREFETCH, QUEUE, Run, by_hand};
use crate::countdown::Countdown;
use crate::meter::{Failure, Measured, Meter, expect};

/// How many messages may wait in the queue.
const AHEAD: u32 = 20_000;

pub(super) async fn run(run: Run) -> Result<Measured, Failure> {
    let broker = Broker::builder().start()?;
    let client = Client::builder().broker(&broker).connect().await?;
    client.apply(&Topology::new().queue(Queue::classic(QUEUE))).await?;
    let messages = Messages::new(&client, run.messages).await?;
    let pool = run.setting.pool().await?;
    let meter = Meter::start();
    let consume = async {
        match run.candidate {
            Candidate::ByHand => remember_by_hand(&client, &pool, run).await,
            _ => check(run, remember(&client, pool, run).await?),
        }
    };
    tokio::try_join!(consume, publish(messages, &client))?;
    client.close().await;
    Ok(meter.stop(run.messages))
}

/// Publishes all messages, as fast as they are taken.
async fn publish(mut messages: Messages, client: &Client) -> Result<(), Failure> {
    while messages.publish_some().await? {
        while client.inspect_queue(QUEUE).await?.messages > AHEAD {
            sleep(Duration::from_millis(1)).await;
        }
    }
    Ok(())
}

async fn remember(client: &Client, pool: PgPool, run: Run) -> Result<Summary, leveret::Error> {
    let handled = Countdown::new(run.messages);
    let noted = handled.clone();
    let handler = move |batch: Vec<Incoming>| {
        noted.add(batch.len() as u64);
        async {}
    };
    let consumer = client.consumer(QUEUE).prefetch(PREFETCH);
    let consumer = consumer.exactly_once(inbox(pool, run.candidate));
    consumer.handle_batches(batches(run), handler).run_until(handled.done()).await
}

async fn remember_by_hand(client: &Client, pool: &PgPool, run: Run) -> Result<(), Failure> {
    let all = run.messages + copies(run.messages);
    let handled = Countdown::new(all);
    let (noted, pool) = (handled.clone(), pool.clone());
    let handler = move |batch: Vec<Incoming>| {
        let (noted, pool) = (noted.clone(), pool.clone());
        async move {
            by_hand::remember(&pool, &batch).await?;
            noted.add(batch.len() as u64);
            Ok::<_, Failure>(())
        }
    };
    let consumer = client.consumer(QUEUE).prefetch(PREFETCH);
    let runner = consumer.handle_batches(batches(run), handler);
    let summary = runner.run_until(handled.done()).await?;
    expect("were handled", all, summary.handled)
}
