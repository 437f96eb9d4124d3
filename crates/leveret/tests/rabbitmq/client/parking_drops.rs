//! Looks that are given up in the middle, in queues that lose what is rejected.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::Duration;

use leveret::{
    Client, ErrorKind, Filter, Message, ParkedMessage, ParkingLot, Queue, Target, Topology,
};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq;
use leveret_testkit::rabbitmq::Vhost;
use tokio::sync::Notify;

use super::parking::{counts_returns, lot};
use crate::support::client::{SOON, client, client_with, next, publisher, soon, until_depth};

const COUNT: u32 = 400;

/// The quorum queue `q` with messages `0` and so on, and the queue `other`. It drops what is given back once, unless that is
/// counted always.
async fn filled(vhost: &Vhost) -> Client {
    let is_lot = counts_returns(vhost);
    let queue = if is_lot { lot("q") } else { Queue::quorum("q").delivery_limit(0) };
    let owner = client_with(vhost, queue).await;
    soon("a queue", owner.apply(&Topology::new().queue(Queue::classic("other")))).await.unwrap();
    let publisher = publisher(&owner).await;
    let message = |n: u32| Message::new(n.to_string()).message_id(n.to_string());
    let messages = (0..COUNT).map(|n| ("q", message(n)));
    soon("outcomes", publisher.publish_batch(messages)).await.unwrap();
    owner
}

/// How often each message is there.
async fn drain(client: &Client, queue: &str, counts: &mut BTreeMap<u32, u32>) {
    let count = client.inspect_queue(queue).await.unwrap().messages;
    let mut stream = client.consumer(queue).stream().await.unwrap();
    for _ in 0..count {
        let delivery = next(&mut stream).await;
        let n = std::str::from_utf8(delivery.body()).unwrap().parse().unwrap();
        *counts.entry(n).or_default() += 1;
        delivery.ack().unwrap();
    }
}

/// Each message is in one of the queues, and once.
async fn all_are_there(owner: &Client, told: &str) {
    let mut counts = BTreeMap::new();
    for queue in ["q", "other"] {
        drain(owner, queue, &mut counts).await;
    }
    let lost: Vec<u32> = (0..COUNT).filter(|n| !counts.contains_key(n)).collect();
    assert!(lost.is_empty(), "{told}: lost {} of them, {lost:?}", lost.len());
    assert!(counts.values().all(|count| *count == 1), "{told}: {counts:?}");
}

/// Looks until so many were shown, and drops the look.
async fn look_and_drop(lot: &ParkingLot, at: usize) {
    let enough = Notify::new();
    let mut shown = 0;
    let look = |_: &ParkedMessage| {
        shown += 1;
        if shown == at {
            enough.notify_one();
        }
        ControlFlow::Continue(())
    };
    tokio::select! {
        biased;
        () = enough.notified() => {}
        done = lot.look(look).run() => drop(done.unwrap()),
    }
}

#[tokio::test]
async fn a_look_that_is_dropped_loses_nothing_and_closing_waits_for_it() {
    for at in [1, 16, 17, 116, 117, 250, 400] {
        let vhost = rabbitmq::vhost().await;
        let owner = filled(&vhost).await;
        let looker = client(&vhost).await;
        soon("a look", look_and_drop(&looker.parking_lot("q"), at)).await;
        soon("the end", looker.close()).await;
        until_depth(&owner, "q", COUNT).await;
        all_are_there(&owner, &format!("dropped at {at}")).await;
    }
}

/// What is dropped need not be in the hands of the callback: it may be on its way in either direction.
#[tokio::test]
async fn a_look_that_is_dropped_at_any_moment_loses_nothing() {
    let vhost = rabbitmq::vhost().await;
    let owner = filled(&vhost).await;
    let looker = client(&vhost).await;
    let lot = looker.parking_lot("q");
    for time in (0..60).step_by(3).map(Duration::from_millis) {
        let _ = tokio::time::timeout(time, lot.list(&Filter::new(), 1000)).await;
        until_depth(&owner, "q", COUNT).await;
    }
    soon("the end", looker.close()).await;
    all_are_there(&owner, "dropped again and again").await;
}

/// A client that nobody holds any longer stays until all is back.
#[tokio::test]
async fn a_look_whose_client_is_dropped_with_it_loses_nothing() {
    let vhost = rabbitmq::vhost().await;
    let owner = filled(&vhost).await;
    for at in [1, 50, 300] {
        let lot = client(&vhost).await.parking_lot("q");
        soon("a look", look_and_drop(&lot, at)).await;
        drop(lot);
        until_depth(&owner, "q", COUNT).await;
    }
    all_are_there(&owner, "dropped with its client").await;
}

#[tokio::test]
async fn a_move_that_is_dropped_leaves_each_message_in_one_place() {
    for at in [1, 16, 60, 150] {
        let vhost = rabbitmq::vhost().await;
        let owner = filled(&vhost).await;
        let looker = client(&vhost).await;
        let lot = looker.parking_lot("q");
        let enough = Notify::new();
        let progress = |progress: &leveret::Progress| {
            if progress.done >= at {
                enough.notify_one();
            }
        };
        let odd = Filter::new().header("odd", "no");
        let everything = lot.move_to(Target::queue("other")).progress(progress);
        tokio::select! {
            biased;
            () = enough.notified() => {}
            done = everything.run() => drop(done.unwrap()),
        }
        // What is not meant is only passed by.
        tokio::select! {
            biased;
            done = lot.purge().filter(odd).run() => drop(done.unwrap()),
            () = tokio::time::sleep(Duration::from_millis(30)) => {}
        }
        soon("the end", looker.close()).await;
        eventually(SOON, "all messages in one of the queues", async || {
            let mut found = 0;
            for queue in ["q", "other"] {
                found +=
                    owner.inspect_queue(queue).await.map_err(|error| error.to_string())?.messages;
            }
            if found == COUNT { Ok(()) } else { Err(found.to_string()) }
        })
        .await;
        all_are_there(&owner, &format!("dropped at {at}")).await;
    }
}

/// The look is asleep, and nobody wakes it.
#[tokio::test]
async fn a_client_that_is_closed_while_it_looks_puts_everything_back() {
    let vhost = rabbitmq::vhost().await;
    let owner = filled(&vhost).await;
    let looker = client(&vhost).await;
    let lot = looker.parking_lot("q");
    let shown = Notify::new();
    let progress = |_: &leveret::Progress| shown.notify_one();
    let slow = lot.purge().rate(0.1).progress(progress);
    let mut slow = Box::pin(slow.run());
    tokio::select! {
        biased;
        () = shown.notified() => {}
        done = &mut slow => panic!("{done:?}"),
    }
    // It goes on to the next message.
    assert!(crate::support::rabbit::polled(3, &mut slow).await.is_none());
    soon("the end", looker.close()).await;
    until_depth(&owner, "q", COUNT - 1).await;
    let ended = soon("the end of the look", slow).await;
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::Closed);
    let mut counts = BTreeMap::new();
    drain(&owner, "q", &mut counts).await;
    assert!(counts.keys().copied().eq(1..COUNT), "{counts:?}");
}

/// Nothing is left to be saved, and nothing to be waited for.
#[tokio::test]
async fn a_look_into_a_queue_that_is_deleted_meanwhile_ends() {
    let vhost = rabbitmq::vhost().await;
    for at in [1, 100, 300] {
        let owner = filled(&vhost).await;
        let lot = client(&vhost).await.parking_lot("q");
        let enough = Notify::new();
        let mut shown = 0;
        let look = |_: &ParkedMessage| {
            shown += 1;
            if shown == at {
                enough.notify_one();
            }
            ControlFlow::Continue(())
        };
        let deleting = async {
            enough.notified().await;
            soon("deletion", owner.delete_queue("q", Default::default())).await.unwrap();
        };
        let looking = soon("the end of the look", lot.look(look).run());
        // It may have been just in time.
        let (looked, ()) = tokio::join!(looking, deleting);
        if let Err(error) = looked {
            let kinds = [ErrorKind::Missing, ErrorKind::Unroutable, ErrorKind::Broker];
            assert!(kinds.contains(&error.kind()), "{error:?}");
        }
        let missing = soon("an answer", lot.depth()).await.unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::Missing);
    }
}
