//! When a broker that falls silent counts as dead, with the options that everybody has by default.

use std::time::Duration;

use leveret_amqp::{
    Channel, Confirm, Confirmation, Connection, ErrorKind, Flow, Options, Outcome, Publish,
    QueueOptions,
};
use leveret_testkit::peer::Received;
use leveret_wire::method::{basic, channel, connection, queue};
use leveret_wire::{Method, ShortStr};
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Broker, confirming, connected_with, open_channel};
use crate::{SOON, tune};

/// What RabbitMQ proposes.
const PROPOSED: u16 = 60;

const LONG: Duration = Duration::from_secs(3600);

async fn connected() -> (Connection, Broker) {
    connected_with(Options::default(), tune(PROPOSED)).await
}

/// A connection with a publish that the broker does not confirm.
async fn waiting() -> (Connection, Channel<Confirm>, Confirmation, Broker) {
    let (connection, mut broker) = connected().await;
    let channel = confirming(&connection, &mut broker).await;
    let confirmation = channel.publish(&Publish::default()).await.unwrap();
    broker.expect_content::<basic::Publish<'_>>(channel.id()).await;
    (connection, channel, confirmation, broker)
}

/// Plays a broker until it has been asked so many times.
async fn until_asked(broker: &mut Broker, times: usize, answers: bool) {
    let mut asked = 0;
    while asked < times {
        match broker.receive().await {
            Received::Method(id, Method::ChannelFlow(channel::Flow { active: true })) => {
                asked += 1;
                if answers {
                    broker.send(id, &channel::FlowOk { active: true }).await;
                }
            }
            Received::Heartbeat => {}
            other => panic!("awaited a question; instead came {other:?}"),
        }
    }
}

/// Reads and never answers.
async fn fall_silent(broker: &mut Broker) {
    loop {
        if matches!(broker.receive().await, Received::End) {
            std::future::pending().await
        }
    }
}

#[tokio::test]
async fn a_short_heartbeat_is_agreed_on_unless_the_broker_wants_a_shorter_one_or_none() {
    for (proposed, agreed) in [(60, 10), (10, 10), (5, 5), (0, 0)] {
        let (connection, _broker) = connected_with(Options::default(), tune(proposed)).await;
        assert_eq!(connection.heartbeat(), Duration::from_secs(agreed));
    }
}

#[tokio::test(start_paused = true)]
async fn a_publish_is_lost_seconds_after_the_broker_has_fallen_silent() {
    let (connection, _channel, confirmation, mut broker) = waiting().await;
    let began = Instant::now();
    let outcome = tokio::select! {
        outcome = timeout(SOON, confirmation) => outcome.unwrap(),
        () = fall_silent(&mut broker) => unreachable!("it never ends"),
    };
    assert!(matches!(outcome, Outcome::Lost(_)), "{outcome:?}");
    assert!(began.elapsed() < Duration::from_secs(16), "{:?}", began.elapsed());
    assert_eq!(connection.ended().await.kind(), ErrorKind::HeartbeatLost);
}

#[tokio::test(start_paused = true)]
async fn a_call_fails_seconds_after_the_broker_has_fallen_silent() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let began = Instant::now();
    let result = tokio::select! {
        result = channel.declare_queue("q", QueueOptions::default()) => result,
        () = fall_silent(&mut broker) => unreachable!("it never ends"),
    };
    assert_eq!(result.unwrap_err().kind(), ErrorKind::HeartbeatLost);
    assert!(began.elapsed() < Duration::from_secs(16), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_question_leaves_a_channel_paused() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    for (flow, active) in [(Flow::Pause, false), (Flow::Resume, true)] {
        let asked = async {
            let flow: channel::Flow = broker.expect(channel.id()).await;
            broker.send(channel.id(), &channel::FlowOk { active: flow.active }).await;
            flow.active
        };
        let (answered, asked) = tokio::join!(channel.flow(flow), asked);
        answered.unwrap();
        assert_eq!(asked, active);
        // The second is the question, because the first gets no answer.
        let declaring = channel.declare_queue("q", QueueOptions::default());
        let asked = async {
            let _: queue::Declare<'_> = broker.expect(channel.id()).await;
            let flow: channel::Flow = broker.expect(channel.id()).await;
            broker.send(channel.id(), &channel::FlowOk { active: flow.active }).await;
            let queue = ShortStr::from_static("q");
            let declared = queue::DeclareOk { queue, message_count: 0, consumer_count: 0 };
            broker.send(channel.id(), &declared).await;
            flow.active
        };
        let (declared, asked) = tokio::join!(declaring, asked);
        declared.unwrap();
        assert_eq!(asked, active);
    }
}

#[tokio::test(start_paused = true)]
async fn where_nothing_waits_a_silent_broker_is_given_two_intervals() {
    let (connection, mut broker) = connected().await;
    let _channel = open_channel(&connection, &mut broker).await;
    let began = Instant::now();
    let error = tokio::select! {
        error = connection.ended() => error,
        () = fall_silent(&mut broker) => unreachable!("it never ends"),
    };
    assert_eq!(error.kind(), ErrorKind::HeartbeatLost);
    let took = began.elapsed().as_secs();
    assert!((20..25).contains(&took), "{took} s");
}

#[tokio::test(start_paused = true)]
async fn other_heartbeat_intervals_mean_other_times() {
    for interval in [4, 20, 60] {
        for awaited in [false, true] {
            let mut options = Options::default();
            options.heartbeat = Some(Duration::from_secs(interval));
            let (connection, mut broker) = connected_with(options, tune(PROPOSED)).await;
            let channel = confirming(&connection, &mut broker).await;
            if awaited {
                drop(channel.publish(&Publish::default()).await.unwrap());
            }
            let began = Instant::now();
            tokio::select! {
                error = connection.ended() => assert_eq!(error.kind(), ErrorKind::HeartbeatLost),
                () = fall_silent(&mut broker) => unreachable!("it never ends"),
            }
            let least = if awaited { interval + 2 } else { interval * 2 };
            let took = began.elapsed().as_secs();
            assert!((least..=least + 5).contains(&took), "{took} s with {interval} s, {awaited}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn without_heartbeats_silence_is_not_noticed() {
    let mut options = Options::default();
    options.heartbeat = Some(Duration::ZERO);
    let (connection, mut broker) = connected_with(options, tune(PROPOSED)).await;
    let channel = confirming(&connection, &mut broker).await;
    let confirmation = channel.publish(&Publish::default()).await.unwrap();
    assert!(timeout(LONG, confirmation).await.is_err(), "nothing was confirmed");
    assert!(!connection.is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_answers_may_take_as_long_as_it_likes_to_confirm() {
    let (_connection, channel, mut confirmation, mut broker) = waiting().await;
    // It sends nothing else, not even heartbeats.
    tokio::select! {
        _ = timeout(LONG, &mut confirmation) => panic!("nothing was confirmed"),
        () = until_asked(&mut broker, 300, true) => {}
    }
    broker.send(channel.id(), &basic::Ack { delivery_tag: 1, multiple: false }).await;
    assert!(timeout(SOON, confirmation).await.unwrap().is_acked());
}

/// As RabbitMQ does to a publisher that is too fast: it reads no more, and sends heartbeats all the same.
#[tokio::test(start_paused = true)]
async fn a_broker_that_answers_nothing_and_sends_heartbeats_is_alive() {
    let (connection, channel, confirmation, mut broker) = waiting().await;
    for _ in 0..100 {
        // One interval is the longest time that RabbitMQ leaves between two frames.
        sleep(Duration::from_secs(10)).await;
        broker.send_heartbeat().await;
    }
    assert!(!connection.is_closed());
    broker.send(channel.id(), &basic::Ack { delivery_tag: 1, multiple: false }).await;
    assert!(timeout(SOON, confirmation).await.unwrap().is_acked());
}

#[tokio::test(start_paused = true)]
async fn a_blocked_connection_is_not_asked() {
    let (connection, channel, confirmation, mut broker) = waiting().await;
    let reason = ShortStr::from_static("low on memory");
    broker.send(0, &connection::Blocked { reason }).await;
    for _ in 0..20 {
        broker.expect_heartbeat().await;
        broker.send_heartbeat().await;
    }
    assert!(!connection.is_closed());
    broker.send(0, &connection::Unblocked {}).await;
    broker.send(channel.id(), &basic::Ack { delivery_tag: 1, multiple: false }).await;
    assert!(timeout(SOON, confirmation).await.unwrap().is_acked());
}

#[tokio::test(start_paused = true)]
async fn a_question_whose_answer_comes_late_disturbs_nothing() {
    let (connection, mut broker) = connected().await;
    let channel = open_channel(&connection, &mut broker).await;
    let id = channel.id();
    let declare = channel.declare_queue("q", QueueOptions::default());
    let (declared, ()) = tokio::join!(declare, async {
        broker.expect::<queue::Declare<'_>>(id).await;
        until_asked(&mut broker, 1, false).await;
        let name = ShortStr::from_static("q");
        broker.send(id, &queue::DeclareOk { queue: name, ..Default::default() }).await;
    });
    declared.unwrap();
    broker.send(id, &channel::FlowOk { active: true }).await;
    let (declared, ()) = tokio::join!(channel.declare_queue("q", QueueOptions::default()), async {
        broker.expect::<queue::Declare<'_>>(id).await;
        let name = ShortStr::from_static("q");
        broker.send(id, &queue::DeclareOk { queue: name, ..Default::default() }).await;
    });
    declared.unwrap();
}
