//! Failed messages on a node that is killed while they go back to their queue.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::{Attempt, Client, Queue, Topology};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::time::{Instant, sleep};

use crate::support::client::soon;
use crate::support::kills::{PATIENCE, connect, count, kill_and_restart, unstick};

/// The messages that are not handled yet.
type Missing = Arc<Mutex<HashSet<u64>>>;

/// The first delivery of a message fails.
async fn handle(client: Client, missing: Missing, done: impl Future<Output = ()>) {
    let handler = move |body: String, Attempt(attempt): Attempt| {
        let missing = Arc::clone(&missing);
        async move {
            if attempt == 1 {
                return Err("not yet");
            }
            missing.lock().unwrap().remove(&body.parse().unwrap());
            Ok(())
        }
    };
    client.consumer("q").workers(100).handle(handler).run_until(done).await.unwrap();
}

/// With the default policy, and a work queue of which the client knows nothing: a classic one.
#[tokio::test]
async fn a_killed_node_loses_no_message_that_goes_back_to_its_queue() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    let (owner, client) = (connect(&node).await, connect(&node).await);
    owner.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let publisher = owner.publisher("").build().await.unwrap();
    let missing: Missing = Arc::new(Mutex::new((0..count(3000)).collect()));
    let waiting: Vec<_> = missing.lock().unwrap().iter().map(|n| ("q", n.to_string())).collect();
    soon("confirms", publisher.publish_batch(waiting)).await.unwrap();

    let done = async {
        // They fail one after the other, and come back a second later: so many are on their way now.
        let is_half = || missing.lock().unwrap().len() as u64 <= count(3000) * 3 / 4;
        while !is_half() {
            sleep(Duration::from_millis(5)).await;
        }
        kill_and_restart(&mut node).await;
        let (mut left, mut since) = (usize::MAX, Instant::now());
        loop {
            let now = missing.lock().unwrap().len();
            match now {
                0 => break,
                now if now < left => (left, since) = (now, Instant::now()),
                _ if since.elapsed() > PATIENCE => {
                    unstick(&mut node, &format!("{now} messages did not come back")).await;
                    since = Instant::now();
                }
                _ => sleep(Duration::from_millis(50)).await,
            }
        }
    };
    handle(client.clone(), Arc::clone(&missing), done).await;
    owner.close().await;
    client.close().await;
}
