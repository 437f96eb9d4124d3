use std::time::Duration;

use leveret::{Client, Json, OnLoss};
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use tokio::time::timeout;

use crate::support::client::until_healthy;
use crate::support::services::{CALLS, crashing, each_its_own, storm};

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
