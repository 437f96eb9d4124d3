//! What tasks on parking lots count, if connections are cut in the middle.

use std::collections::BTreeSet;

use leveret::{Client, Filter, Message, Progress, Queue, Target, Task, Topology};
use leveret_broker::{Broker, Profile};

use crate::{client_with, depth, soon};

/// A client of a broker with 800 messages in `lot`.
async fn filled(profile: Profile, lot: Queue) -> (Broker, Client) {
    let broker = Broker::builder().profile(profile).start().unwrap();
    let client = client_with(&broker, lot).await;
    client.apply(&Topology::new().queue(Queue::classic("other"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let message = |n: u32| Message::new(n.to_string()).header("odd", i64::from(n % 2));
    publisher.publish_batch((0..800).map(|n| ("lot", message(n)))).await.unwrap();
    (broker, client)
}

/// Runs a task, and cuts all connections when it has counted so many.
async fn cut_at(broker: &Broker, task: Task<'_>, at: u64) -> Progress {
    let mut is_cut = false;
    let progress = |progress: &Progress| {
        if progress.done == at && !is_cut {
            is_cut = true;
            broker.faults().cut_all_connections();
        }
    };
    let done = soon("a task", task.progress(progress).run()).await.unwrap();
    assert!(is_cut, "it was not cut at {at}: {done:?}");
    done
}

fn lots() -> [(Profile, Queue); 4] {
    // As it is for parked messages: what is lost to the limit is counted by nobody.
    let quorum = || Queue::quorum("lot").argument("x-delivery-limit", 1_000_000_000i64);
    [
        (Profile::RabbitMq3_10, quorum()),
        (Profile::RabbitMq3_10, Queue::classic("lot")),
        (Profile::RabbitMq4_3, quorum()),
        (Profile::RabbitMq4_3, Queue::classic("lot")),
    ]
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_that_is_cut_off_counts_each_message_once() {
    for (profile, lot) in lots() {
        for at in [1, 20, 400] {
            let told = format!("{profile:?}, {lot:?}, cut at {at}");
            let (broker, client) = filled(profile, lot.clone()).await;
            let lot = client.parking_lot("lot");
            let to_other = || lot.move_to(Target::queue("other"));
            let done = cut_at(&broker, to_other().dry_run(), at).await;
            assert_eq!((done.total, done.selected, done.done), (800, 800, 800), "{told}");
            let some = lot.purge().filter(Filter::new().header("odd", 1)).dry_run();
            let done = cut_at(&broker, some, at).await;
            assert_eq!((done.seen, done.selected, done.done), (800, 400, 400), "{told}");
            assert_eq!(depth(&broker, "lot"), Some(800), "{told}");
            // No way is known for any of them.
            let none = soon("a dry run", lot.replay().dry_run().run()).await.unwrap();
            assert_eq!((none.done, none.failed, none.not_done.len()), (0, 800, 100), "{told}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_said_to_have_left_a_lot_has_left_it() {
    for (profile, lot) in lots() {
        for at in [1, 20, 250, 400, 500] {
            let told = format!("{profile:?}, {lot:?}, cut at {at}");
            let (broker, client) = filled(profile, lot.clone()).await;
            let lot = client.parking_lot("lot");
            let done = cut_at(&broker, lot.purge().limit(500), at).await;
            assert_eq!((done.selected, done.done), (500, 500), "{told}");
            assert_eq!(depth(&broker, "lot"), Some(300), "{told}");
            let odd = Filter::new().header("odd", 1);
            let to_other = lot.move_to(Target::queue("other")).filter(odd).limit(120);
            let done = cut_at(&broker, to_other, at.min(120)).await;
            assert_eq!((done.selected, done.done), (120, 120), "{told}");
            assert_eq!(depth(&broker, "lot"), Some(180), "{told}");
            // Some may be there twice.
            let moved = client.parking_lot("other").list(&Filter::new(), 1000).await.unwrap();
            let moved: BTreeSet<_> = moved.iter().map(|message| message.body().clone()).collect();
            assert_eq!(moved.len(), 120, "{told}");
        }
    }
}
