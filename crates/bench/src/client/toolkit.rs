//! The jobs, done by Leveret's client on top of its engine: a publisher that holds and replays, a consumer with a
//! handler.

use bytes::Bytes;
use leveret::{Client, Publisher};

use super::channels::{Tally, measure, one_by_one, pipelined};
use super::jobs::{CONFIRM_WINDOW, Job, NOWHERE, PREFETCH, Run};
use crate::by_hand::uri;
use crate::countdown::Countdown;
use crate::meter::{Failure, Measured, Meter, all, expect};

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    let client = Client::connect(uri(run.setting.port)).await?;
    let measured = match run.job {
        Job::Publish => publish_all(&client, run).await?,
        Job::Latency => measure(run, publishers(&client, run).await?, latency).await?,
        Job::Confirm | Job::Mandatory => {
            measure(run, publishers(&client, run).await?, confirm).await?
        }
        Job::Consume | Job::AutoAck | Job::Returns => {
            measure(run, vec![client.clone(); run.setting.channels as usize], consume).await?
        }
    };
    client.close().await;
    Ok(measured)
}

/// Nothing but the end of the client tells that all is written.
async fn publish_all(client: &Client, run: Run) -> Result<Measured, Failure> {
    let mut publishers = Vec::new();
    for _ in 0..run.setting.channels {
        publishers.push(client.publisher(NOWHERE).build_unconfirmed().await?);
    }
    let meter = Meter::start();
    let publish = |publisher: leveret::UnconfirmedPublisher| async move {
        let body = run.body();
        for _ in 0..run.share() {
            publisher.publish("key", body.clone()).await?;
        }
        Ok(())
    };
    all(publishers.into_iter().map(publish)).await?;
    client.close().await;
    Ok(meter.stop(run.messages))
}

async fn publishers(client: &Client, run: Run) -> Result<Vec<Publisher>, Failure> {
    let mut publishers = Vec::new();
    for _ in 0..run.setting.channels {
        let builder = client.publisher("").window(CONFIRM_WINDOW + 1);
        let builder = if run.job == Job::Mandatory { builder } else { builder.allow_unroutable() };
        publishers.push(builder.build().await?);
    }
    Ok(publishers)
}

async fn confirm(publisher: Publisher, index: u64, run: Run) -> Result<Tally, Failure> {
    let (queue, body) = (run.queue(index), run.body());
    let send = |_| publisher.send(&queue, body.clone());
    let is_confirmed = |_, outcome: Result<_, leveret::Error>| Ok(outcome.map(|_| true)?);
    let confirmed = pipelined(run.share(), CONFIRM_WINDOW, send, is_confirmed).await?;
    expect("were confirmed", run.share(), confirmed)?;
    Ok(Tally::default())
}

async fn latency(publisher: Publisher, index: u64, run: Run) -> Result<Tally, Failure> {
    let (queue, body) = (run.queue(index), run.body());
    let publish = |_| async {
        publisher.publish(&queue, body.clone()).await?;
        Ok(true)
    };
    one_by_one(run, publish).await
}

async fn consume(client: Client, index: u64, run: Run) -> Result<Tally, Failure> {
    let handled = Countdown::new(run.share());
    let count = handled.clone();
    let handler = move |body: Bytes| {
        let count = count.clone();
        async move {
            if body.len() != run.setting.size {
                return Err("a body of another size");
            }
            count.add(1);
            Ok(())
        }
    };
    let consumer = client.consumer(run.queue(index)).prefetch(PREFETCH);
    let consumer = if run.job == Job::AutoAck { consumer.auto_ack() } else { consumer };
    let summary = consumer.handle(handler).run_until(handled.done()).await?;
    expect("were handled", run.share(), summary.handled)?;
    Ok(Tally::default())
}
