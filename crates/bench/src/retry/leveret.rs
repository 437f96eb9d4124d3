//! The jobs, done by Leveret: a consumer with a retry policy, and a parking lot.

use std::sync::Arc;

use bytes::Bytes;
use leveret::{Client, Failure as Failed, RetryPolicy};

use super::delivery_counts::{DeliveryCounts, Verdict};
use super::{Job, PARKED, PREFETCH, QUEUE, Run, WAIT};
use crate::by_hand::uri;
use crate::meter::{Failure, Measured, Meter, expect};

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    let client = Client::connect(uri(run.setting.port)).await?;
    let meter = Meter::start();
    match run.job {
        Job::FailOnce | Job::Park => consume(&client, run).await?,
        Job::Replay => {
            let replayed = client.parking_lot(PARKED).replay().run().await?;
            expect("were replayed", run.messages, replayed.done)?;
        }
    }
    client.close().await;
    Ok(meter.stop(run.messages))
}

async fn consume(client: &Client, run: Run) -> Result<(), Failure> {
    let counts = Arc::new(DeliveryCounts::new(run.job, run.messages));
    let shared = Arc::clone(&counts);
    let handler = move |body: Bytes| {
        let verdict = shared.handle(&body);
        async move {
            match verdict {
                Verdict::Success => Ok(()),
                Verdict::FailsNow => Err(Failed::retry("the bank does not answer").kind("offline")),
                Verdict::FailsForGood => Err(Failed::permanent("no such customer").kind("data")),
            }
        }
    };
    let policy = RetryPolicy::fixed(WAIT).max_retries(5);
    let consumer =
        client.consumer(QUEUE).workers(run.setting.load.workers as usize).prefetch(PREFETCH);
    let runner = consumer.retry(policy).handle(handler);
    let summary = runner.run_until(counts.all_done()).await?;
    let (retried, parked) =
        if run.job == Job::FailOnce { (run.messages, 0) } else { (0, run.messages) };
    expect("were sent to wait", retried, summary.retried)?;
    expect("were parked", parked, summary.parked)?;
    expect("were handled", retried, summary.handled)?;
    counts.expect_each(if run.job == Job::FailOnce { 2 } else { 1 })
}
