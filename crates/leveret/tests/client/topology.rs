use std::time::Duration;

use leveret::{Backoff, ClientEvent, ErrorKind, Exchange, ExchangeKind, Queue, Topology};
use leveret_broker::{Broker, Profile};
use tokio::time::timeout;

use crate::{broker, builder_of, client_of, soon};

/// Before RabbitMQ 4, an unknown kind of exchange costs the connection.
#[tokio::test(start_paused = true)]
async fn an_object_that_costs_the_connection_is_told_and_not_tried_for_ever() {
    let broker = Broker::builder().profile(Profile::RabbitMq3_10).start().unwrap();
    let client = client_of(&broker).await;
    let mut events = client.watch();
    let topology =
        Topology::new().exchange(Exchange::new("x", ExchangeKind::Other("fancy".to_owned())));
    let error = soon("an answer", client.apply(&topology)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
    assert!(error.to_string().contains("exchange \"x\""), "{error}");
    let mut lost = 0;
    while let Ok(Some(event)) = timeout(Duration::from_secs(60), events.next()).await {
        lost += u32::from(matches!(event, ClientEvent::Lost { .. }));
    }
    assert_eq!(lost, 2);
}

#[tokio::test(start_paused = true)]
async fn everything_is_back_after_a_restart_that_forgot_it() {
    let broker = broker();
    let client = client_of(&broker).await;
    let topology = Topology::new()
        .exchange(Exchange::topic("orders").transient())
        .exchange(Exchange::fanout("audit").transient().bind("orders", "#"))
        .queue(Queue::classic("q").transient().bind("audit", ""))
        .queue(Queue::temporary("mine").bind("orders", "mine.*"));
    client.apply(&topology).await.unwrap();
    let before = client.queue_name("mine");
    let publisher = client.publisher("orders").build().await.unwrap();
    broker.restart().await;

    soon("a publish", publisher.publish("mine.1", "hello")).await.unwrap();
    let after = client.queue_name("mine");
    assert_ne!(before, after);
    assert_eq!(client.inspect_queue("mine").await.unwrap().messages, 1);
    assert_eq!(client.inspect_queue("q").await.unwrap().messages, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_lost_while_a_topology_is_applied_is_no_reason_to_fail() {
    let broker = broker();
    let pause = Duration::from_millis(1);
    let backoff = Backoff { initial: pause, multiplier: 1.0, max: pause };
    let client = builder_of(&broker).backoff(backoff).connect().await.unwrap();
    let queues = (0..20).map(|number| Queue::classic(format!("q{number}")));
    let topology = queues.fold(Topology::new(), Topology::queue);
    for number in 0..40 {
        let cut = async {
            // At one place or another of what goes on meanwhile.
            tokio::time::sleep(Duration::from_micros(50 * number)).await;
            broker.faults().cut_all_connections();
        };
        let ((), applied, plan) =
            tokio::join!(cut, client.apply(&topology), client.plan(&topology));
        applied.unwrap();
        assert!(plan.unwrap().is_possible());
    }
}
