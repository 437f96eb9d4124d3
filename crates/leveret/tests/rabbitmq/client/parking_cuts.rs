//! What tasks on parking lots count, and how often they send a message, if their connections are cut in the middle.

use std::collections::BTreeMap;
use std::time::Duration;

use leveret::{
    Client, Draft, Filter, Message, ParkedMessage, Progress, Queue, Target, Task, Topology,
};
use leveret_testkit::FaultProxy;
use leveret_testkit::proxy::{Cut, Direction};
use leveret_testkit::rabbitmq;

use crate::support::client::{client_with, next, publisher, soon, until_depth};

/// Runs a task, and cuts all connections when it has counted so many.
async fn cut_at(proxy: &FaultProxy, task: Task<'_>, at: u64) -> Progress {
    let mut is_cut = false;
    let progress = |progress: &Progress| {
        if progress.done == at && !is_cut {
            is_cut = true;
            proxy.cut(Cut::Reset);
        }
    };
    let done = soon("a task", task.progress(progress).run()).await.unwrap();
    assert!(is_cut, "it was not cut at {at}: {done:?}");
    done
}

#[tokio::test]
async fn what_is_said_to_have_left_a_lot_has_left_it() {
    let quorum = || Queue::quorum("q").argument("x-delivery-limit", 1_000_000_000i64);
    for queue in [quorum(), Queue::classic("q")] {
        for at in [1, 20, 250, 500] {
            let vhost = rabbitmq::vhost().await;
            if vhost.broker().is_embedded() {
                return;
            }
            let told = format!("{queue:?}, cut at {at}");
            let owner = client_with(&vhost, queue.clone()).await;
            let other = Topology::new().queue(Queue::classic("other"));
            soon("a queue", owner.apply(&other)).await.unwrap();
            let messages = (0..800).map(|n| ("q", Message::new(n.to_string())));
            let publisher = publisher(&owner).await;
            soon("outcomes", publisher.publish_batch(messages)).await.unwrap();
            let proxy = FaultProxy::to(vhost.broker().addr()).await;
            let looker = soon("a client", Client::connect(proxy.url(&vhost.url()))).await.unwrap();
            let lot = looker.parking_lot("q");

            let dry = cut_at(&proxy, lot.move_to(Target::queue("other")).dry_run(), at).await;
            assert_eq!((dry.selected, dry.done), (800, 800), "{told}");
            until_depth(&owner, "q", 800).await;
            let purged = cut_at(&proxy, lot.purge().limit(500), at).await;
            assert_eq!((purged.selected, purged.done), (500, 500), "{told}");
            until_depth(&owner, "q", 300).await;
            let moving = lot.move_to(Target::queue("other")).limit(200);
            let moved = cut_at(&proxy, moving, at.min(150)).await;
            assert_eq!((moved.selected, moved.done), (200, 200), "{told}");
            until_depth(&owner, "q", 100).await;
            assert_eq!(lot.list(&Filter::new(), 1000).await.unwrap().len(), 100, "{told}");
        }
    }
}

/// The broker has taken them, and the client does not know it: they are sent again, and not once more.
#[tokio::test]
async fn a_cut_lets_no_message_be_sent_more_than_twice() {
    const COUNT: u32 = 1500;
    let quorum = || Queue::quorum("q").argument("x-delivery-limit", 1_000_000_000i64);
    for queue in [quorum(), Queue::classic("q")] {
        for at in [100, 400, 1000] {
            let vhost = rabbitmq::vhost().await;
            if vhost.broker().is_embedded() {
                return;
            }
            let told = format!("{queue:?}, cut at {at}");
            let owner = client_with(&vhost, queue.clone()).await;
            let other = Topology::new().queue(Queue::quorum("other"));
            soon("a queue", owner.apply(&other)).await.unwrap();
            let messages = (0..COUNT).map(|n| ("q", Message::new(n.to_string())));
            let publisher = publisher(&owner).await;
            soon("outcomes", publisher.publish_batch(messages)).await.unwrap();
            let proxy = FaultProxy::to(vhost.broker().addr()).await;
            let mover = soon("a client", Client::connect(proxy.url(&vhost.url()))).await.unwrap();
            let mut is_cut = false;
            let edit = |message: &ParkedMessage, draft: &mut Draft| {
                draft.target = Target::queue("other");
                match std::str::from_utf8(message.body()).unwrap().parse::<u32>().unwrap() {
                    // Confirms come late from here on.
                    n if n + 90 == at && !is_cut => {
                        proxy.delay(Direction::ToClient, Duration::from_millis(300));
                    }
                    n if n == at && !is_cut => {
                        is_cut = true;
                        proxy.delay(Direction::ToClient, Duration::ZERO);
                        proxy.cut(Cut::Reset);
                    }
                    _ => {}
                }
            };
            let done = soon("a move", mover.parking_lot("q").edit(edit).run()).await.unwrap();
            assert!(is_cut, "{told}");
            assert_eq!(done.done, u64::from(COUNT), "{told}");
            until_depth(&owner, "q", 0).await;
            let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
            let arrived = owner.inspect_queue("other").await.unwrap().messages;
            let mut stream = owner.consumer("other").stream().await.unwrap();
            for _ in 0..arrived {
                let delivery = next(&mut stream).await;
                let n = std::str::from_utf8(delivery.body()).unwrap().parse().unwrap();
                *counts.entry(n).or_default() += 1;
                delivery.ack().unwrap();
            }
            assert_eq!(counts.len(), COUNT as usize, "{told}: all have arrived");
            let often: Vec<_> = counts.iter().filter(|(_, count)| **count > 2).collect();
            assert!(often.is_empty(), "{told}: {} are there more than twice", often.len());
        }
    }
}
