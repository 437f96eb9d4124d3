//! Looking into a broker without changing anything.

use leveret::amqp::{
    Connection, ConsumeOptions, ExchangeOptions, GetOptions, Options, Refused, Table,
};
use leveret_broker::snapshot::BindingDestination;

use crate::support::{broker, connect, put, with_queue};

#[tokio::test]
async fn a_snapshot_shows_all_there_is() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    channel.declare_exchange("x", "topic", ExchangeOptions::default()).await.unwrap();
    channel.bind_queue("q", "x", "a.*", &Table::new()).await.unwrap();
    channel.bind_exchange("x", "amq.fanout", "", &Table::new()).await.unwrap();
    for body in ["one", "two", "three"] {
        assert!(put(&channel, "q", body).await.is_acked());
    }
    let held = channel.get("q", GetOptions::default()).await.unwrap().unwrap();
    let tagged = ConsumeOptions { tag: "reader".to_owned(), prefetch: 1, ..Default::default() };
    let mut consumer = channel.consume("q", tagged).await.unwrap();
    let delivered = consumer.next().await.unwrap().unwrap();

    let snapshot = broker.snapshot();
    assert_eq!(snapshot.virtual_hosts.len(), 1);
    let vhost = snapshot.virtual_host("/").unwrap();
    let [client] = vhost.connections.as_slice() else { panic!("{:?}", vhost.connections) };
    assert_eq!((client.user.as_str(), client.peer), ("guest", None));
    let [on] = client.channels.as_slice() else { panic!("{client:?}") };
    assert_eq!((on.number, on.unsettled, on.prefetch), (1, 2, 1));
    assert_eq!(on.consumers, ["reader"]);
    let queue = vhost.queue("q").unwrap();
    assert_eq!((queue.ready, queue.unsettled, queue.kind), (1, 2, "classic"));
    assert_eq!(queue.consumers, ["reader"]);
    assert!(queue.durable && !queue.exclusive && !queue.auto_delete);
    let exchange = vhost.exchanges.iter().find(|exchange| exchange.name == "x").unwrap();
    assert_eq!((exchange.kind, exchange.durable), ("topic", true));
    let bindings: Vec<_> = vhost
        .bindings
        .iter()
        .map(|binding| (&*binding.source, binding.destination.clone(), &*binding.routing_key))
        .collect();
    let to_exchange = BindingDestination::Exchange("x".to_owned());
    let to_queue = BindingDestination::Queue("q".to_owned());
    assert_eq!(bindings, [("amq.fanout", to_exchange, ""), ("x", to_queue, "a.*")]);

    held.ack().unwrap();
    delivered.nack(Refused::Discard).unwrap();
}

#[tokio::test]
async fn peeking_leaves_messages_where_they_are() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    assert!(broker.peek("/", "missing", 1).is_none());
    assert!(broker.peek("missing", "q", 1).is_none());
    for body in ["one", "two", "three"] {
        put(&channel, "q", body).await;
    }
    let delivery = channel.get("q", GetOptions::default()).await.unwrap().unwrap();
    delivery.nack(Refused::Requeue).unwrap();
    channel.inspect_queue("q").await.unwrap();
    let seen = broker.peek("/", "q", 2).unwrap();
    let seen: Vec<_> =
        seen.iter().map(|one| (&*one.body, &*one.routing_key, one.redelivered)).collect();
    assert_eq!(seen, [(&b"one"[..], "q", true), (b"two", "q", false)]);
    assert_eq!(channel.inspect_queue("q").await.unwrap().messages, 3);
}

#[tokio::test]
async fn statistics_count_what_happened() {
    let broker = broker();
    let connection = connect(&broker).await;
    let channel = with_queue(&connection).await;
    for body in ["acked", "requeued", "rejected", "purged"] {
        put(&channel, "q", body).await;
    }
    put(&channel, "nowhere", "returned").await;
    assert!(broker.statistics().memory > 0);
    let next = async || channel.get("q", GetOptions::default()).await.unwrap().unwrap();
    next().await.ack().unwrap();
    next().await.nack(Refused::Requeue).unwrap();
    next().await.ack().unwrap();
    next().await.reject(Refused::Discard).unwrap();
    channel.purge_queue("q").await.unwrap();

    let statistics = broker.statistics();
    assert_eq!((statistics.queues, statistics.ready, statistics.unsettled), (1, 0, 0));
    assert_eq!((statistics.connections, statistics.channels, statistics.memory), (1, 1, 0));
    let tally = statistics.tally;
    assert_eq!((tally.published, tally.enqueued, tally.unroutable, tally.returned), (5, 4, 1, 1));
    assert_eq!((tally.delivered, tally.acked, tally.requeued), (4, 2, 1));
    assert_eq!((tally.rejected, tally.gone, tally.discarded), (1, 1, 1));
}

#[tokio::test]
async fn a_connection_is_told_by_its_name_and_where_it_comes_from() {
    let broker = broker();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let url = format!("amqp://guest:guest@{address}/%2f?connection_name=billing");
    let options = Options::from_uri(&url).unwrap();
    let connection = Connection::open(&options).await.unwrap();
    let snapshot = broker.snapshot();
    let [client] = snapshot.virtual_host("/").unwrap().connections.as_slice() else {
        panic!("{snapshot:?}");
    };
    assert_eq!((client.name.as_deref(), client.user.as_str()), (Some("billing"), "guest"));
    assert!(client.peer.is_some_and(|peer| peer.ip() == address.ip()), "{client:?}");
    assert!(client.channels.is_empty());
    connection.close().await.unwrap();
}
