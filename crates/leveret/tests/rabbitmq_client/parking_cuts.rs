//! What tasks on parking lots count, if their connections are cut in the middle.

use leveret::{Client, Filter, Message, Progress, Queue, Target, Task, Topology};
use leveret_testkit::FaultProxy;
use leveret_testkit::proxy::Cut;
use leveret_testkit::rabbitmq;

use crate::support::client::{client_with, publisher, soon, until_depth};

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
