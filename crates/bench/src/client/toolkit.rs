//! The jobs, done by Leveret's client on top of its engine: a publisher that holds and replays, a consumer with a
//! handler.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use leveret::{Client, Publisher, Ticket, UnconfirmedPublisher};
use tokio::sync::Notify;

use super::jobs::{CONFIRM_WINDOW, Job, NOWHERE, PREFETCH, Run};
use super::meter::{Failure, Latency, Measured, Meter, all, expect};

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    let client = Client::connect(format!("amqp://127.0.0.1:{}", run.port)).await?;
    let measured = match run.job {
        Job::Publish => {
            let mut publishers = Vec::new();
            for _ in 0..run.channels {
                publishers.push(client.publisher(NOWHERE).build_unconfirmed().await?);
            }
            let meter = Meter::start();
            all(publishers.into_iter().map(|publisher| publish(publisher, run))).await?;
            client.close().await;
            meter.stop(run.messages)
        }
        Job::Latency => {
            let publishers = publishers(&client, run).await?;
            let meter = Meter::start();
            let one_by_one = publishers.into_iter().map(|publisher| one_by_one(publisher, run));
            let latency = Latency::of(all(one_by_one).await?.concat());
            Measured { latency, ..meter.stop(run.messages) }
        }
        Job::Confirm | Job::Mandatory => {
            let publishers = publishers(&client, run).await?;
            let meter = Meter::start();
            all((0..).zip(publishers).map(|(place, publisher)| confirm(publisher, place, run)))
                .await?;
            meter.stop(run.messages)
        }
        Job::Consume | Job::AutoAck | Job::Returns => {
            let meter = Meter::start();
            all((0..run.channels).map(|place| consume(client.clone(), place, run))).await?;
            meter.stop(run.messages)
        }
    };
    client.close().await;
    Ok(measured)
}

async fn publishers(client: &Client, run: Run) -> Result<Vec<Publisher>, Failure> {
    let mut publishers = Vec::new();
    for _ in 0..run.channels {
        let builder = client.publisher("").window(CONFIRM_WINDOW + 1);
        let builder = if run.job == Job::Mandatory { builder } else { builder.allow_unroutable() };
        publishers.push(builder.build().await?);
    }
    Ok(publishers)
}

fn body(run: Run) -> Bytes {
    Bytes::from(vec![b'x'; run.size])
}

async fn publish(publisher: UnconfirmedPublisher, run: Run) -> Result<(), Failure> {
    let body = body(run);
    for _ in 0..run.share() {
        publisher.publish("key", body.clone()).await?;
    }
    Ok(())
}

async fn confirm(publisher: Publisher, place: u64, run: Run) -> Result<(), Failure> {
    let (queue, body) = (run.queue(place), body(run));
    let mut tickets = VecDeque::<Ticket>::with_capacity(CONFIRM_WINDOW);
    let mut confirmed = 0;
    for _ in 0..run.share() {
        if tickets.len() == CONFIRM_WINDOW
            && let Some(oldest) = tickets.pop_front()
        {
            oldest.await?;
            confirmed += 1;
        }
        tickets.push_back(publisher.send(&queue, body.clone()).await?);
    }
    for ticket in tickets {
        ticket.await?;
        confirmed += 1;
    }
    expect("were confirmed", run.share(), confirmed)
}

async fn one_by_one(publisher: Publisher, run: Run) -> Result<Vec<std::time::Duration>, Failure> {
    let (queue, body) = (run.queue(0), body(run));
    let mut samples = Vec::with_capacity(run.messages as usize);
    for _ in 0..run.messages {
        let start = Instant::now();
        publisher.publish(&queue, body.clone()).await?;
        samples.push(start.elapsed());
    }
    Ok(samples)
}

async fn consume(client: Client, place: u64, run: Run) -> Result<(), Failure> {
    let done = Arc::new((AtomicU64::new(0), Notify::new()));
    let count = Arc::clone(&done);
    let handler = move |body: Bytes| {
        let count = Arc::clone(&count);
        async move {
            if body.len() != run.size {
                return Err("a body of another size");
            }
            if count.0.fetch_add(1, Ordering::Relaxed) + 1 == run.share() {
                count.1.notify_one();
            }
            Ok(())
        }
    };
    let consumer = client.consumer(run.queue(place)).prefetch(PREFETCH);
    let consumer = if run.job == Job::AutoAck { consumer.auto_ack() } else { consumer };
    let summary = consumer.handle(handler).run_until(done.1.notified()).await?;
    expect("were handled", run.share(), summary.handled)
}
