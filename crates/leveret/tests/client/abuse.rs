//! What nobody should do, and somebody will.

use std::time::Duration;

use leveret::{Backoff, BatchOptions, Client, ErrorKind, Incoming, Queue, Retry, Topology};
use leveret_broker::Broker;
use tokio::time::sleep;

use crate::drops::{after_polls, begin_everything, message};
use crate::{broker, builder_of, client_of, client_with, depth, soon};

fn channels(broker: &Broker) -> usize {
    let snapshot = broker.snapshot();
    let host = snapshot.virtual_host("/").unwrap();
    host.connections.iter().map(|connection| connection.channels.len()).sum()
}

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    soon(what, async {
        while !is_so() {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// A fault that fits a number.
fn fault(broker: &Broker, number: usize) {
    match number % 4 {
        0 => broker.faults().cut_all_connections(),
        1 => assert!(broker.faults().cancel_consumers("/", "q") < 100),
        2 => assert!(broker.faults().cut_connections_named("test (publishing)") < 100),
        _ => broker.faults().nack_publishes(1),
    }
}

#[tokio::test(start_paused = true)]
async fn futures_that_are_dropped_at_any_point_leave_nothing_behind() {
    let broker = broker();
    let idle = tasks();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").timeout(Duration::from_secs(5)).build().await.unwrap();
    let pool = client.channel_pool().size(2).build().await.unwrap();
    let (before, at_work) = (channels(&broker), tasks());
    for polls in 0..40 {
        begin_everything(&client, &publisher, polls).await;
        fault(&broker, polls);
        begin_everything(&client, &publisher, polls).await;
        after_polls(polls, async {
            let channel = pool.borrow().await.unwrap();
            channel.publish(&message()).await.unwrap().await
        })
        .await;
    }
    let _ = soon("a flush", publisher.flush()).await;
    assert_eq!(publisher.unconfirmed(), 0);
    soon("an outcome", publisher.publish("q", "the last")).await.unwrap();
    soon("a check", client.check_health()).await;
    assert_eq!(pool.idle(), 2);
    until("channels to be closed", || channels(&broker) <= before).await;
    until("tasks to end", || tasks() <= at_work).await;
    assert!(client.health().is_healthy(), "{:?}", client.health());
    let host = broker.snapshot();
    let queue = host.virtual_host("/").unwrap().queue("q").unwrap();
    assert_eq!((queue.consumers.len(), queue.unsettled), (0, 0));

    drop((publisher, pool));
    soon("closing", client.close()).await;
    drop(client);
    until("all tasks to end", || tasks() <= idle).await;
}

#[tokio::test(start_paused = true)]
async fn closing_ends_everything_whatever_is_going_on() {
    let broker = broker();
    let idle = tasks();
    for pause in 0..30 {
        let client = client_with(&broker, Queue::classic("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        let mut deliveries = client.consumer("q").stream().await.unwrap();
        let reading = tokio::spawn(async move {
            while let Some(delivery) = deliveries.next().await {
                let _ = delivery.map(leveret::Delivery::ack);
            }
        });
        let publishing = tokio::spawn(async move {
            while publisher.publish("q", "1").await.is_ok() {
                sleep(Duration::from_millis(1)).await;
            }
        });
        match pause % 3 {
            0 => broker.faults().cut_all_connections(),
            1 => broker.faults().freeze(),
            _ => {}
        }
        for _ in 0..pause {
            tokio::task::yield_now().await;
        }
        sleep(Duration::from_millis(10 * (pause % 7))).await;
        // Two at once, and one of them is given up.
        let closing = async { tokio::join!(client.close(), after_polls(2, client.close())) };
        tokio::time::timeout(Duration::from_secs(200), closing).await.expect("closing to end");
        broker.faults().thaw();
        soon("the end of a stream", reading).await.unwrap();
        soon("the end of publishing", publishing).await.unwrap();
        let error = client.inspect_queue("q").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    }
    until("all tasks to end", || tasks() <= idle).await;
}

#[tokio::test(start_paused = true)]
async fn options_may_be_nothing_or_without_end() {
    let broker = broker();
    for (time, count) in [(Duration::ZERO, 0), (Duration::MAX, usize::MAX)] {
        let builder = builder_of(&broker).timeout(time.max(Duration::from_secs(9)));
        let backoff = Backoff { initial: time, multiplier: f64::NAN, max: time };
        let builder = builder.check_every(time).max_subscriptions(count).backoff(backoff);
        let client = soon("a client", builder.connect()).await.unwrap();
        soon("a queue", client.apply(&Topology::new().queue(Queue::classic("q")))).await.unwrap();

        let publisher = client.publisher("").window(count).resend_after(time);
        let publisher = publisher.timeout(time.max(Duration::from_secs(9)));
        let publisher = soon("a publisher", publisher.build()).await.unwrap();
        for _ in 0..3 {
            soon("an outcome", publisher.publish("q", "1")).await.unwrap();
        }
        soon("a flush", publisher.flush()).await.unwrap();
        let hasty = soon("an answer", client.publisher("").timeout(time).build()).await;
        if let Ok(hasty) = hasty {
            let _ = soon("an outcome", hasty.publish("q", "1")).await;
        }
        let _ = soon("an answer", client.publisher("").timeout(time).build_unconfirmed()).await;
        let pool = soon("an answer", client.channel_pool().size(count).build()).await;
        assert_eq!(pool.is_ok(), count == 0, "there are not so many channels");
        let _ = soon("an answer", client.channel_pool().size(1).timeout(time).build()).await;

        let size = u16::try_from(count).unwrap_or(u16::MAX);
        let batches = client.consumer("q").drain(time).missing_for(time).prefetch(size);
        let options = BatchOptions { size, within: time.min(Duration::from_secs(1)) };
        let stop = sleep(Duration::from_secs(3));
        soon("the end", batches.handle_batches(options, |_| async {}).run_until(stop))
            .await
            .unwrap();
        let forever = BatchOptions { size, within: time };
        let stop = sleep(Duration::from_secs(3));
        let batches = client.consumer("q").handle_batches(forever, |_| async {});
        soon("the end", batches.run_until(stop)).await.unwrap();

        publisher.publish("q", "2").await.unwrap();
        let workers = client.consumer("q").workers(count).deduplicate(time).drain(time);
        let workers = workers.retry(Retry::in_place(time));
        let stop = sleep(Duration::from_secs(1));
        soon("the end", workers.handle(|_: Incoming| async {}).run_until(stop)).await.unwrap();
        soon("closing", client.close()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_is_deleted_again_and_again_is_consumed_all_the_same() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let other = client_of(&broker).await;
    let publisher = client.publisher("").build().await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    for round in 0..50u32 {
        other.delete_queue("q", Default::default()).await.unwrap();
        if round % 3 == 0 {
            other.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
        }
        let body = round.to_string();
        // There may be no queue for a moment.
        let publishing = async {
            while publisher.publish("q", body.clone()).await.is_err() {
                sleep(Duration::from_millis(50)).await;
            }
        };
        let reading = async {
            let delivery = deliveries.next().await.unwrap().unwrap();
            assert_eq!(delivery.body(), body.as_bytes());
            delivery.ack().unwrap();
        };
        soon("a message", async { tokio::join!(publishing, reading) }).await;
    }
    until("old channels to be closed", || channels(&broker) <= 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_window_of_one_and_thousands_of_dropped_tickets() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").window(1).build().await.unwrap();
    let sending = (0..20).map(|_| {
        let publisher = publisher.clone();
        tokio::spawn(async move {
            for _ in 0..250 {
                drop(publisher.send("q", "1").await.unwrap());
            }
        })
    });
    let sending: Vec<_> = sending.collect();
    for _ in 0..10 {
        sleep(Duration::from_millis(1)).await;
        broker.faults().cut_connections_named("test (publishing)");
    }
    for one in sending {
        soon("all to be sent", one).await.unwrap();
    }
    soon("a flush", publisher.flush()).await.unwrap();
    assert!(depth(&broker, "q").unwrap() >= 5000);
    // Those that fail do not pile up, either.
    for _ in 0..1000 {
        drop(publisher.send("nowhere", "1").await.unwrap());
    }
    soon("a flush", publisher.flush()).await.unwrap();
    assert_eq!(publisher.unconfirmed(), 0);
}

#[tokio::test(start_paused = true)]
async fn two_clients_with_a_queue_of_the_same_name_of_their_own() {
    let broker = broker();
    let topology = Topology::new().queue(Queue::classic("mine").exclusive());
    let one = client_of(&broker).await;
    one.apply(&topology).await.unwrap();
    let two = client_of(&broker).await;
    let error = soon("an answer", two.apply(&topology)).await.unwrap_err();
    assert_eq!(error.reply_code(), Some(leveret::amqp::ReplyCode::RESOURCE_LOCKED), "{error}");
    let mut deliveries = one.consumer("mine").stream().await.unwrap();
    let publisher = two.publisher("").build().await.unwrap();
    for _ in 0..10 {
        broker.faults().cut_all_connections();
        soon("a message", async {
            let publishing = async {
                while publisher.publish("mine", "1").await.is_err() {
                    sleep(Duration::from_millis(50)).await;
                }
            };
            let reading = async { deliveries.next().await.unwrap().unwrap().ack().unwrap() };
            tokio::join!(publishing, reading)
        })
        .await;
    }
    soon("closing", one.close()).await;
    soon("a queue", two.apply(&topology)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_broker_and_its_standby_that_fail_back_and_forth() {
    let brokers = [broker(), broker()];
    let builder = Client::builder().broker(&brokers[0]).broker(&brokers[1]).name("test");
    let client = builder.connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    // A broker that lets one in and then does not answer is given up only after a while.
    let patience = Duration::from_secs(600);
    let publisher = client.publisher("").timeout(patience).build().await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    for round in 0..12 {
        let away = &brokers[round % 2];
        away.faults().freeze();
        away.faults().cut_all_connections();
        // What waits on the broker that is away comes when it is back.
        let body = round.to_string();
        let sending = async { publisher.publish("q", body.clone()).await.unwrap() };
        let reading = async {
            loop {
                let delivery = deliveries.next().await.unwrap().unwrap();
                let is_it = delivery.body() == body.as_bytes();
                let _ = delivery.ack();
                if is_it {
                    return;
                }
            }
        };
        let both = async { tokio::join!(sending, reading) };
        tokio::time::timeout(patience, both).await.expect("a message");
        away.faults().thaw();
    }
    until("health", || client.health().is_healthy()).await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_the_key_of_a_message_stops_nobody() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let publisher = client.publisher("").build().await.unwrap();
    publisher.publish_batch((0..4).map(|n| ("q", n.to_string()))).await.unwrap();
    for workers in [1, 4] {
        let consumer = client.consumer("q").workers(workers);
        let consumer = consumer.deduplicate_by(Duration::from_secs(1), |_| panic!("no key"));
        let stop = sleep(Duration::from_secs(1));
        let running = consumer.handle(|_: Incoming| async {}).run_until(stop);
        let summary = soon("the end", running).await.unwrap();
        assert_eq!(summary.handled, 4);
        publisher.publish_batch((0..4).map(|n| ("q", n.to_string()))).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn borrowers_that_leave_in_the_midst_of_confirms() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("q")).await;
    let pool = client.channel_pool().size(3).build().await.unwrap();
    let before = channels(&broker);
    let borrowing = (0..30u64).map(|number| {
        let pool = pool.clone();
        tokio::spawn(async move {
            for round in 0..20 {
                let channel = pool.borrow().await.unwrap();
                let confirmation = channel.publish(&message()).await;
                match (number + round) % 3 {
                    0 => drop(channel),
                    1 => channel.close_now(),
                    _ => assert!(channel.give_back().await.is_ok_and(|tally| tally.acked == 1)),
                }
                drop(confirmation);
            }
        })
    });
    let borrowing: Vec<_> = borrowing.collect();
    for one in borrowing {
        soon("all borrowers", one).await.unwrap();
    }
    soon("a check", client.check_health()).await;
    // The pool borrows a broken channel itself for as long as it takes to open it again.
    until("all channels to be open and idle", || {
        let health = client.health();
        (health.pools[0].open, health.pools[0].borrowed, pool.idle()) == (3, 0, 3)
    })
    .await;
    until("no more channels than there should be", || channels(&broker) == before).await;
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_the_broker_names_is_found_again_after_every_restart() {
    let broker = broker();
    let client = client_of(&broker).await;
    client.apply(&Topology::new().queue(Queue::temporary("mine"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let mut deliveries = client.consumer("mine").stream().await.unwrap();
    let mut names = std::collections::HashSet::new();
    for round in 0..10 {
        let name = client.queue_name("mine");
        names.insert(name.clone());
        let body = round.to_string();
        soon("an outcome", publisher.publish(&name, body.clone())).await.unwrap();
        let delivery = soon("a delivery", deliveries.next()).await.unwrap().unwrap();
        assert_eq!(delivery.body(), body.as_bytes());
        delivery.ack().unwrap();
        broker.restart().await;
        // The consumer begins anew when it is read.
        let is_up = || client.health().connections.iter().all(|connection| connection.is_up);
        until("another queue", || is_up() && client.queue_name("mine") != name).await;
    }
    assert_eq!(names.len(), 10);
    assert_eq!(broker.snapshot().virtual_host("/").unwrap().queues.len(), 1);
}
