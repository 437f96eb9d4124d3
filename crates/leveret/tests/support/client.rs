//! What tests of the client share, on whatever broker.

use std::time::Duration;

use leveret::{Client, ClientBuilder, ClientEvent, ClientEvents, Deliveries, Delivery, Publisher};
use leveret::{Queue, Topology};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::Vhost;
pub use leveret_testkit::{SOON, soon};

pub fn builder(vhost: &Vhost) -> ClientBuilder {
    Client::builder().endpoint(vhost.url()).unwrap()
}

pub async fn client(vhost: &Vhost) -> Client {
    soon("a client", builder(vhost).connect()).await.unwrap()
}

/// A client with one queue.
pub async fn client_with(vhost: &Vhost, queue: Queue) -> Client {
    let client = client(vhost).await;
    soon("a queue", client.apply(&Topology::new().queue(queue))).await.unwrap();
    client
}

pub async fn publisher(client: &Client) -> Publisher {
    soon("a publisher", client.publisher("").build()).await.unwrap()
}

/// The next delivery of a stream that goes on.
#[track_caller]
pub fn next(deliveries: &mut Deliveries) -> impl Future<Output = Delivery> {
    let next = soon("a delivery", deliveries.next());
    async move { next.await.expect("the stream goes on").unwrap() }
}

/// Waits until a queue has so many messages ready.
pub async fn until_depth(client: &Client, queue: &str, messages: u32) {
    eventually(SOON, format!("{messages} messages in {queue}"), async || {
        let found = client.inspect_queue(queue).await.map_err(|error| error.to_string())?.messages;
        if found == messages { Ok(()) } else { Err(found.to_string()) }
    })
    .await;
}

/// Waits until a queue has a consumer.
pub async fn until_consumed(client: &Client, queue: &str) {
    eventually(SOON, format!("a consumer of {queue}"), async || {
        client.inspect_queue(queue).await.map(|found| found.consumers > 0).unwrap_or_default()
    })
    .await;
}

pub async fn until_healthy(client: &Client) {
    eventually(SOON, "health", async || {
        let health = client.health();
        if health.is_healthy() { Ok(()) } else { Err(format!("{health:?}")) }
    })
    .await;
}

pub async fn until_unhealthy(client: &Client) {
    eventually(SOON, "health to tell of the trouble", async || !client.health().is_healthy()).await;
}

/// The first event from now on of which `is_it` says yes.
#[track_caller]
pub fn until_event(
    events: &mut ClientEvents,
    what: &str,
    is_it: impl Fn(&ClientEvent) -> bool,
) -> impl Future<Output = ClientEvent> {
    let awaited = async move {
        loop {
            let event = events.next().await.expect("the client is there");
            if is_it(&event) {
                return event;
            }
        }
    };
    soon(what, awaited)
}

/// A part of the name of the connection on which everything is declared and consumed.
pub const CONSUMING: &str = "(consuming)";
/// A part of the name of the connection on which is published.
pub const PUBLISHING: &str = "(publishing)";

/// Has the broker close the connections of a virtual host, until the client has lost this one of its own. RabbitMQ lists
/// a connection a second after it was made.
pub async fn cut(vhost: &Vhost, client: &Client, which: &str) {
    let mut events = client.watch();
    let is_it = |event: &ClientEvent| matches!(event, ClientEvent::Lost { connection, .. } if connection.contains(which));
    let closing = async {
        loop {
            vhost.close_connections().await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        _ = until_event(&mut events, "the loss of a connection", is_it) => {}
        () = closing => {}
    }
}
