//! Chandra's client library: a topology with its dead-letter exchange, retry queue and parking lot; a batch that is published
//! with confirms; batches that are consumed and acked as one.
//!
//! ```text
//! cargo run -p leveret-profiles --example chandra                                  # with a broker in memory
//! cargo run -p leveret-profiles --example chandra -- amqp://guest:guest@localhost  # with yours
//! ```

use std::time::Duration;

use leveret::prelude::*;
use leveret::{BatchOptions, BatchOutcome, Filter, Incoming};
use leveret_profiles::Chandra;

/// Bills a batch of orders. One of them is without a price, and fails alone.
async fn bill(orders: Vec<Incoming>) -> BatchOutcome {
    println!("a batch of {}", orders.len());
    let bill_one = |order: &Incoming| match order.body().ends_with(b" free") {
        true => Err(Failure::retry("there is no price").kind("price").into()),
        false => Ok(()),
    };
    BatchOutcome::Each(orders.iter().map(bill_one).collect())
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let client = match std::env::args().nth(1) {
        Some(url) => Client::connect(url).await?,
        None => Client::embedded().await?,
    };
    // billing.dlx, billing.retry and billing.parking_lot stand beside the queue.
    let retry = Chandra::new(Exchange::topic("example-orders"))
        .interval(Duration::from_millis(200))
        .max_retries(2);
    let billing = Queue::quorum("example-billing").bind("example-orders", "order.*");
    client.apply(&retry.topology(billing)?).await?;

    // On one channel; the error would name each message that was not confirmed.
    let publisher = client.publisher("example-orders").build().await?;
    let orders = (1..=100).map(|order| match order {
        42 => ("order.new", "order 42 free".to_owned()),
        order => ("order.new", format!("order {order} for 5")),
    });
    publisher.publish_batch(orders).await?;

    let lot = client.parking_lot("example-billing.parking_lot");
    let until_parked = async {
        while lot.depth().await.is_ok_and(|depth| depth == 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let options = BatchOptions { size: 30, within: Duration::from_millis(100) };
    let consumer = client.consumer("example-billing").retry(retry);
    let summary = consumer.handle_batches(options, bill).run_until(until_parked).await?;
    println!("{} billed, {} failed for good", summary.handled, summary.parked);
    for order in lot.list(&Filter::new(), 10).await? {
        println!(
            "{}: {}",
            String::from_utf8_lossy(order.body()),
            order.story().error.as_deref().unwrap_or("?")
        );
    }

    for queue in client.topology().queues() {
        client.delete_queue(queue.name(), Default::default()).await?;
    }
    for exchange in client.topology().exchanges() {
        client.delete_exchange(exchange.name(), Default::default()).await?;
    }
    client.close().await;
    match (summary.handled, summary.parked) {
        (99, 1) => Ok(()),
        other => Err(format!("expected 99 billed and 1 parked, not {other:?}").into()),
    }
}
