//! A broker that goes away, and comes back.

use std::time::Duration;

use leveret::Client;
use leveret_broker::Broker;
use leveret_sql::{Outgoing, RelayEvent, Side};
use leveret_testkit::proxy::Cut;
use leveret_testkit::{FaultProxy, eventually};

use super::outbox::pool;
use crate::support::outbox::Stage;

const DEADLINE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_broker_that_is_away_is_waited_for_and_counts_for_no_message() {
    let (_folder, pool) = pool().await;
    let broker = Broker::builder().start().unwrap();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let proxy = FaultProxy::to(address).await;
    let client = Client::builder().broker(&broker).connect().await.unwrap();
    let stage = Stage::with(pool, client).await;
    // Only the relay goes by the proxy. Messages that are refused are set aside at once; but they are not refused.
    let client = Client::connect(&*format!("amqp://{}", proxy.addr())).await.unwrap();
    let relay = stage.outbox.relay(&client, &stage.pool).attempts(1);
    let relay = relay.patience(Duration::from_millis(300)).build().await.unwrap();
    let monitor = relay.monitor();
    let mut events = monitor.watch();
    let story = async {
        stage.write([Outgoing::new("", "q", "1").ordered_by("a")]).await;
        assert_eq!(stage.texts("q", 1).await, ["1"]);
        eventually(DEADLINE, "the row to be gone", async || stage.backlog().await == (0, 0)).await;
        proxy.refuse().await;
        proxy.cut(Cut::Reset);
        stage.write([Outgoing::new("", "q", "2").ordered_by("a")]).await;
        stage.write([Outgoing::new("", "q", "3").ordered_by("a")]).await;
        eventually(DEADLINE, "the relay to notice", || {
            std::future::ready(monitor.health().broker.is_some())
        })
        .await;
        proxy.accept().await;
        assert_eq!(stage.texts("q", 2).await, ["2", "3"]);
        eventually(DEADLINE, "a healthy relay", || {
            std::future::ready(monitor.health().is_healthy())
        })
        .await;
    };
    let summary = relay.run_until(story).await.unwrap();
    let went = events.next().await.unwrap();
    assert!(matches!(went, RelayEvent::Interrupted { side: Side::Broker, .. }), "{went}");
    let came = events.next().await.unwrap();
    assert!(matches!(came, RelayEvent::Resumed { side: Side::Broker }), "{came}");
    assert_eq!((summary.refused, summary.set_aside), (0, 0));
    assert_eq!(stage.backlog().await, (0, 0));
}
