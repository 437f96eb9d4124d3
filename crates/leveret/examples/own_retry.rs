//! A retry design of its own: failed messages of `QUEUE` wait in `QUEUE.pause` and end in `QUEUE.dead`, counted in a header.
//! `cargo run -p leveret --example own_retry`

use std::time::Duration;

use leveret::amqp::RawProperties;
use leveret::prelude::*;
use leveret::retry::{FailedMessage, RetryProfile, RetryStep, WorkQueue};
use tokio::sync::mpsc::{Sender, channel};

const TRIES: &str = "tries";
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug)]
struct PauseQueue(RetryPolicy);

impl RetryProfile for PauseQueue {
    fn policy(&self) -> &RetryPolicy {
        &self.0
    }

    fn topology(&self, work: &WorkQueue) -> Result<Topology, Error> {
        work.check(&self.0)?;
        let waiting = Queue::quorum(format!("{}.pause", work.name()))
            .message_ttl(PAUSE)
            .dead_letter_to("") // the default exchange: to the work queue by its name
            .dead_letter_key(work.name())
            .dead_letter_at_least_once();
        let parking = Queue::quorum(format!("{}.dead", work.name())).delivery_limit(1_000_000_000); // looks may count
        Ok(Topology::new().queue(waiting).queue(parking))
    }

    fn failures(&self, properties: &RawProperties, _queue: &str) -> u32 {
        let tries = properties.header(TRIES);
        tries.and_then(|tries| tries.as_str()?.parse().ok()).unwrap_or(0)
    }

    fn retry(&self, failed: &FailedMessage<'_>, _wait: Duration) -> RetryStep {
        let mut message = failed.forward_to("", format!("{}.pause", failed.queue()));
        message.set_header(TRIES, failed.failures().to_string());
        message.into()
    }

    fn park(&self, failed: &FailedMessage<'_>) -> RetryStep {
        let mut message = failed.forward_to("", format!("{}.dead", failed.queue()));
        message.remove_header(TRIES); // it begins at zero if it is replayed
        message.into()
    }
}

async fn work(job: String, seen: Incoming, done: State<Sender<()>>) -> Result<(), BoxError> {
    assert!(seen.exchange() == "orders"); // also when it comes from the default exchange
    if seen.attempt() == 3 {
        done.0.send(()).await?;
    }
    match (job.as_str(), seen.attempt()) {
        ("slow", 3) => Ok(()),
        (_, attempt) => Err(format!("{job} failed at attempt {attempt}").into()),
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let client = Client::embedded().await?;
    let jobs = Queue::quorum("jobs").bind("orders", "#");
    client.apply(&Topology::new().exchange(Exchange::topic("orders")).queue(jobs)).await?;
    let orders = client.publisher("orders").build().await?;
    orders.publish_batch([("order.eu", "slow"), ("order.us", "torn")]).await?;

    let (done, mut third) = channel::<()>(2);
    let retry = Retry::with_profile(PauseQueue(RetryPolicy::fixed(PAUSE).max_retries(2)));
    let consumer = client.consumer("jobs").retry(retry).state(done).handle(work);
    let summary = consumer.run_until(async { (third.recv().await, third.recv().await) }).await?;
    assert_eq!((summary.handled, summary.retried, summary.parked), (1, 4, 1));
    let dead = client.parking_lot("jobs.dead").list(&Default::default(), 9).await?.remove(0);
    println!("{}, and was parked", dead.story().error.as_deref().unwrap_or("?"));
    client.close().await;
    Ok(())
}
