//! Orb's publisher and subscriber: pools of subscribers, and one redelivery queue for all: at once, then after waits that grow.
//!
//! ```text
//! cargo run -p leveret-profiles --example orb                                  # with a broker in memory
//! cargo run -p leveret-profiles --example orb -- amqp://guest:guest@localhost  # with yours
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leveret::prelude::*;
use leveret_profiles::Orb;

const ANCHORS: u32 = 50;

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let client = match std::env::args().nth(1) {
        Some(url) => Client::connect(url).await?,
        None => Client::embedded().await?,
    };
    let orb = Orb::new()
        .name("example-orb")
        .initial_interval(Duration::from_millis(100))
        .multiplier(1.5)
        .max_interval(Duration::from_secs(1))
        .max_attempts(5);
    client.apply(&orb.topology(Queue::quorum("example-orb.anchors"))?).await?;

    // Once at least in each deployment, in any process.
    let redelivery = tokio::spawn(orb.redelivery(&client).run());

    // Orb's mq-op-pool: five subscribers, each with a channel of its own.
    let witnessed = Arc::new(AtomicU32::new(0));
    let (done, mut until_done) = tokio::sync::mpsc::channel::<()>(1);
    let consumer = client.consumer("example-orb.anchors").retry(orb).subscribers(5);
    let count = Arc::clone(&witnessed);
    let handler = move |anchor: String, Attempt(attempt): Attempt| {
        let (count, done) = (Arc::clone(&count), done.clone());
        async move {
            // Every tenth witness is away, two times.
            if anchor.ends_with('0') && attempt <= 2 {
                return Err(Failure::retry("the witness does not answer").kind("witness"));
            }
            if count.fetch_add(1, Ordering::Relaxed) + 1 == ANCHORS {
                let _ = done.send(()).await;
            }
            Ok(())
        }
    };

    let publisher = client.publisher("example-orb").build().await?;
    for anchor in 0..ANCHORS {
        publisher.publish("example-orb.anchors", format!("anchor {anchor}")).await?;
    }
    let summary = consumer.handle(handler).run_until(async { until_done.recv().await }).await?;
    println!("{} anchors witnessed, {} tries had failed", summary.handled, summary.failed);

    redelivery.abort();
    for queue in client.topology().queues() {
        client.delete_queue(queue.name(), Default::default()).await?;
    }
    for exchange in client.topology().exchanges() {
        client.delete_exchange(exchange.name(), Default::default()).await?;
    }
    client.close().await;
    match (summary.handled, summary.failed) {
        (50, 10) => Ok(()),
        other => Err(format!("expected 50 witnessed after 10 failures, not {other:?}").into()),
    }
}
