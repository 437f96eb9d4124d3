//! What nobody should do, and somebody will.

use leveret::amqp::Options;
use leveret::{Client, Queue, Topology};
use leveret_testkit::{eventually, rabbitmq};

use crate::support::client::{SOON, publisher, soon, until_healthy};
use crate::support::drops::{after_polls, begin_everything};

/// How many channels a connection may have: enough for what is done at once, too few for any that are left behind.
const CHANNELS: u16 = 8;

#[tokio::test]
async fn futures_that_are_dropped_at_any_point_leave_nothing_behind() {
    let vhost = rabbitmq::vhost().await;
    let mut options = Options::from_uri(&vhost.url()).unwrap();
    options.channel_max = CHANNELS;
    let client = soon("a client", Client::connect(options)).await.unwrap();
    soon("a queue", client.apply(&Topology::new().queue(Queue::classic("q")))).await.unwrap();
    let publisher = publisher(&client).await;
    for polls in 0..24 {
        begin_everything(&client, &publisher, polls).await;
        if polls % 4 == 0 {
            vhost.close_connections().await.unwrap();
        }
        let other = client.publisher("missing");
        after_polls(polls, async { other.build().await?.publish("q", "1").await }).await;
    }
    soon("a flush", publisher.flush()).await.unwrap();
    soon("an outcome", publisher.publish("q", "the last")).await.unwrap();
    until_healthy(&client).await;
    eventually(SOON, "no consumer", async || {
        let info = client.inspect_queue("q").await.map_err(|error| error.to_string())?;
        if info.consumers == 0 { Ok(()) } else { Err(format!("{info:?}")) }
    })
    .await;
    // Declaring takes a channel of the one connection for a moment, and the publisher has one of the other.
    let most = usize::from(CHANNELS) - 1;
    eventually(SOON, "all channels for publishing", async || {
        client.channel_pool().size(most).build().await.map(drop)
    })
    .await;
    eventually(SOON, "all channels for consuming", async || {
        let mut streams = Vec::new();
        for _ in 0..most {
            streams.push(client.consumer("q").stream().await?);
        }
        Ok::<(), leveret::Error>(())
    })
    .await;
    soon("closing", client.close()).await;
}
