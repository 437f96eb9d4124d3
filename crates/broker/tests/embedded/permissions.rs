//! What users may do, right by right.

use leveret::amqp::{
    Auth, Connection, ConsumeOptions, Error, ErrorKind, ExchangeOptions, GetOptions, Options,
    Outcome, Publish, QueueOptions, ReplyCode, Table,
};
use leveret_broker::{Broker, Permissions, Profile};

use crate::support::with_queue;

fn options(user: &str) -> Options {
    let mut options = Options::default();
    options.auth = Auth::plain(user, "secret");
    options
}

fn only(name: &str) -> Permissions {
    let pattern =
        |right: &str| if right == name { "^(mine|amq.default)".to_owned() } else { String::new() };
    Permissions { configure: pattern("configure"), write: pattern("write"), read: pattern("read") }
}

/// A user for each right, who has it for what begins with `mine`, and one who has all.
fn broker(profile: Profile) -> Broker {
    let mut builder = Broker::builder().profile(profile).user("all", "secret");
    for right in ["configure", "write", "read"] {
        builder = builder.user(right, "secret").permissions(right, "/", only(right));
    }
    builder.start().unwrap()
}

async fn connect(broker: &Broker, user: &str) -> Connection {
    Connection::open_over(broker.connect(), &options(user)).await.unwrap()
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T, Error>, words: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ChannelClosed(ReplyCode::ACCESS_REFUSED), "{error}");
    assert!(error.to_string().ends_with(words), "{error}, and not {words}");
}

#[tokio::test]
async fn configuring_is_declaring_and_deleting() {
    let broker = broker(Profile::RabbitMq4_3);
    let connection = connect(&broker, "configure").await;
    let channel = connection.open_channel().await.unwrap();
    channel.declare_queue("mine", QueueOptions::default()).await.unwrap();
    channel.declare_exchange("mine", "fanout", ExchangeOptions::default()).await.unwrap();
    let refused = channel.bind_queue("mine", "mine", "", &Table::new()).await;
    assert_refused(
        refused,
        "write access to queue 'mine' in vhost '/' refused for user 'configure'",
    );
    let channel = connection.open_channel().await.unwrap();
    let refused = channel.declare_queue("yours", QueueOptions::default()).await;
    assert_refused(
        refused,
        "configure access to queue 'yours' in vhost '/' refused for user 'configure'",
    );
    let channel = connection.open_channel().await.unwrap();
    let refused = channel.get("mine", GetOptions::default()).await;
    assert_refused(
        refused,
        "read access to queue 'mine' in vhost '/' refused for user 'configure'",
    );
    // A dead-letter exchange could be used to move messages.
    let channel = connection.open_channel().await.unwrap();
    let arguments = Table::from_pairs([("x-dead-letter-exchange", "yours".into())]).unwrap();
    let dying = QueueOptions { arguments, ..QueueOptions::default() };
    let refused = channel.declare_queue("mine too", dying).await;
    assert_refused(
        refused,
        "read access to queue 'mine too' in vhost '/' refused for user 'configure'",
    );
    connection
        .open_channel()
        .await
        .unwrap()
        .delete_queue("mine", Default::default())
        .await
        .unwrap();
}

#[tokio::test]
async fn writing_is_publishing() {
    let broker = broker(Profile::RabbitMq4_3);
    with_queue(&connect(&broker, "all").await).await;
    let connection = connect(&broker, "write").await;
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    let publish = Publish { routing_key: "q", ..Publish::default() };
    assert!(channel.publish(&publish).await.unwrap().await.is_acked());
    let publish = Publish { exchange: "amq.fanout", ..publish };
    let outcome = channel.publish(&publish).await.unwrap().await;
    let Outcome::Lost(error) = outcome else { panic!("{outcome:?}") };
    assert_refused::<()>(
        Err(error),
        "write access to exchange 'amq.fanout' in vhost '/' refused for user 'write'",
    );
    let channel = connection.open_channel().await.unwrap();
    let refused = channel.declare_queue("mine", QueueOptions::default()).await;
    assert_refused(
        refused,
        "configure access to queue 'mine' in vhost '/' refused for user 'write'",
    );
}

/// 3.10 does not say which right it is.
#[tokio::test]
async fn reading_is_consuming_and_purging() {
    let broker = broker(Profile::RabbitMq3_10);
    let all = connect(&broker, "all").await.open_channel().await.unwrap();
    for queue in ["mine", "yours"] {
        all.declare_queue(queue, QueueOptions::default()).await.unwrap();
    }
    let connection = connect(&broker, "read").await;
    let channel = connection.open_channel().await.unwrap();
    channel.get("mine", GetOptions::default()).await.unwrap();
    channel.consume("mine", ConsumeOptions::default()).await.unwrap();
    channel.purge_queue("mine").await.unwrap();
    let words = "access to queue 'yours' in vhost '/' refused for user 'read'";
    assert_refused(channel.get("yours", GetOptions::default()).await, words);
    let channel = connection.open_channel().await.unwrap();
    let refused = channel.consume("yours", ConsumeOptions::default()).await;
    assert_refused(refused.map(drop), words);
    let channel = connection.open_channel().await.unwrap();
    assert_refused(channel.purge_queue("yours").await, words);
}

#[tokio::test]
async fn a_virtual_host_is_for_those_who_have_rights_in_it() {
    let builder = Broker::builder().virtual_host("/").virtual_host("other").user("me", "secret");
    let broker = builder.permissions("me", "/", Permissions::all()).start().unwrap();
    let mut options = options("me");
    Connection::open_over(broker.connect(), &options).await.unwrap();
    for (vhost, words) in
        [("other", "refused for user 'me'"), ("missing", "no virtual host \"missing\"")]
    {
        options.virtual_host = vhost.to_owned();
        let error = Connection::open_over(broker.connect(), &options).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VirtualHost, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}
