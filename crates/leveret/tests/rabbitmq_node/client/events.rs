use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::{Client, ErrorKind, Incoming, Queue};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::time::timeout;

/// A node takes a while to start.
const PATIENCE: Duration = Duration::from_secs(180);

const EVENTS: usize = 3000;

/// The bodies that a handler has seen.
type Seen = Arc<Mutex<BTreeSet<String>>>;

fn noting(seen: &Seen) -> impl Fn(Incoming) -> std::future::Ready<()> + Send + Sync + 'static {
    let seen = Arc::clone(seen);
    move |event| {
        let body = String::from_utf8_lossy(event.body()).into_owned();
        seen.lock().unwrap().insert(body);
        std::future::ready(())
    }
}

async fn until_both_consume(client: &Client) {
    eventually(PATIENCE, "both to consume", async || {
        client.health().consumers.iter().filter(|consumer| consumer.is_live).count() == 2
    })
    .await;
}

#[tokio::test]
async fn subscribers_get_every_event_and_listeners_are_back_while_the_node_fails() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    let url = format!("{}?heartbeat=1", node.url());
    let builder = Client::builder().endpoint(&*url).unwrap();
    let client = builder.timeout(PATIENCE).connect().await.unwrap();
    let stock = client.events("stock");
    let (subscribed, heard) = (Seen::default(), Seen::default());
    // A classic one: 3.10 needs minutes for a quorum queue whose node was killed while it began.
    let queue = Queue::classic("prices");
    let subscriber = stock.subscribe_queue(queue, ["stock.#"]).handle(noting(&subscribed));
    let listener = stock.listen(["stock.*.now"]).handle(noting(&heard));
    let running = tokio::spawn(async move { tokio::join!(subscriber.run(), listener.run()) });
    until_both_consume(&client).await;
    node.write_down_declarations().await;
    let publishing = async {
        let publisher = client.publisher(stock.exchange_name()).timeout(PATIENCE);
        let publisher = publisher.build().await.unwrap();
        let mut tickets = Vec::new();
        for number in 0..EVENTS {
            tickets.push(publisher.send("stock.ibm.now", number.to_string()).await.unwrap());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for (number, ticket) in tickets.into_iter().enumerate() {
            let mut outcome = ticket.await;
            while let Err(error) = outcome {
                // 3.10 does not take messages for a queue that is just starting.
                assert_eq!(error.kind(), ErrorKind::Nacked, "{error}");
                outcome = publisher.publish("stock.ibm.now", number.to_string()).await;
            }
        }
    };
    let failing = async {
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            node.kill().await;
            node.start_again().await;
            until_both_consume(&client).await;
        }
    };
    let both = timeout(PATIENCE, async { tokio::join!(publishing, failing) });
    both.await.expect("all events to be confirmed");
    eventually(PATIENCE, "every event", async || match subscribed.lock().unwrap().len() {
        EVENTS => Ok(()),
        count => Err(format!("{count} came")),
    })
    .await;
    // Its queue is gone with the connection, and what came meanwhile with it: a new one is bound as that was.
    eventually(PATIENCE, "the listener to hear", async || {
        stock.publish("stock.ibm.now", "again").await.unwrap();
        heard.lock().unwrap().contains("again")
    })
    .await;
    client.close().await;
    let (subscriber, listener) = timeout(PATIENCE, running).await.unwrap().unwrap();
    assert!(subscriber.unwrap().handled >= EVENTS as u64);
    assert!(listener.is_ok());
}
