//! Who pays when a broker closes the whole connection because of one message.
//!
//! The broker is played: it confirms what it gets, a moment later, and closes the connection at once on a certain body. No
//! broker can be told to close a connection while somebody else's message is under way on it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::Properties;
use leveret::{Client, ErrorKind, Message, OnLoss, Queue};
use leveret_testkit::peer::{Peer, PeerListener, Received};
use leveret_wire::method::{basic, channel, confirm, connection};
use leveret_wire::{Method, ReplyCode, ShortStr};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::soon;

const POISON: &str = "poison";

/// How long the broker takes to confirm: what comes meanwhile is under way together.
const MOMENT: Duration = Duration::from_millis(50);

/// Long enough for some hundred messages one by one, and not for two thousand.
const MANY_MOMENTS: Duration = Duration::from_secs(20);

/// What the broker has seen.
#[derive(Default)]
struct Seen {
    connections: usize,
    confirmed: Vec<String>,
}

/// A broker, and where it is. It ends with the test.
struct Played {
    url: String,
    seen: Arc<Mutex<Seen>>,
    _serving: JoinSet<()>,
}

impl Played {
    async fn start() -> Played {
        Played::with_room_for(usize::MAX).await
    }

    /// One that has so many connections at a time, and hangs up on more.
    async fn with_room_for(most: usize) -> Played {
        let listener = PeerListener::bind().await;
        let (url, seen) = (listener.url(), Arc::<Mutex<Seen>>::default());
        let mut serving = JoinSet::new();
        serving.spawn({
            let seen = Arc::clone(&seen);
            async move {
                let mut connections = JoinSet::new();
                loop {
                    let peer = listener.accept().await;
                    while connections.try_join_next().is_some() {}
                    if connections.len() < most {
                        seen.lock().unwrap().connections += 1;
                        connections.spawn(serve(peer, Arc::clone(&seen)));
                    }
                }
            }
        });
        Played { url, seen, _serving: serving }
    }

    async fn client(&self) -> Client {
        soon("a client", Client::connect(&self.url)).await.unwrap()
    }

    fn connections(&self) -> usize {
        self.seen.lock().unwrap().connections
    }

    fn confirmed(&self) -> Vec<String> {
        self.seen.lock().unwrap().confirmed.clone()
    }
}

async fn serve(mut peer: Peer, seen: Arc<Mutex<Seen>>) {
    peer.accept_connection().await;
    // By channel, as they came, and how many of each were answered.
    let mut waiting: Vec<(u16, String)> = Vec::new();
    let mut tags = [0; 64];
    loop {
        let received = tokio::select! {
            received = peer.receive() => received,
            () = sleep(MOMENT), if !waiting.is_empty() => {
                for (on, body) in waiting.drain(..) {
                    seen.lock().unwrap().confirmed.push(body);
                    tags[usize::from(on)] += 1;
                    let delivery_tag = tags[usize::from(on)];
                    peer.send(on, &basic::Ack { delivery_tag, multiple: false }).await;
                }
                continue;
            }
        };
        match received {
            Received::Content(on, content) => {
                let body = String::from_utf8_lossy(&content.body).into_owned();
                if body == POISON {
                    return close(&mut peer).await;
                }
                waiting.push((on, body));
            }
            Received::Method(on, Method::ChannelOpen(_)) => {
                peer.send(on, &channel::OpenOk {}).await
            }
            Received::Method(on, Method::ConfirmSelect(_)) => {
                tags[usize::from(on)] = 0;
                peer.send(on, &confirm::SelectOk {}).await;
            }
            Received::Method(on, Method::ChannelClose(_)) => {
                peer.send(on, &channel::CloseOk {}).await
            }
            Received::Method(_, Method::ConnectionClose(_)) => {
                return peer.send(0, &connection::CloseOk {}).await;
            }
            Received::Heartbeat => {}
            Received::Method(..) | Received::End => return,
        }
    }
}

async fn close(peer: &mut Peer) {
    let close = connection::Close {
        reply_code: ReplyCode::INTERNAL_ERROR,
        reply_text: ShortStr::from_static("INTERNAL_ERROR"),
        class_id: 0,
        method_id: 0,
    };
    peer.send(0, &close).await;
    // What was sent before it comes first.
    while !matches!(
        peer.receive().await,
        Received::Method(_, Method::ConnectionCloseOk(_)) | Received::End
    ) {}
}

#[tokio::test]
async fn nobody_is_blamed_for_the_message_of_another() {
    let broker = Played::start().await;
    let client = broker.client().await;
    let innocent = client.publisher("").build().await.unwrap();
    let guilty = client.publisher("").build().await.unwrap();
    for round in 0..3 {
        let ticket = soon("room", innocent.send("q", format!("{round}"))).await.unwrap();
        let error = soon("an outcome", guilty.publish("q", POISON)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
        soon("an outcome", ticket).await.unwrap();
    }
    assert_eq!(broker.confirmed(), ["0", "1", "2"]);
}

#[tokio::test]
async fn a_message_that_costs_the_connection_fails_alone_and_the_others_keep_their_order() {
    let broker = Played::start().await;
    let client = broker.client().await;
    let publisher = client.publisher("").build().await.unwrap();
    let poisonous = [2, 3, 6];
    let mut tickets = Vec::new();
    for number in 0..8 {
        let body = if poisonous.contains(&number) { POISON.into() } else { number.to_string() };
        tickets.push(soon("room", publisher.send("q", body)).await.unwrap());
    }
    for (number, ticket) in tickets.into_iter().enumerate() {
        let outcome = soon("an outcome", ticket).await;
        assert_eq!(outcome.is_err(), poisonous.contains(&number), "{number}: {outcome:?}");
    }
    assert_eq!(broker.confirmed(), ["0", "1", "4", "5", "7"]);
    soon("an outcome", publisher.publish("q", "8")).await.unwrap();
    // Home, the first one for publishing and the one after it, and those that the messages were tried on: together, and
    // one by one.
    assert!(broker.connections() <= 3 + 2 * poisonous.len() + 1, "{}", broker.connections());
}

#[tokio::test]
async fn where_the_broker_has_no_room_for_another_connection_it_is_found_on_the_one_there_is() {
    let broker = Played::with_room_for(2).await;
    let client = broker.client().await;
    let publisher = client.publisher("").build().await.unwrap();
    let mut tickets = Vec::new();
    for number in 0..8 {
        let body = if number == 3 { POISON.into() } else { number.to_string() };
        tickets.push(soon("room", publisher.send("q", body)).await.unwrap());
    }
    for (number, ticket) in tickets.into_iter().enumerate() {
        let outcome = soon("an outcome", ticket).await;
        assert_eq!(outcome.is_err(), number == 3, "{number}: {outcome:?}");
    }
    assert_eq!(broker.confirmed(), ["0", "1", "2", "4", "5", "6", "7"]);
    soon("an outcome", publisher.publish("q", "8")).await.unwrap();
}

/// One by one, they would take longer than a message may.
#[tokio::test]
async fn the_message_of_another_makes_thousands_no_later_than_they_may_be() {
    let broker = Played::start().await;
    let client = broker.client().await;
    let innocent = client.publisher("").timeout(MANY_MOMENTS).build().await.unwrap();
    let guilty = client.publisher("").build().await.unwrap();
    let mut tickets = Vec::new();
    for number in 0..2000 {
        tickets.push(soon("room", innocent.send("q", number.to_string())).await.unwrap());
    }
    let error = soon("an outcome", guilty.publish("q", POISON)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
    for ticket in tickets {
        soon("an outcome", ticket).await.unwrap();
    }
}

#[tokio::test]
async fn one_message_among_thousands_fails_alone_and_in_time() {
    let broker = Played::start().await;
    let client = broker.client().await;
    let publisher = client.publisher("").timeout(MANY_MOMENTS).build().await.unwrap();
    let mut tickets = Vec::new();
    for number in 0..2000 {
        let body = if number == 1234 { POISON.into() } else { number.to_string() };
        tickets.push(soon("room", publisher.send("q", body)).await.unwrap());
    }
    for (number, ticket) in tickets.into_iter().enumerate() {
        let outcome = soon("an outcome", ticket).await;
        assert_eq!(outcome.is_err(), number == 1234, "{number}: {outcome:?}");
    }
    let confirmed = broker.confirmed();
    let numbers = confirmed.iter().map(|body| body.parse::<u32>().unwrap());
    assert!(numbers.is_sorted(), "{confirmed:?}");
}

#[tokio::test]
async fn who_is_to_fail_on_a_loss_does() {
    let broker = Played::start().await;
    let client = broker.client().await;
    let publisher = client.publisher("").on_loss(OnLoss::Fail).build().await.unwrap();
    let error = soon("an outcome", publisher.publish("q", POISON)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
    soon("an outcome", publisher.publish("q", "1")).await.unwrap();
    assert_eq!(broker.connections(), 3, "home, and two for publishing");
}

/// A message that no broker takes from us: it closes the channel.
fn of_somebody_else(body: String) -> Message {
    let user_id = Some(ShortStr::from_static("somebody else"));
    Message::with_properties(body, Properties { user_id, ..Properties::default() })
}

#[tokio::test]
async fn however_many_cost_the_channel_each_is_told_so_and_the_others_arrive_about_once() {
    for every in [1, 50] {
        let broker = crate::broker();
        let client = crate::client_with(&broker, Queue::classic("q")).await;
        let publisher = client.publisher("").build().await.unwrap();
        let mut tickets = Vec::new();
        for number in 0..2000 {
            let body = number.to_string();
            let message = match number % every {
                0 => of_somebody_else(body),
                _ => body.into(),
            };
            tickets.push(soon("room", publisher.send("q", message)).await.unwrap());
        }
        for (number, ticket) in tickets.into_iter().enumerate() {
            let outcome = soon("an outcome", ticket).await.map_err(|error| error.kind());
            let expected = if number % every == 0 { Err(ErrorKind::Broker) } else { Ok(()) };
            assert_eq!(outcome, expected, "{number} of {every}");
        }
        let arrived = client.inspect_queue("q").await.unwrap().messages as usize;
        let innocent = 2000 - 2000 / every;
        assert!((innocent..=innocent * 3 / 2).contains(&arrived), "{arrived} of {innocent}");
    }
}
