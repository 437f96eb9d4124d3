//! Parking lots on the embedded broker, if connections are cut or publishers stopped in the middle: how often a message is sent, what
//! is shown, and what is put back.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::time::Duration;

use leveret::{
    Client, Draft, ErrorKind, Filter, Message, ParkedMessage, Progress, Queue, Target, Topology,
};
use leveret_broker::{Broker, Profile};

use crate::{client_with, depth, soon};

const COUNT: u32 = 800;

/// A client of a broker with messages `0`, `1` and so on in `lot`, each of which says whether its number is odd.
pub(super) async fn filled(profile: Profile, lot: Queue) -> (Broker, Client) {
    let broker = Broker::builder().profile(profile).start().unwrap();
    let client = client_with(&broker, lot).await;
    client.apply(&Topology::new().queue(Queue::classic("other"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let message = |n: u32| Message::new(n.to_string()).header("odd", i64::from(n % 2));
    publisher.publish_batch((0..COUNT).map(|n| ("lot", message(n)))).await.unwrap();
    (broker, client)
}

/// Nothing is lost to their limit if a connection is cut.
pub(super) fn lots() -> [(Profile, Queue); 4] {
    let quorum = || Queue::quorum("lot").argument("x-delivery-limit", 1_000_000_000i64);
    [
        (Profile::RabbitMq3_10, quorum()),
        (Profile::RabbitMq3_10, Queue::classic("lot")),
        (Profile::RabbitMq4_3, quorum()),
        (Profile::RabbitMq4_3, Queue::classic("lot")),
    ]
}

const CUTS: [&str; 3] = ["all", "test (publishing)", "test (consuming)"];

fn cut(broker: &Broker, which: &str) {
    match which {
        "all" => broker.faults().cut_all_connections(),
        name => assert!(broker.faults().cut_connections_named(name) > 0, "no connection {name}"),
    }
}

fn number(body: &[u8]) -> u32 {
    std::str::from_utf8(body).unwrap().parse().unwrap()
}

/// How often each message is in these queues.
async fn counts(broker: &Broker, client: &Client, queues: &[&str]) -> BTreeMap<u32, u32> {
    let mut counts = BTreeMap::new();
    for queue in queues {
        let messages = depth(broker, queue).unwrap();
        let mut deliveries = client.consumer(*queue).stream().await.unwrap();
        for _ in 0..messages {
            let delivery = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
            *counts.entry(number(delivery.body())).or_default() += 1;
            delivery.ack().unwrap();
        }
    }
    counts
}

/// Moves everything to `other`, and cuts connections when the message of this number is looked at: those before it are under way. Says how
/// often each message has arrived.
async fn move_and_cut(
    (broker, client): &(Broker, Client),
    which: &str,
    at: u32,
) -> BTreeMap<u32, u32> {
    let mut is_cut = false;
    let edit = |message: &ParkedMessage, draft: &mut Draft| {
        draft.target = Target::queue("other");
        if number(message.body()) == at && !is_cut {
            is_cut = true;
            cut(broker, which);
        }
    };
    let done = soon("a move", client.parking_lot("lot").edit(edit).run()).await.unwrap();
    assert!(is_cut, "it is not cut at {at}");
    assert_eq!(done.done, u64::from(COUNT));
    assert_eq!(depth(broker, "lot"), Some(0));
    let counts = counts(broker, client, &["other"]).await;
    assert_eq!(counts.len(), COUNT as usize, "all have arrived");
    counts
}

#[tokio::test(start_paused = true)]
async fn a_cut_doubles_a_message_once_and_only_what_was_under_way() {
    for (profile, lot) in lots() {
        for which in CUTS {
            for at in [15, 90, 280, 410] {
                let told = format!("{profile:?}, {lot:?}, {which} cut at {at}");
                let counts = move_and_cut(&filled(profile, lot.clone()).await, which, at).await;
                let often: Vec<_> = counts.iter().filter(|(_, count)| **count > 2).collect();
                assert!(often.is_empty(), "{told}: {} are there more than twice", often.len());
                // What is sent together, and what was sent when the acks of that before were on their way.
                let doubled = counts.values().filter(|count| **count > 1).count();
                assert!(doubled <= 200, "{told}: {doubled} are there twice");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_look_that_is_cut_off_is_done_only_if_all_were_shown() {
    for (profile, lot) in lots() {
        for which in CUTS {
            for at in [1, 16, 17, 100, 500, 799, 800] {
                let told = format!("{profile:?}, {lot:?}, {which} cut at {at}");
                let (broker, client) = filled(profile, lot.clone()).await;
                let mut shown = Vec::new();
                let mut is_cut = false;
                let look = |message: &ParkedMessage| {
                    if message.position() == 1 {
                        shown.clear();
                    }
                    shown.push(number(message.body()));
                    if shown.len() == at && !is_cut {
                        is_cut = true;
                        // A look does not publish.
                        match which {
                            "test (publishing)" => {
                                broker.faults().cut_connections_named(which);
                            }
                            _ => cut(&broker, which),
                        }
                    }
                    ControlFlow::Continue(())
                };
                let seen = soon("a look", client.parking_lot("lot").look(look).run()).await;
                let seen = seen.unwrap_or_else(|error| panic!("{told}: {error}"));
                assert_eq!(seen.seen, u64::from(COUNT), "{told}");
                assert!(shown.iter().copied().eq(0..COUNT), "{told}: {} shown", shown.len());
                assert_eq!(depth(&broker, "lot"), Some(COUNT as usize), "{told}");
            }
        }
    }
}

/// Brokers learn later than clients that a connection is gone. Here somebody else has messages out for a while: that is the same to who
/// looks.
#[tokio::test(start_paused = true)]
async fn a_look_that_is_cut_off_waits_for_what_the_broker_has_not_given_back_yet() {
    for (profile, lot) in lots() {
        let told = format!("{profile:?}, {lot:?}");
        let (broker, client) = filled(profile, lot).await;
        let other = Client::builder().broker(&broker).name("other").connect().await.unwrap();
        let (cut, is_cut) = tokio::sync::oneshot::channel();
        // While the other one is away: time stands still as long as this has something to do.
        let holding = tokio::spawn(async move {
            is_cut.await.unwrap();
            let mut held = Vec::new();
            for _ in 0..100 {
                held.push(other.get("lot", Default::default()).await.unwrap().expect("a message"));
            }
            tokio::time::sleep(Duration::from_secs(10)).await;
            held.into_iter().for_each(|delivery| delivery.requeue().unwrap());
            other.close().await;
        });
        let mut cut = Some(cut);
        let mut shown = BTreeSet::new();
        let look = |message: &ParkedMessage| {
            shown.insert(number(message.body()));
            if shown.len() == 5
                && let Some(cut) = cut.take()
            {
                broker.faults().cut_connections_named("test (consuming)");
                cut.send(()).unwrap();
                shown.clear();
            }
            ControlFlow::Continue(())
        };
        let seen = soon("a look", client.parking_lot("lot").look(look).run()).await.unwrap();
        holding.await.unwrap();
        assert_eq!(seen.seen, u64::from(COUNT), "{told}");
        assert_eq!(shown.len(), COUNT as usize, "{told}");
    }
}

/// The broker would count what it gives back because a channel closes, and drop it.
#[tokio::test(start_paused = true)]
async fn what_is_under_way_when_the_broker_takes_no_more_is_put_back_once_it_does() {
    for at in [1, 16, 17, 100] {
        let lot = Queue::quorum("lot").delivery_limit(0);
        let (broker, client) = filled(Profile::RabbitMq3_10, lot).await;
        let broker = &broker;
        let mut is_blocked = false;
        let progress = move |progress: &Progress| {
            if progress.done >= at && !is_blocked {
                is_blocked = true;
                broker.faults().block("low on memory");
            }
        };
        let lot = client.parking_lot("lot");
        let mut to_other = Box::pin(lot.move_to(Target::queue("other")).progress(progress).run());
        // The task gives up, and has a while to put back what it has out.
        let patience = Duration::from_secs(30);
        let unblocking = async {
            tokio::time::sleep(patience + Duration::from_secs(10)).await;
            broker.faults().unblock();
        };
        let (moved, ()) = tokio::join!(soon("a move", &mut to_other), unblocking);
        let told = format!("blocked at {at}: {moved:?}");
        drop(to_other);
        soon("the end", client.close()).await;
        let client = crate::client_of(broker).await;
        let counts = counts(broker, &client, &["lot", "other"]).await;
        let lost = (0..COUNT).filter(|n| !counts.contains_key(n)).count();
        assert_eq!(lost, 0, "{told}");
    }
}

/// Before 4.3 the broker counts what is given back; nothing is published instead.
#[tokio::test(start_paused = true)]
async fn a_look_publishes_nothing_and_a_dropped_one_gives_everything_back_in_its_order() {
    for (profile, lot) in lots() {
        let (broker, client) = filled(profile, lot).await;
        let looker = Client::builder().broker(&broker).name("looker").connect().await.unwrap();
        let lot = looker.parking_lot("lot");
        let published = || broker.snapshot().virtual_host("/").unwrap().tally.published;
        let before = published();
        assert_eq!(soon("a peek", lot.list(&Filter::new(), 1)).await.unwrap().len(), 1);
        for at in [1, 17, 300] {
            let mut shown = 0;
            let enough = tokio::sync::Notify::new();
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
        soon("the end", looker.close()).await;
        assert_eq!(published(), before, "{profile:?}");
        let mut deliveries = client.consumer("lot").stream().await.unwrap();
        for n in 0..COUNT {
            let delivery = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
            assert_eq!(number(delivery.body()), n, "{profile:?}");
            delivery.ack().unwrap();
        }
    }
}

/// It would be worn out by looks, so nothing is taken from it at all; what is to leave as a whole need not come back.
#[tokio::test(start_paused = true)]
async fn a_look_that_may_cost_messages_is_refused_before_anything_is_taken() {
    for limit in [None, Some(0), Some(5)] {
        let lot = match limit {
            None => Queue::quorum("lot"),
            Some(limit) => Queue::quorum("lot").delivery_limit(limit),
        };
        let (broker, client) = filled(Profile::RabbitMq3_10, lot).await;
        let lot = client.parking_lot("lot");
        let some = Filter::new().message_id("no");
        // Some cannot be sent on: they would have to be given back.
        let edit = |message: &ParkedMessage, draft: &mut Draft| {
            let is_odd = number(message.body()) % 2 == 1;
            draft.target = Target::queue(if is_odd { "nowhere" } else { "other" });
        };
        for task in [
            lot.look(|_| ControlFlow::Continue(())),
            lot.edit(edit),
            lot.move_to(Target::queue("other")).dry_run(),
            lot.move_to(Target::queue("other")).filter(some.clone()),
            lot.purge().filter(some),
        ] {
            let error = soon("an answer", task.run()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused, "{limit:?}: {error}");
            assert!(error.to_string().contains("--allow-counted-returns"), "{error}");
        }
        assert_eq!((depth(&broker, "lot"), depth(&broker, "other")), (Some(800), Some(0)));
        if limit != Some(0) {
            let lot = lot.allow_counted_returns();
            let progress = soon("a move", lot.edit(edit).run()).await.unwrap();
            assert_eq!((progress.done, progress.failed), (400, 400), "{limit:?}");
            assert_eq!((depth(&broker, "lot"), depth(&broker, "other")), (Some(400), Some(400)));
            let found = soon("a list", lot.list(&Filter::new(), 1000)).await.unwrap();
            assert!(found.iter().all(|message| number(message.body()) % 2 == 1), "{limit:?}");
            assert_eq!(found.len(), 400, "{limit:?}");
        }
    }
}

/// A rate-limited task acks each message as soon as it is confirmed.
#[tokio::test(start_paused = true)]
async fn a_slow_replay_that_is_cut_off_sends_at_most_what_was_in_flight_twice_and_says_so() {
    for (profile, lot) in lots() {
        for which in CUTS {
            let told = format!("{profile:?}, {lot:?}, {which}");
            let (broker, client) = filled(profile, lot.clone()).await;
            let mut is_cut = false;
            let progress = |progress: &Progress| {
                if progress.done == 100 && !is_cut {
                    is_cut = true;
                    cut(&broker, which);
                }
            };
            let to_other = client.parking_lot("lot").move_to(Target::queue("other"));
            let slow = to_other.limit(200).rate(20.0).progress(progress);
            let done = soon("a move", slow.run()).await.unwrap();
            assert_eq!((done.done, depth(&broker, "lot")), (200, Some(600)), "{told}: {done:?}");
            let arrived = depth(&broker, "other").unwrap() as u64;
            assert!(arrived - 200 <= done.possibly_duplicated, "{told}: {arrived}, {done:?}");
            assert!(done.possibly_duplicated <= 64, "{told}: {done:?}");
        }
    }
}
