use std::time::Duration;

use leveret::{Conflict, ErrorKind, Exchange, Queue, Topology};
use leveret_testkit::rabbitmq;

use crate::support::client::{CONSUMING, client, client_with, cut, soon, until_depth};

#[tokio::test]
async fn applying_twice_changes_nothing_and_counts_what_is_there() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let topology = Topology::new()
        .exchange(Exchange::topic("orders"))
        .exchange(Exchange::fanout("audit").bind("orders", "#"))
        .queue(Queue::quorum("billing").bind("orders", "order.*"))
        .queue(Queue::classic("all").bind("audit", ""))
        .queue(Queue::temporary("mine").bind("orders", "#"));
    client.apply(&topology).await.unwrap();
    let name = client.queue_name("mine");
    assert!(name.starts_with("amq.gen-"), "{name}");
    let publisher = client.publisher("orders").build().await.unwrap();
    soon("an outcome", publisher.publish("order.new", "1")).await.unwrap();

    until_depth(&client, "billing", 1).await;
    let applied = client.apply(&topology).await.unwrap();
    for queue in ["billing", "all", "mine"] {
        assert_eq!(applied.queue(queue).unwrap().messages, 1, "{queue}");
    }
    assert_eq!(applied.queue("mine").unwrap().name, name);
    assert_eq!(client.topology(), topology);
}

/// What there is, what is wanted instead, and how that is told.
fn conflicts() -> Vec<(Topology, Topology, [&'static str; 4])> {
    let queue = |queue| Topology::new().queue(queue);
    let exchange = |exchange| Topology::new().exchange(exchange);
    let ttl = |seconds| Queue::classic("q").message_ttl(Duration::from_secs(seconds));
    vec![
        (
            exchange(Exchange::topic("x")),
            exchange(Exchange::topic("x").transient()),
            ["exchange \"x\"", "durable", "false", "true"],
        ),
        (
            queue(Queue::classic("q")),
            queue(Queue::classic("q").auto_delete()),
            ["queue \"q\"", "auto_delete", "true", "false"],
        ),
        (queue(ttl(60)), queue(ttl(30)), ["queue \"q\"", "x-message-ttl", "30000", "60000"]),
        (
            queue(ttl(60)),
            queue(Queue::classic("q")),
            ["queue \"q\"", "x-message-ttl", "none", "60000"],
        ),
        (
            queue(Queue::classic("q")),
            queue(ttl(30)),
            ["queue \"q\"", "x-message-ttl", "30000", "none"],
        ),
        (
            queue(Queue::classic("q")),
            queue(Queue::quorum("q")),
            ["queue \"q\"", "x-queue-type", "quorum", "classic"],
        ),
        (
            exchange(Exchange::topic("x")),
            exchange(Exchange::fanout("x")),
            ["exchange \"x\"", "type", "fanout", "topic"],
        ),
        (
            exchange(Exchange::topic("x")),
            exchange(Exchange::topic("x").alternate("amq.fanout")),
            ["exchange \"x\"", "alternate-exchange", "amq.fanout", "none"],
        ),
    ]
}

#[tokio::test]
async fn a_conflict_names_object_argument_wanted_and_found() {
    let vhost = rabbitmq::vhost().await;
    let theirs = client(&vhost).await;
    let mine = client(&vhost).await;
    for (there, wanted, [object, argument, want, found]) in conflicts() {
        theirs.apply(&there).await.unwrap();
        let wanted = wanted.queue(Queue::classic("fine"));
        let error = soon("an answer", mine.apply(&wanted)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        let expected = Conflict {
            object: object.to_owned(),
            argument: argument.to_owned(),
            wanted: want.to_owned(),
            found: found.to_owned(),
        };
        assert_eq!(error.conflicts(), [expected]);
        // The rest was declared, and nobody was hurt.
        assert!(mine.delete_queue("fine", Default::default()).await.is_ok());
        if argument == "type" || object.starts_with("exchange") {
            theirs.delete_exchange("x", Default::default()).await.unwrap();
        } else {
            theirs.delete_queue("q", Default::default()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn all_that_conflicts_is_named_at_once() {
    let vhost = rabbitmq::vhost().await;
    let there = Topology::new().exchange(Exchange::topic("x")).queue(Queue::classic("q"));
    client(&vhost).await.apply(&there).await.unwrap();
    let wanted = Topology::new()
        .exchange(Exchange::fanout("x"))
        .queue(Queue::classic("q").max_length(5))
        .queue(Queue::classic("fine"));
    let mine = client(&vhost).await;
    let error = soon("an answer", mine.apply(&wanted)).await.unwrap_err();
    let named: Vec<_> = error.conflicts().iter().map(|one| one.argument.as_str()).collect();
    assert_eq!(named, ["type", "x-max-length"], "{error}");
    assert_eq!(mine.topology(), Topology::new().queue(Queue::classic("fine")));
}

#[tokio::test]
async fn a_temporary_queue_is_renamed_with_its_bindings() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let topology = Topology::new()
        .exchange(Exchange::topic("orders"))
        .queue(Queue::temporary("mine").bind("orders", "x"));
    client.apply(&topology).await.unwrap();
    let publisher = client.publisher("orders").build().await.unwrap();
    let before = client.queue_name("mine");
    cut(&vhost, &client, CONSUMING).await;
    leveret_testkit::eventually(crate::support::client::SOON, "another name", async || {
        client.queue_name("mine") != before
    })
    .await;
    soon("an outcome", publisher.publish("x", "1")).await.unwrap();
    until_depth(&client, "mine", 1).await;
}

#[tokio::test]
async fn what_is_deleted_is_not_restored() {
    let vhost = rabbitmq::vhost().await;
    let client = client_with(&vhost, Queue::classic("q")).await;
    client.apply(&Topology::new().exchange(Exchange::topic("x"))).await.unwrap();
    client.delete_queue("q", Default::default()).await.unwrap();
    client.delete_exchange("x", Default::default()).await.unwrap();
    assert!(client.topology().is_empty());
    cut(&vhost, &client, CONSUMING).await;
    let error = soon("an answer", client.inspect_queue("q")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
    let publisher = client.publisher("x").build().await.unwrap();
    let error = soon("an outcome", publisher.publish("", "1")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
}

#[tokio::test]
async fn what_the_broker_does_not_have_is_said() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let kind = |error: leveret::Error| error.kind();
    assert_eq!(client.inspect_queue("nope").await.map_err(kind).err(), Some(ErrorKind::Missing));
    let bound = Topology::new().queue(Queue::classic("q").bind("nope", ""));
    assert_eq!(client.apply(&bound).await.map_err(kind).err(), Some(ErrorKind::Missing));
    assert!(client.inspect_queue("q").await.is_ok());
}
