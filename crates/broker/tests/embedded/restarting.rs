//! What survives a restart: what RabbitMQ 4.3 and 3.10 keep, and how they say that a message was delivered before.

use leveret::amqp::{
    Connection, ErrorKind, ExchangeOptions, GetOptions, Properties, QueueOptions, Table,
};

use crate::support::{broker, connect, put_with};

fn mode(delivery_mode: u8) -> Properties<'static> {
    Properties { delivery_mode: Some(delivery_mode), ..Properties::default() }
}

async fn declare(connection: &Connection) {
    let channel = connection.open_channel().await.unwrap();
    let transient = QueueOptions { durable: false, ..QueueOptions::default() };
    channel.declare_queue("transient", transient).await.unwrap();
    channel.declare_queue("durable", QueueOptions::default()).await.unwrap();
    let quorum = Table::from_pairs([("x-queue-type", "quorum".into())]).unwrap();
    let quorum = QueueOptions { arguments: quorum, ..QueueOptions::default() };
    channel.declare_queue("quorum", quorum).await.unwrap();
    for (name, durable) in [("lasting", true), ("passing", false)] {
        let options = ExchangeOptions { durable, ..ExchangeOptions::default() };
        channel.declare_exchange(name, "fanout", options).await.unwrap();
        for queue in ["transient", "durable"] {
            channel.bind_queue(queue, name, "", &Table::new()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn durable_objects_and_persistent_messages_survive() {
    let broker = broker();
    let connection = connect(&broker).await;
    declare(&connection).await;
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    for queue in ["transient", "durable", "quorum"] {
        for (body, delivery_mode) in [("kept", 2), ("lost", 1)] {
            assert!(put_with(&channel, queue, body, mode(delivery_mode)).await.is_acked());
        }
    }
    broker.restart().await;
    assert_eq!(connection.ended().await.kind(), ErrorKind::ConnectionLost);

    let snapshot = broker.snapshot();
    let vhost = snapshot.virtual_host("/").unwrap();
    let names: Vec<_> = vhost.queues.iter().map(|queue| (&*queue.name, queue.ready)).collect();
    // A quorum queue keeps everything.
    assert_eq!(names, [("durable", 1), ("quorum", 2)]);
    assert!(vhost.exchanges.iter().any(|exchange| exchange.name == "lasting"));
    assert!(vhost.exchanges.iter().all(|exchange| exchange.name != "passing"));
    let sources: Vec<_> = vhost.bindings.iter().map(|binding| &*binding.source).collect();
    assert_eq!(sources, ["lasting"]);
    let kept: usize = vhost.queues.iter().map(|queue| queue.ready).sum();
    assert_eq!((kept, broker.statistics().ready), (3, 3));

    let channel = connect(&broker).await.open_channel().await.unwrap();
    let delivery = channel.get("durable", GetOptions::default()).await.unwrap().unwrap();
    assert_eq!((&**delivery.body(), delivery.redelivered()), (&b"kept"[..], false));
    delivery.ack().unwrap();
}

#[tokio::test]
async fn what_a_client_had_is_redelivered_in_its_old_place() {
    let broker = broker();
    let connection = connect(&broker).await;
    declare(&connection).await;
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    for body in ["held", "waiting"] {
        assert!(put_with(&channel, "durable", body, mode(2)).await.is_acked());
    }
    let held = channel.get("durable", GetOptions::default()).await.unwrap().unwrap();
    broker.restart().await;
    assert_eq!(held.ack().unwrap_err().kind(), ErrorKind::ConnectionLost);

    let channel = connect(&broker).await.open_channel().await.unwrap();
    for (body, redelivered) in [("held", true), ("waiting", false)] {
        let delivery = channel.get("durable", GetOptions::default()).await.unwrap().unwrap();
        assert_eq!((&**delivery.body(), delivery.redelivered()), (body.as_bytes(), redelivered));
        delivery.ack().unwrap();
    }
    assert_eq!(channel.inspect_queue("durable").await.unwrap().messages, 0);
    assert_eq!(broker.statistics().memory, 0);
}
