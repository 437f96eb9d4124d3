//! A client at work: a publisher, a consumer of a durable queue and one of a queue that the broker names.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::{
    Backoff, Client, ErrorKind, Exchange, Health, Incoming, Publisher, Queue, State, Summary,
    Topology,
};
use leveret_testkit::eventually;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::client::{SOON, soon, until_healthy, until_unhealthy};

/// What a client that is told to wait no longer waits at most.
const BRIEFLY: Duration = Duration::from_millis(500);

type Seen = Arc<Mutex<HashSet<(String, String)>>>;

pub struct Scene {
    pub client: Client,
    pub publisher: Publisher,
    /// Of a client that does not wait for the broker to come back.
    hasty: (Client, Publisher),
    /// Which queue has delivered which message.
    seen: Seen,
    published: AtomicU32,
    stop: watch::Sender<bool>,
    consumers: Vec<JoinHandle<Result<Summary, leveret::Error>>>,
}

/// The queues that get each message.
pub const DURABLE: &str = "durable";
pub const MINE: &str = "mine";

pub fn topology() -> Topology {
    Topology::new()
        .exchange(Exchange::topic("orders"))
        .queue(Queue::classic(DURABLE).bind("orders", "#"))
        .queue(Queue::temporary(MINE).bind("orders", "#"))
}

async fn connect(url: &str, timeout: Duration) -> Client {
    let backoff = Backoff { max: Duration::from_millis(500), ..Backoff::default() };
    let builder = Client::builder().endpoint(url).unwrap().backoff(backoff).timeout(timeout);
    soon("a client", builder.connect()).await.unwrap()
}

impl Scene {
    /// At a URL, which should ask for short heartbeats.
    pub async fn at(url: &str) -> Scene {
        let client = connect(url, SOON).await;
        soon("the topology", client.apply(&topology())).await.unwrap();
        let publisher = client.publisher("orders").timeout(SOON).build().await.unwrap();
        let hasty = connect(url, BRIEFLY).await;
        let hasty_publisher = hasty.publisher("orders").timeout(BRIEFLY).build().await.unwrap();
        let (stop, seen) = (watch::Sender::new(false), Seen::default());
        let consumers = [DURABLE, MINE].map(|queue| {
            let handler = |incoming: Incoming, State(seen): State<Seen>| async move {
                let body = String::from_utf8_lossy(incoming.body()).into_owned();
                seen.lock().unwrap().insert((incoming.queue().to_owned(), body));
            };
            let mut stopped = stop.subscribe();
            let runner = client.consumer(queue).state(Arc::clone(&seen)).handle(handler);
            tokio::spawn(async move {
                runner.run_until(async { stopped.wait_for(|stop| *stop).await.map(drop) }).await
            })
        });
        let hasty = (hasty, hasty_publisher);
        let published = AtomicU32::new(0);
        let scene =
            Scene { client, publisher, hasty, seen, published, stop, consumers: consumers.into() };
        scene.works().await;
        scene
    }

    fn has_seen(&self, queue: &str, body: &str) -> bool {
        self.seen.lock().unwrap().contains(&(queue.to_owned(), body.to_owned()))
    }

    /// Publishes a message, and waits until the durable queue has delivered it: what is confirmed is not lost.
    pub async fn publish(&self) -> String {
        let body = self.published.fetch_add(1, Ordering::SeqCst).to_string();
        soon("an outcome", self.publisher.publish("a", body.clone())).await.unwrap();
        eventually(SOON, "the message", async || self.has_seen(DURABLE, &body)).await;
        body
    }

    /// Messages arrive in both queues, and health is fine. A message may get lost to a queue that goes with its
    /// connection, so there is another one.
    pub async fn works(&self) {
        eventually(SOON, "a message from the queue that the broker names", async || {
            let body = self.publish().await;
            let seen = eventually(SOON / 4, "a message", async || self.has_seen(MINE, &body));
            tokio::time::timeout(Duration::from_secs(3), seen).await
        })
        .await;
        until_healthy(&self.client).await;
    }

    /// While the broker is away: health says so, and who does not want to wait does not.
    pub async fn knows_that_the_broker_is_away(&self) {
        until_unhealthy(&self.client).await;
        eventually(SOON, "all connections to be known as lost", async || {
            !self.client.health().connections.iter().any(|connection| connection.is_up)
        })
        .await;
        let Health { consumers, .. } = self.client.health();
        assert!(consumers.iter().all(|consumer| !consumer.is_live), "{consumers:?}");
        let (client, publisher) = &self.hasty;
        let error = soon("an answer", client.inspect_queue(DURABLE)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        let error = soon("an outcome", publisher.publish("a", "too late")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }

    /// Stops in good order.
    pub async fn ends(self) {
        self.stop.send_replace(true);
        for consumer in self.consumers {
            soon("a consumer to end", consumer).await.unwrap().unwrap();
        }
        soon("closing", self.client.close()).await;
        soon("closing", self.hasty.0.close()).await;
    }
}
