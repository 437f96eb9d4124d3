//! The promises of docs/failover.md, each with the settings that everybody has by default.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::{
    Client, ClientBuilder, ClientEvent, ClientEvents, Deliveries, ErrorKind, Health, Publisher,
    Queue, Topology,
};
use leveret_broker::Broker;
use tokio::time::{Instant, sleep};

use crate::{broker, depth, soon};

/// Within this a publisher has gone on at the standby: well below the time that a publish may take.
const FAILED_OVER: Duration = Duration::from_secs(20);

/// Within this its consumers are there, too.
const FOLLOWED: Duration = Duration::from_secs(30);

fn builder(brokers: &[&Broker]) -> ClientBuilder {
    brokers.iter().fold(Client::builder(), |builder, broker| builder.broker(broker))
}

/// A client with a queue, a publisher and a consumer.
struct Scene {
    client: Client,
    publisher: Publisher,
    deliveries: Deliveries,
    events: ClientEvents,
}

impl Scene {
    async fn of(brokers: &[&Broker]) -> Scene {
        let client = soon("a client", builder(brokers).connect()).await.unwrap();
        client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
        let publisher = client.publisher("").build().await.unwrap();
        let deliveries = client.consumer("q").stream().await.unwrap();
        let mut scene = Scene { events: client.watch(), client, publisher, deliveries };
        scene.works("the first").await;
        scene
    }

    async fn works(&mut self, body: &'static str) {
        soon("an outcome", self.publisher.publish("q", body)).await.unwrap();
        self.gets(body).await;
    }

    async fn gets(&mut self, body: &str) {
        let delivery = soon("a delivery", self.deliveries.next()).await.unwrap().unwrap();
        assert_eq!(delivery.body(), body);
        delivery.ack().unwrap();
    }

    async fn is_where(&self, is_so: impl Fn(&Health) -> bool) {
        soon("another state of health", async {
            while !is_so(&self.client.health()) {
                sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    /// What was lost since this was called last.
    async fn losses(&mut self) -> Vec<String> {
        let mut losses = Vec::new();
        while let Ok(Some(event)) = tokio::time::timeout(Duration::ZERO, self.events.next()).await {
            if matches!(event, ClientEvent::Lost { .. }) {
                losses.push(event.to_string());
            }
        }
        losses
    }
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_falls_silent_costs_publishers_and_consumers_no_more_than_a_pause() {
    let (main, standby) = (broker(), broker());
    let mut scene = Scene::of(&[&main, &standby]).await;
    main.faults().freeze();
    let began = Instant::now();
    scene.publisher.publish("q", "to the standby").await.unwrap();
    assert!(began.elapsed() < FAILED_OVER, "{:?}", began.elapsed());
    scene.gets("to the standby").await;
    assert!(began.elapsed() < FOLLOWED, "{:?}", began.elapsed());
    scene.is_where(Health::is_healthy).await;
    scene.works("and more").await;
}

#[tokio::test(start_paused = true)]
async fn when_one_connection_has_left_a_silent_broker_the_others_soon_follow() {
    let (main, standby) = (broker(), broker());
    let mut scene = Scene::of(&[&main, &standby]).await;
    let theirs = builder(&[&main]).connect().await.unwrap();
    let their_publisher = theirs.publisher("").build().await.unwrap();
    // The connection for consuming hears from the broker later than the other one: its own two intervals end later.
    sleep(Duration::from_secs(4)).await;
    their_publisher.publish("q", "to the main one").await.unwrap();
    scene.gets("to the main one").await;
    main.faults().freeze();
    let _ticket = scene.publisher.send("q", "to the standby").await.unwrap();
    let mut lost_at = Vec::new();
    while lost_at.len() < 2 {
        if let Some(ClientEvent::Lost { .. }) = soon("an event", scene.events.next()).await {
            lost_at.push(Instant::now());
        }
    }
    let between = lost_at[1] - lost_at[0];
    assert!(between <= Duration::from_secs(8), "{between:?}");
}

#[tokio::test(start_paused = true)]
async fn consumers_go_on_while_the_broker_blocks_publishers() {
    let broker = broker();
    let mut scene = Scene::of(&[&broker]).await;
    let theirs = builder(&[&broker]).connect().await.unwrap();
    let their_publisher = theirs.publisher("").build().await.unwrap();
    for body in ["1", "2", "3"] {
        their_publisher.publish("q", body).await.unwrap();
    }
    broker.faults().block("low on memory");
    // The broker tells a connection that it is blocked once that publishes.
    let waiting = scene.publisher.send("q", "4").await.unwrap();
    scene.is_where(|health| !health.is_healthy()).await;
    for body in ["1", "2", "3"] {
        scene.gets(body).await;
    }
    broker.faults().unblock();
    soon("an outcome", waiting).await.unwrap();
    scene.gets("4").await;
}

#[tokio::test(start_paused = true)]
async fn a_thousand_consumers_share_a_connection_and_the_next_one_opens_another() {
    let broker = broker();
    let client = builder(&[&broker]).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::classic("q"))).await.unwrap();
    let mut all = Vec::new();
    for _ in 0..1000 {
        all.push(client.consumer("q").stream().await.unwrap());
    }
    let connections = || broker.snapshot().virtual_host("/").unwrap().connections.len();
    assert_eq!(connections(), 1);
    all.push(client.consumer("q").stream().await.unwrap());
    assert_eq!(connections(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_falls_silent_is_left_by_consumers_alone_too() {
    let (main, standby) = (broker(), broker());
    let client = builder(&[&main, &standby]).connect().await.unwrap();
    client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    let mut deliveries = client.consumer("q").stream().await.unwrap();
    main.faults().freeze();
    let began = Instant::now();
    let reading = async { deliveries.next().await.unwrap().unwrap().ack().unwrap() };
    let publishing = async {
        let theirs = builder(&[&standby]).connect().await.unwrap();
        theirs.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
        theirs.publisher("").build().await.unwrap().publish("q", "1").await.unwrap();
    };
    soon("a delivery", async { tokio::join!(reading, publishing) }).await;
    assert!(began.elapsed() < Duration::from_secs(35), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_call_to_a_broker_that_falls_silent_is_answered_by_the_standby() {
    let (main, standby) = (broker(), broker());
    let scene = Scene::of(&[&main, &standby]).await;
    main.faults().freeze();
    let began = Instant::now();
    scene.client.inspect_queue("q").await.unwrap();
    assert!(began.elapsed() < FAILED_OVER, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn while_a_publish_waits_for_a_silent_broker_health_says_so() {
    let broker = broker();
    let scene = Scene::of(&[&broker]).await;
    broker.faults().freeze();
    assert!(scene.client.health().is_healthy());
    let _ticket = scene.publisher.send("q", "waits").await.unwrap();
    sleep(Duration::from_secs(9)).await;
    // The connection is not given up yet.
    let health = scene.client.health();
    let publishing = &health.connections[1];
    assert!(!publishing.is_up && publishing.error.is_some() && !health.is_healthy(), "{health:?}");
    broker.faults().thaw();
    scene.is_where(Health::is_healthy).await;
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_blocks_publishers_for_long_is_not_left() {
    let (main, standby) = (broker(), broker());
    let mut scene = Scene::of(&[&main, &standby]).await;
    main.faults().block("low on memory");
    // The broker tells a connection that it is blocked once that publishes.
    scene.works("the last").await;
    let waiting = tokio::spawn({
        let publisher = scene.publisher.clone();
        async move { publisher.publish("q", "in vain").await }
    });
    sleep(Duration::from_secs(300)).await;
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!(error.blocked_by_broker(), Some("low on memory"), "{error}");
    assert!(!scene.client.health().is_healthy());
    main.faults().unblock();
    scene.is_where(Health::is_healthy).await;
    scene.works("again").await;
    assert_eq!(scene.losses().await, [""; 0]);
    assert_eq!(depth(&standby, "q"), None);
}

#[tokio::test(start_paused = true)]
async fn what_is_not_confirmed_is_published_again_in_order_after_the_topology() {
    let (main, standby) = (broker(), broker());
    let mut scene = Scene::of(&[&main, &standby]).await;
    main.faults().freeze();
    let mut tickets = Vec::new();
    for number in 0..100 {
        tickets.push(scene.publisher.send("q", number.to_string()).await.unwrap());
    }
    main.faults().cut_all_connections();
    for ticket in tickets {
        soon("an outcome", ticket).await.unwrap();
    }
    for number in 0..100 {
        scene.gets(&number.to_string()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_client_stays_with_the_standby_when_the_first_broker_is_back() {
    let (main, standby) = (broker(), broker());
    let mut scene = Scene::of(&[&main, &standby]).await;
    main.faults().freeze();
    scene.works("to the standby").await;
    scene.is_where(Health::is_healthy).await;
    scene.losses().await;
    main.faults().thaw();
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(scene.losses().await, [""; 0]);
    scene.works("an hour later").await;
}

/// Of one broker of the list, whose other connection is up, nothing is to be feared.
#[tokio::test(start_paused = true)]
async fn a_lost_connection_goes_back_to_the_broker_that_the_other_one_is_with() {
    let (main, standby) = (broker(), broker());
    let mut scene = Scene::of(&[&main, &standby]).await;
    main.faults().freeze();
    scene.works("to the standby").await;
    scene.is_where(Health::is_healthy).await;
    main.faults().thaw();
    // The first of the list is there again, and would be tried first.
    assert_eq!(standby.faults().cut_connections_named("leveret (publishing)"), 1);
    scene.works("to the standby again").await;
    assert_eq!(standby.faults().cut_connections_named("leveret (publishing)"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_accepts_and_does_not_answer_is_passed_over() {
    let (silent, standby) = (broker(), broker());
    silent.faults().freeze();
    let mut scene = Scene::of(&[&silent, &standby]).await;
    scene.works("at once").await;
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_accepts_and_is_silent_is_given_ten_seconds() {
    let (silent, standby) = (broker(), broker());
    silent.faults().freeze();
    let began = Instant::now();
    builder(&[&silent, &standby]).connect().await.unwrap();
    let took = began.elapsed().as_secs();
    assert!((10..12).contains(&took), "{took} s");
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_has_just_fallen_silent_is_given_three_seconds_to_let_the_client_in_again() {
    let (main, standby) = (broker(), broker());
    let mut scene = Scene::of(&[&main, &standby]).await;
    main.faults().freeze();
    let _ticket = scene.publisher.send("q", "to the standby").await.unwrap();
    let mut lost_at = None;
    let took = soon("a connection", async {
        loop {
            match (scene.events.next().await, lost_at) {
                (Some(ClientEvent::Lost { .. }), None) => lost_at = Some(Instant::now()),
                (Some(ClientEvent::Connected { .. }), Some(lost_at)) => break lost_at.elapsed(),
                _ => {}
            }
        }
    })
    .await;
    assert!((3..5).contains(&took.as_secs()), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn without_a_broker_what_is_asked_for_takes_thirty_seconds_at_most() {
    let broker = broker();
    let scene = Scene::of(&[&broker]).await;
    broker.shutdown().await;
    let began = Instant::now();
    let topology = Topology::new().queue(Queue::quorum("another"));
    let (published, declared, asked) = tokio::join!(
        scene.publisher.publish("q", "x"),
        scene.client.apply(&topology),
        scene.client.inspect_queue("q"),
    );
    for error in [published.unwrap_err(), declared.unwrap_err(), asked.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }
    let took = began.elapsed().as_secs();
    assert!((30..32).contains(&took), "{took} s");
}

/// What was logged in this thread.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Collects what is logged, until what this returns is dropped.
    pub(crate) fn collect(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let format = tracing_subscriber::fmt().with_ansi(false);
        tracing::subscriber::set_default(format.with_writer(move || log.clone()).finish())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_broker_connecting_says_so_at_once_and_gives_up_after_seconds() {
    let log = Log::default();
    let _logging = log.collect();
    let began = Instant::now();
    let mut connecting = Box::pin(Client::connect("amqp://127.0.0.1:1"));
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut connecting).await.is_err());
    let logged = log.text();
    assert!(logged.contains("WARN"), "{logged}");
    assert!(logged.contains("cannot connect to amqp://guest@127.0.0.1:1"), "{logged}");
    let error = connecting.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(began.elapsed() <= Duration::from_secs(16), "{:?}", began.elapsed());
    assert!(error.to_string().contains("attempts in 15s"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_starts_a_little_later_is_waited_for() {
    let address = {
        let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        unused.local_addr().unwrap()
    };
    let connecting = tokio::spawn(Client::connect(format!("amqp://{address}")));
    sleep(Duration::from_secs(10)).await;
    let broker = broker();
    broker.listen(address).await.unwrap();
    assert!(soon("a client", connecting).await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_publisher_that_is_made_while_the_broker_is_away_works_when_it_is_back() {
    let (first, away) = (broker(), broker());
    let address = first.listen("127.0.0.1:0").await.unwrap();
    let client = Client::connect(format!("amqp://{address}")).await.unwrap();
    client.apply(&Topology::new().queue(Queue::quorum("q"))).await.unwrap();
    first.shutdown().await;
    let error = client.publisher("").build().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    sleep(Duration::from_secs(3600)).await;
    away.listen(address).await.unwrap();
    let publisher = soon("a publisher", client.publisher("").build()).await.unwrap();
    soon("an outcome", publisher.publish("q", "x")).await.unwrap();
    assert_eq!(depth(&away, "q"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_wrong_password_fails_at_once_only_if_every_broker_of_the_list_refuses() {
    let broker = broker();
    let address = broker.listen("127.0.0.1:0").await.unwrap();
    let refusing = format!("amqp://guest:wrong@{address}");
    let began = Instant::now();
    let error = Client::connect([&refusing, &refusing]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    let away = "amqp://127.0.0.1:1".to_owned();
    let error = Client::connect([refusing, away]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(began.elapsed() > Duration::from_secs(10), "the other one was waited for");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_restored_is_reported_and_health_says_so_until_it_is_back() {
    let (main, standby) = (broker(), broker());
    let theirs = builder(&[&standby]).connect().await.unwrap();
    theirs.apply(&Topology::new().queue(Queue::classic("q").max_length(5))).await.unwrap();
    let mut scene = Scene::of(&[&main, &standby]).await;
    main.shutdown().await;
    let object = soon("a report", async {
        loop {
            if let Some(ClientEvent::NotRestored { object, .. }) = scene.events.next().await {
                return object;
            }
        }
    })
    .await;
    assert_eq!(object, "queue \"q\"");
    // It goes on, with the queue that is there.
    scene.works("to what is there").await;
    sleep(Duration::from_secs(60)).await;
    let health = scene.client.health();
    assert!(!health.is_healthy(), "{health:?}");
    assert_eq!(health.connections[0].not_restored[0].0, object);
    theirs.delete_queue("q", Default::default()).await.unwrap();
    // The consumer of the deleted queue begins anew when it is read.
    soon("the queue", async {
        while !scene.client.health().is_healthy() {
            let _ = scene.deliveries.next_within(Duration::from_millis(100)).await;
        }
    })
    .await;
    scene.works("to its own").await;
}
