//! What tasks on parking lots count, if connections are cut in the middle.

use std::collections::BTreeSet;

use leveret::{Draft, ErrorKind, Filter, Message, ParkedMessage, Progress, Target, Task};
use leveret_broker::Broker;

use super::parking_cuts::{filled, lots};
use crate::{client_with, depth, soon};

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

#[tokio::test(start_paused = true)]
async fn what_could_not_be_sent_on_is_counted_once() {
    for (profile, lot) in lots() {
        for at in [1, 20, 250, 400] {
            let told = format!("{profile:?}, {lot:?}, cut at {at}");
            let (broker, client) = filled(profile, lot.clone()).await;
            // The broker refuses some, and for some no way is known.
            let edit = |message: &ParkedMessage, draft: &mut Draft| {
                let number: u32 = std::str::from_utf8(message.body()).unwrap().parse().unwrap();
                draft.target = match number % 10 {
                    3 => Target::queue("nowhere"),
                    7 => Target::Origin,
                    _ => Target::queue("other"),
                };
            };
            let done = cut_at(&broker, client.parking_lot("lot").edit(edit), at).await;
            assert_eq!((done.selected, done.done, done.failed), (800, 640, 160), "{told}");
            assert_eq!(depth(&broker, "lot"), Some(160), "{told}");
        }
    }
}

/// They are acked one by one; what follows was given back before, and is handed out in the order in which it is given back.
#[tokio::test(start_paused = true)]
async fn what_follows_many_acks_keeps_its_order() {
    for (profile, lot) in lots() {
        let told = format!("{profile:?}, {lot:?}");
        let (_broker, client) = filled(profile, lot).await;
        let lot = client.parking_lot("lot");
        let all = Filter::new();
        assert_eq!(soon("a list", lot.list(&all, 1000)).await.unwrap().len(), 800, "{told}");
        let purge = lot.purge().limit(50).rate(10.0);
        assert_eq!(soon("a purge", purge.run()).await.unwrap().done, 50, "{told}");
        let left = soon("a list", lot.list(&all, 1000)).await.unwrap();
        let numbers = left.iter().map(|message| message.body().clone());
        assert!(numbers.eq((50..800).map(|n| n.to_string())), "{told}");
    }
}

/// Messages that are all alike: what comes again cannot be told from what comes for the first time, but counted.
#[tokio::test(start_paused = true)]
async fn a_limit_holds_for_messages_that_are_all_alike() {
    for (profile, lot) in lots() {
        for at in [1, 20, 250] {
            let told = format!("{profile:?}, {lot:?}, cut at {at}");
            let broker = Broker::builder().profile(profile).start().unwrap();
            let client = client_with(&broker, lot.clone()).await;
            let publisher = client.publisher("").build().await.unwrap();
            let alike = |_| ("lot", Message::new("alike").message_id("17"));
            publisher.publish_batch((0..800).map(alike)).await.unwrap();
            let lot = client.parking_lot("lot");
            // The acks have arrived; but nothing tells it.
            let slow = lot.purge().limit(300).rate(100.0);
            let done = cut_at(&broker, slow, at).await;
            assert_eq!(done.done, 300, "{told}");
            assert_eq!(depth(&broker, "lot"), Some(500), "{told}");
            // They have not.
            let done = cut_at(&broker, lot.purge().limit(300), at).await;
            assert_eq!(done.done, 300, "{told}");
            assert_eq!(depth(&broker, "lot"), Some(200), "{told}");
        }
    }
}

/// It could not tell which of the messages that come again it has written.
#[tokio::test(start_paused = true)]
async fn an_export_that_is_cut_off_writes_nothing_twice_and_says_how_much_is_written() {
    for (profile, lot) in lots() {
        for at in [1, 20, 400, 799] {
            let told = format!("{profile:?}, {lot:?}, cut at {at}");
            let (broker, client) = filled(profile, lot.clone()).await;
            let mut is_cut = false;
            let progress = |progress: &Progress| {
                if progress.done == at && !is_cut {
                    is_cut = true;
                    assert!(broker.faults().cut_connections_named("test (consuming)") > 0);
                }
            };
            let mut lines = Vec::new();
            let export = client.parking_lot("lot").export(&mut lines).progress(progress).run();
            let exported = soon("an export", export).await;
            let lines: Vec<serde_json::Value> = lines
                .split(|byte| *byte == b'\n')
                .filter_map(|line| serde_json::from_slice(line).ok())
                .collect();
            let bodies = lines.iter().map(|line| line["body"].as_str().unwrap().to_owned());
            assert!(bodies.eq((0..lines.len()).map(|n| n.to_string())), "{told}: {exported:?}");
            match exported {
                Ok(count) => assert_eq!((count, lines.len()), (800, 800), "{told}"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Lost, "{told}");
                    let written = format!("after {} messages", lines.len());
                    assert!(error.to_string().contains(&written), "{told}: {error}");
                }
            }
            assert_eq!(
                client.parking_lot("lot").list(&Filter::new(), 1000).await.unwrap().len(),
                800
            );
        }
    }
}
