use std::time::Duration;

use leveret::{Client, ErrorKind, Json, OnLoss, Queue, Topology};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::time::timeout;

use crate::support::client::{SOON, next, publisher, soon, until_healthy};
use crate::support::services::{CALLS, Running, crashing, each_its_own, storm};

/// A node takes a while to start.
const PATIENCE: Duration = Duration::from_secs(180);

#[tokio::test]
async fn in_a_storm_every_call_gets_its_own_reply_or_is_told_why_not() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    let url = format!("{}?heartbeat=1", node.url());
    let connect = async |name: &str| {
        let builder = Client::builder().endpoint(&*url).unwrap().name(name);
        builder.timeout(PATIENCE).connect().await.unwrap()
    };
    let (server, caller) = (connect("server").await, connect("caller").await);
    server.service("storm").declare().await.unwrap();
    let services = crashing(&server);
    for on_loss in [OnLoss::Fail, OnLoss::Replay] {
        let rpc = caller.rpc("storm").on_loss(on_loss).build().await.unwrap();
        assert_eq!(rpc.call::<Json<u64>>("double", Json(1)).await.unwrap().0, 2);
        let calling = timeout(PATIENCE, storm(&rpc));
        let restarting = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            node.kill().await;
            node.start_again().await;
        };
        let (outcomes, ()) = tokio::join!(calling, restarting);
        let replies = each_its_own(&outcomes.expect("all outcomes"));
        match on_loss {
            OnLoss::Fail => assert!(replies < CALLS, "nothing was disturbed"),
            OnLoss::Replay => assert_eq!(replies, CALLS),
        }
        // A node that is killed may forget a queue that was declared just before, until its server declares it again.
        until_healthy(&server).await;
        let again = timeout(PATIENCE, rpc.call::<Json<u64>>("double", Json(1))).await;
        assert_eq!(again.expect("a reply").unwrap().0, 2);
        assert_eq!(rpc.in_flight(), 0);
    }
    services.abort();
}

/// With default settings.
#[tokio::test]
async fn a_call_on_a_node_that_is_killed_is_lost_and_queues_of_the_connection_are_declared_again() {
    let mut node = RabbitNode::start(Version::under_test()).await;
    let client = soon("a client", Client::connect(node.url())).await.unwrap();
    let mine = Topology::new().queue(Queue::temporary("mine"));
    soon("a queue", client.apply(&mine)).await.unwrap();
    let mut deliveries = soon("a consumer", client.consumer("mine").stream()).await.unwrap();
    let name = client.queue_name("mine");
    let (asked, mut is_asked) = tokio::sync::mpsc::channel::<()>(1);
    let never = client.service("slow").fallback(move |_: leveret::Incoming| {
        let asked = asked.clone();
        async move {
            let _ = asked.send(()).await;
            std::future::pending::<Result<Vec<u8>, leveret::Failure>>().await
        }
    });
    let _service = Running::start(never).await;
    let rpc = client.rpc("slow").build().await.unwrap();
    let calling = tokio::spawn(async move { rpc.call::<String>("any", "x".to_owned()).await });
    soon("the request", is_asked.recv()).await.unwrap();
    node.kill().await;
    let (outcome, ()) = tokio::join!(soon("an outcome", calling), node.start_again());
    let error = outcome.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");

    let renewed = eventually(SOON, "another queue", async || {
        let renewed = client.queue_name("mine");
        (renewed != name).then_some(renewed)
    })
    .await;
    let publisher = publisher(&client).await;
    soon("an outcome", publisher.publish(&renewed, "to the new queue")).await.unwrap();
    assert_eq!(next(&mut deliveries).await.body(), "to the new queue");
    until_healthy(&client).await;
}
