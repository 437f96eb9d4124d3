//! Direct replies: what becomes of those that are mandatory, or in a transaction.

use leveret::amqp::{
    Array, Channel, Confirm, Connection, ConsumeOptions, Consumer, Delivery, Outcome, Properties,
    Publish, Value,
};
use leveret_broker::Profile;
use tokio::time::timeout;

use super::stage::{SOON, Stage, body, with_headers};

/// Who awaits direct replies.
struct Asker {
    channel: Channel<Confirm>,
    replies: Consumer,
    address: String,
}

impl Asker {
    /// Asks by way of a queue, which is there to learn the address.
    async fn new(connection: &Connection, stage: &Stage) -> Asker {
        let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
        let options = ConsumeOptions { auto_ack: true, ..ConsumeOptions::default() };
        let replies = channel.consume("amq.rabbitmq.reply-to", options).await.unwrap();
        stage.queue("questions", "classic", &[]).await;
        let reply_to = Some("amq.rabbitmq.reply-to".try_into().unwrap());
        let properties = Properties { reply_to, ..Properties::default() };
        let publish = Publish { routing_key: "questions", properties, ..Publish::default() };
        assert!(channel.publish(&publish).await.unwrap().await.is_acked());
        let question = stage.take("questions").await;
        let address = question.properties().reply_to.unwrap().to_string();
        question.ack().unwrap();
        Asker { channel, replies, address }
    }

    async fn next(&mut self) -> String {
        body(&self.next_delivery().await)
    }

    async fn next_delivery(&mut self) -> Delivery {
        let next = timeout(SOON, self.replies.next()).await.expect("a reply");
        next.unwrap().unwrap()
    }
}

fn reply<'a>(address: &'a str, body: &'static str, mandatory: bool) -> Publish<'a> {
    Publish { routing_key: address, mandatory, body: body.into(), ..Publish::default() }
}

async fn outcome(stage: &Stage, publish: Publish<'_>) -> &'static str {
    match stage.channel.publish(&publish).await.unwrap().await {
        Outcome::Acked => "acked",
        Outcome::Nacked => "nacked",
        Outcome::Returned(_) => "returned",
        Outcome::Lost(error) => panic!("{error}"),
    }
}

pub(crate) async fn a_mandatory_direct_reply_comes_back_in_3_10_alone(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    let mut asker = Asker::new(connection, &stage).await;
    let expected = if stage.is_3_10() { "returned" } else { "acked" };
    assert_eq!(outcome(&stage, reply(&asker.address, "mandatory", true)).await, expected);
    assert_eq!(outcome(&stage, reply(&asker.address, "plain", false)).await, "acked");
    // It is delivered all the same.
    assert_eq!([asker.next().await, asker.next().await], ["mandatory", "plain"]);

    asker.channel.close().await.unwrap();
    assert_eq!(outcome(&stage, reply(&asker.address, "too late", true)).await, expected);
    assert_eq!(outcome(&stage, reply(&asker.address, "too late", false)).await, "acked");
}

pub(crate) async fn a_mandatory_direct_reply_to_who_has_cancelled(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    let mut asker = Asker::new(connection, &stage).await;
    asker.replies.cancel().await.unwrap();
    let expected = if stage.is_3_10() { "returned" } else { "acked" };
    assert_eq!(outcome(&stage, reply(&asker.address, "too late", true)).await, expected);
}

pub(crate) async fn a_mandatory_direct_reply_to_what_is_no_address_comes_back(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    for address in ["amq.rabbitmq.reply-to", "amq.rabbitmq.reply-to.", "amq.rabbitmq.reply-to.x"] {
        assert_eq!(outcome(&stage, reply(address, "", true)).await, "returned", "{address}");
        assert_eq!(outcome(&stage, reply(address, "", false)).await, "acked", "{address}");
    }
}

pub(crate) async fn a_direct_reply_and_copies_of_it_go_to_queues_as_well(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    let mut asker = Asker::new(connection, &stage).await;
    stage.queue("q", "classic", &[]).await;
    for name in ["CC", "BCC"] {
        let address = asker.address.clone();
        for (first, second) in [(&*address, "q"), ("q", &*address)] {
            // Twice over makes no difference.
            let copies = Array::from_values([second.into(), second.into(), first.into()]);
            let copies = Value::Array(copies.unwrap());
            let properties = with_headers(&[(name, copies)]);
            let publish = Publish { properties, ..reply(first, "copied", true) };
            assert_eq!(outcome(&stage, publish).await, "acked");
            let delivery = asker.next_delivery().await;
            assert_eq!(
                (&*body(&delivery), &*delivery.routing_key().to_string()),
                ("copied", first)
            );
            assert_eq!(stage.take_all("q", 1).await, ["copied"]);
        }
    }
}

/// 4.3 holds it back, and 3.10 does not; but what comes back does so with the commit.
pub(crate) async fn a_direct_reply_in_a_transaction_awaits_the_commit_in_4_3_alone(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    let mut asker = Asker::new(connection, &stage).await;
    let channel = connection.open_channel().await.unwrap().into_tx().await.unwrap();
    channel.publish(&reply(&asker.address, "in transaction", true)).await.unwrap();
    // Once this is answered, the broker has seen the publish.
    channel.inspect_queue("questions").await.unwrap();
    assert_eq!(channel.take_returned().len(), 0);
    assert_eq!(outcome(&stage, reply(&asker.address, "outside", false)).await, "acked");
    channel.commit().await.unwrap();
    let mut expected = ["in transaction", "outside"];
    if !stage.is_3_10() {
        expected.reverse();
    }
    assert_eq!([asker.next().await, asker.next().await], expected);
    assert_eq!(channel.take_returned().len(), usize::from(stage.is_3_10()));
}

pub(crate) async fn a_direct_reply_that_is_rolled_back_was_sent_in_3_10(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    let mut asker = Asker::new(connection, &stage).await;
    let channel = connection.open_channel().await.unwrap().into_tx().await.unwrap();
    channel.publish(&reply(&asker.address, "rolled back", true)).await.unwrap();
    channel.rollback().await.unwrap();
    channel.publish(&reply(&asker.address, "committed", false)).await.unwrap();
    channel.commit().await.unwrap();
    if stage.is_3_10() {
        assert_eq!(asker.next().await, "rolled back");
    }
    assert_eq!(asker.next().await, "committed");
    assert_eq!(channel.take_returned().len(), 0);
}
