//! What is read in properties, and what consumers get of them.

use leveret::amqp::{
    Array, Connection, ErrorKind, ExchangeOptions, GetOptions, Outcome, Properties, Publish,
    QueueOptions, ReplyCode, Table, Value,
};
use leveret_broker::Profile;

use super::stage::{Stage, headers, with_headers};

/// Headers `z`, `a`, `z` and `B`.
fn unsorted() -> Properties<'static> {
    let mut bytes = Vec::new();
    for (name, value) in [(b'z', 1), (b'a', 2), (b'z', 3), (b'B', 4)] {
        bytes.extend([1, name, b'b', value]);
    }
    let headers = Some(Table::decode(&bytes).unwrap().into_owned());
    Properties { headers, ..Properties::default() }
}

pub(crate) async fn headers_are_sorted_and_come_once_in_4_3(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "classic", &[]).await;
    stage.put("q", "", unsorted()).await;
    let delivery = stage.take("q").await;
    let expected = if stage.is_3_10() { "z=b:1 a=b:2 z=b:3 B=b:4" } else { "B=b:4 a=b:2 z=b:1" };
    assert_eq!(headers(&delivery), expected);
    delivery.ack().unwrap();

    let publish = Publish {
        routing_key: "nowhere",
        mandatory: true,
        properties: unsorted(),
        ..Publish::default()
    };
    let Outcome::Returned(returned) = stage.channel.publish(&publish).await.unwrap().await else {
        panic!("not returned")
    };
    let names: Vec<_> = returned
        .properties
        .get()
        .headers
        .unwrap()
        .iter()
        .map(|(name, _)| name.to_string())
        .collect();
    let expected = if stage.is_3_10() { "zazB" } else { "Baz" };
    assert_eq!(names.concat(), expected);
}

/// In 4.3 it goes by the last of a name, and consumers get the first.
pub(crate) async fn a_headers_exchange_sees_all_headers(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.channel.declare_exchange("x", "headers", ExchangeOptions::default()).await.unwrap();
    for (queue, value) in [("first", 1), ("last", 3)] {
        stage.queue(queue, "classic", &[]).await;
        let arguments = Table::from_pairs([("z", Value::I8(value))]).unwrap();
        stage.channel.bind_queue(queue, "x", "", &arguments).await.unwrap();
    }
    let publish = Publish { exchange: "x", properties: unsorted(), ..Publish::default() };
    assert!(stage.channel.publish(&publish).await.unwrap().await.is_acked());
    let (reached, missed) = if stage.is_3_10() { ("first", "last") } else { ("last", "first") };
    stage.take(reached).await.ack().unwrap();
    assert!(stage.channel.get(missed, GetOptions::default()).await.unwrap().is_none());
}

fn expiring(text: &str) -> Properties<'_> {
    Properties { expiration: Some(text.try_into().unwrap()), ..Properties::default() }
}

pub(crate) async fn an_expiration_is_a_number_in_4_3(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("q", "classic", &[]).await;
    for (text, number) in
        [("0060000", "60000"), ("+60000", "60000"), ("315360000000", "315360000000")]
    {
        stage.put("q", "", expiring(text)).await;
        let delivery = stage.take("q").await;
        let expected = if stage.is_3_10() { text } else { number };
        assert_eq!(delivery.properties().expiration.unwrap(), expected);
        delivery.ack().unwrap();
    }
}

/// That the publish is refused, with these words at the end.
async fn expect_refused(connection: &Connection, properties: Properties<'_>, words: &str) {
    let stage = Stage::new(connection, Profile::default()).await;
    let outcome = stage.put("q", "", properties).await;
    let Outcome::Lost(error) = outcome else { panic!("{outcome:?}") };
    assert_eq!(error.kind(), ErrorKind::ChannelClosed(ReplyCode::PRECONDITION_FAILED));
    assert!(error.to_string().ends_with(words), "{error}, and not {words}");
}

pub(crate) async fn an_expiration_that_is_none_is_refused(connection: &Connection, _: Profile) {
    for (text, words) in [
        ("-1", "'-1': {value_negative,-1}"),
        ("abc", "'abc': no_integer"),
        ("", "'': no_integer"),
        ("1.5", r#"'1.5': {leftover_string,".5"}"#),
        ("315360000001", "'315360000001': {value_too_large,315360000001}"),
    ] {
        expect_refused(connection, expiring(text), &format!("invalid expiration {words}")).await;
    }
}

pub(crate) async fn copies_go_to_the_strings_of_an_array(
    connection: &Connection,
    profile: Profile,
) {
    let stage = Stage::new(connection, profile).await;
    for queue in ["q", "k", "bytes"] {
        stage.channel.declare_queue(queue, QueueOptions::default()).await.unwrap();
    }
    for name in ["CC", "BCC"] {
        let bytes = Value::Bytes(b"bytes".as_slice().into());
        let keys = ["k".into(), "k".into(), 7.into(), bytes, "x".repeat(300).into()];
        let keys = Value::Array(Array::from_values(keys).unwrap());
        assert!(stage.put("q", "", with_headers(&[(name, keys)])).await.is_acked());
        for (queue, count) in [("q", 1), ("k", 1), ("bytes", 0)] {
            assert_eq!(stage.take_all(queue, count).await.len(), count as usize);
        }
    }
}

pub(crate) async fn copies_that_are_no_array_are_refused(connection: &Connection, _: Profile) {
    for name in ["CC", "BCC"] {
        for (value, kind) in [
            (Value::from("k"), "longstr"),
            (7.into(), "signedint"),
            (Value::Void, "void"),
            (Table::new().into(), "table"),
        ] {
            let words =
                format!("invalid message: {{unacceptable_type_in_header,\"{name}\",{kind}}}");
            expect_refused(connection, with_headers(&[(name, value)]), &words).await;
        }
    }
}

pub(crate) async fn a_delivery_mode_that_3_10_does_not_know_is_refused(
    connection: &Connection,
    profile: Profile,
) {
    for delivery_mode in [0, 3, 255] {
        let odd = Properties { delivery_mode: Some(delivery_mode), ..Properties::default() };
        if profile == Profile::RabbitMq3_10 {
            let words = format!("invalid message: {{delivery_mode_unknown,{delivery_mode}}}");
            expect_refused(connection, odd, &words).await;
        } else {
            let stage = Stage::new(connection, profile).await;
            assert!(stage.put("q", "", odd).await.is_acked());
        }
    }
}

pub(crate) async fn a_direct_reply_to_nobody_is_refused_before_anything_else(
    connection: &Connection,
    _: Profile,
) {
    let reply_to = Some("amq.rabbitmq.reply-to".try_into().unwrap());
    let properties = Properties { reply_to, ..expiring("-1") };
    expect_refused(connection, properties, "fast reply consumer does not exist").await;
}
