//! Futures that are dropped before they are done.

// It is a part of two kinds of tests.
#![allow(unreachable_pub)]

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use leveret::amqp::Publish;
use leveret::{Client, Incoming, Publisher, Queue, Topology};
use tokio::time::sleep;

/// When nothing has happened for this long, nothing more will.
const QUIET: Duration = Duration::from_millis(100);

/// Drops a future after so many polls, or when nothing more happens.
pub async fn after_polls<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let dropped = Dropped(Some(Box::pin(future)), polls);
    tokio::time::timeout(QUIET, dropped).await.ok().flatten()
}

struct Dropped<F>(Option<Pin<Box<F>>>, usize);

impl<F: Future> Future for Dropped<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<F::Output>> {
        let Some(left) = self.1.checked_sub(1) else {
            self.0 = None;
            return Poll::Ready(None);
        };
        self.1 = left;
        match self.0.as_mut() {
            Some(future) => future.as_mut().poll(context).map(Some),
            None => Poll::Ready(None),
        }
    }
}

pub fn message() -> Publish<'static> {
    Publish { routing_key: "q", body: "from a pool".into(), ..Publish::default() }
}

/// Everything a client can do, each dropped after so many polls.
pub async fn begin_everything(client: &Client, publisher: &Publisher, polls: usize) {
    let topology = Topology::new().queue(Queue::classic("q")).queue(Queue::temporary("mine"));
    after_polls(polls, client.apply(&topology)).await;
    after_polls(polls, client.inspect_queue("q")).await;
    after_polls(polls, publisher.publish("q", "1")).await;
    after_polls(polls, publisher.send("q", "2")).await;
    after_polls(polls, publisher.publish_batch([("q", "3"), ("q", "4")])).await;
    after_polls(polls, publisher.flush()).await;
    after_polls(polls, client.publisher("").build()).await;
    after_polls(polls, client.publisher("").build_unconfirmed()).await;
    let pool = client.channel_pool().size(2);
    after_polls(polls, async {
        let pool = pool.build().await?;
        let channel = pool.borrow().await?;
        let _ = channel.publish(&message()).await;
        channel.give_back().await
    })
    .await;
    after_polls(polls, async {
        let mut deliveries = client.consumer("q").prefetch(3).stream().await?;
        while let Some(delivery) = deliveries.next().await {
            if let Ok(delivery) = delivery {
                let _ = delivery.ack();
            }
        }
        Ok::<(), leveret::Error>(())
    })
    .await;
    let handler = |_: Incoming| async { sleep(Duration::from_millis(1)).await };
    after_polls(polls, client.consumer("q").workers(2).handle(handler).run()).await;
    after_polls(polls, client.get("q", Default::default())).await;
    after_polls(polls, client.check_health()).await;
}
