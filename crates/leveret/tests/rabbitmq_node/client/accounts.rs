//! Every message that was confirmed is consumed, whatever fails meanwhile.

use std::num::NonZeroUsize;

use leveret::amqp::Properties;
use leveret::{Client, Message, Queue};
use leveret_testkit::proxy::{Cut, Direction};
use leveret_testkit::rabbitmq::{RabbitNode, Version, Vhost};
use leveret_testkit::{FaultProxy, eventually};
use tokio::sync::watch;

use crate::support::books::{Business, Size, dealt};
use crate::support::client::{SOON, soon};
use crate::support::rabbit::Dice;

const FEW: Size = Size { messages: 20_000, faults: 7 };

#[derive(Clone, Copy, Debug)]
enum Fault {
    Cut(Cut),
    CutInAFrame,
    ClosedByTheBroker,
    Silence,
    Alarm,
    Killed,
    Restarted,
    /// A message that costs each publisher its channel.
    Refused,
}

const FAULTS: [Fault; 9] = [
    Fault::Killed,
    Fault::Silence,
    Fault::CutInAFrame,
    Fault::ClosedByTheBroker,
    Fault::Refused,
    Fault::Cut(Cut::Reset),
    Fault::Alarm,
    Fault::Cut(Cut::Finish),
    Fault::Restarted,
];

async fn inflict(
    fault: Fault,
    node: &mut RabbitNode,
    vhost: &Vhost,
    proxy: &FaultProxy,
    business: &Business,
) {
    match fault {
        Fault::Cut(how) => proxy.cut(how),
        Fault::CutInAFrame => {
            let five = NonZeroUsize::new(5).unwrap();
            let directions = [Direction::ToServer, Direction::ToClient];
            directions.into_iter().for_each(|direction| proxy.split(direction, five));
            let before = proxy.seen().to_server;
            eventually(SOON, "bytes", async || proxy.seen().to_server > before + 500).await;
            proxy.cut(Cut::Reset);
            proxy.heal().await;
        }
        Fault::ClosedByTheBroker => drop(vhost.close_connections().await.unwrap()),
        Fault::Silence => {
            node.suspend().await;
            eventually(SOON, "all clients to notice", async || {
                let is_up =
                    |client: &Client| client.health().connections.iter().any(|one| one.is_up);
                !business.clients.iter().any(is_up)
            })
            .await;
            node.resume();
        }
        Fault::Alarm => {
            node.raise_memory_alarm().await;
            node.clear_memory_alarm().await;
        }
        Fault::Killed => {
            node.kill().await;
            node.start_again().await;
        }
        Fault::Restarted => node.restart().await,
        Fault::Refused => {
            for publisher in &business.publishers {
                let user_id = Some("nobody".try_into().unwrap());
                let message =
                    Message::with_properties("", Properties { user_id, ..Default::default() });
                assert!(soon("an outcome", publisher.publish("q", message)).await.is_err());
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_confirmed_is_consumed_while_a_node_fails_in_every_way() {
    let size = Size::from_environment(FEW);
    let mut dice = Dice::seeded();
    let mut node = RabbitNode::start(Version::under_test()).await;
    let vhost = node.vhost().await;
    let proxy = FaultProxy::to(node.broker().addr()).await;
    let url = format!("{}?heartbeat=1", proxy.url(&vhost.url()));
    let business = Business::open(size, Queue::classic("q"), |_| vec![url.clone()]).await;
    node.write_down_declarations().await;
    let faults = dealt(&FAULTS, size.faults, &mut dice);
    for (number, fault) in faults.iter().enumerate() {
        business.time_for_fault(number).await;
        inflict(*fault, &mut node, &vhost, &proxy, &business).await;
    }
    let faults = format!("{} faults: {faults:?}", faults.len());
    business.close("one node", &faults, || node.confessions()).await;
}

/// What is left on a broker when it fails is there when it is back: the books are complete once both are drained.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_confirmed_is_consumed_while_a_broker_and_its_standby_fail_in_turns() {
    let size = Size::from_environment(Size { faults: 2, ..FEW });
    let version = Version::under_test();
    let (one, other) = tokio::join!(RabbitNode::start(version), RabbitNode::start(version));
    let mut nodes = [one, other];
    let urls: Vec<String> =
        nodes.iter().map(|node| format!("{}?heartbeat=1", node.url())).collect();
    let mut business = Business::open(size, Queue::classic("q"), |_| urls.clone()).await;
    for number in 0..size.faults {
        business.time_for(2 * number, 2 * size.faults).await;
        nodes[number % 2].write_down_declarations().await;
        nodes[number % 2].kill().await;
        // The next one fails when the clients have moved over and this one is back.
        business.time_for(2 * number + 1, 2 * size.faults).await;
        nodes[number % 2].start_again().await;
    }
    business.all_published().await;
    for client in &business.clients {
        eventually(SOON, "all connections of a client to be with one broker", async || {
            let connections = client.health().connections;
            let first = connections[0].endpoint.clone();
            let together = connections.iter().all(|one| one.is_up && one.endpoint == first);
            if together { Ok(()) } else { Err(format!("{connections:?}")) }
        })
        .await;
    }
    let (stop, _) = watch::channel(false);
    for url in &urls {
        let client = Client::connect(url).await.unwrap();
        tokio::spawn(business.books.clone().consume(client, stop.subscribe()));
    }
    let faults = format!("{} failovers", size.faults);
    let confessions = || nodes.iter().map(RabbitNode::confessions).collect();
    business.close("a broker and its standby", &faults, confessions).await;
    stop.send_replace(true);
}
