//! What else is in the properties.

use leveret::amqp::{Connection, Properties, Table};
use leveret_broker::Profile;

use super::letter::{Letter, death, spelled};
use super::stage::{Stage, dying_into, with_headers};

pub(crate) async fn headers_are_sorted_and_respelled(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.queue("q", dying_into("end")).await;
    let headers = vec![("z", 1.into()), ("Z", "text".into()), ("a", 2.into())];
    stage.put("q", with_headers(headers)).await;
    stage.reject("q").await;
    let headers = vec![("Z", r#""text""#), ("a", "I:2"), ("z", "I:1")];
    let deaths = vec![death("rejected", "q")];
    stage
        .expect("end", &Letter { key: "end", failed: true, headers, deaths, ..Letter::default() })
        .await;

    // `L` for `l`, a true that is 7, both once more within a table, and a name twice.
    const ODD: &[u8] =
        b"\x01bL\0\0\0\0\0\0\0\x05\x01bt\x07\x01aF\0\0\0\x12\x01aA\0\0\0\x0bL\0\0\0\0\0\0\0\x01t\x07";
    const RESPELLED: &[u8] =
        b"\x01aF\0\0\0\x12\x01aA\0\0\0\x0bl\0\0\0\0\0\0\0\x01t\x01\x01bl\0\0\0\0\0\0\0\x05";
    let headers = Some(Table::decode(ODD).unwrap());
    stage.put("q", Properties { headers, ..Properties::default() }).await;
    stage.reject("q").await;
    let found = stage.take("end").await;
    let headers = found.properties().headers.unwrap().into_owned();
    found.ack().unwrap();
    let (respelled, rest) = headers.as_bytes().split_at(RESPELLED.len());
    assert_eq!(respelled.escape_ascii().to_string(), RESPELLED.escape_ascii().to_string());
    assert_eq!(rest.starts_with(b"\x01bt\x01"), stage.is_3_10());
}

pub(crate) async fn other_properties_stay(connection: &Connection, profile: Profile) {
    let stage = Stage::new(connection, profile).await;
    stage.queue("end", vec![]).await;
    stage.queue("q", dying_into("end")).await;
    let published = Properties {
        content_type: Some("text/plain".try_into().unwrap()),
        delivery_mode: Some(2),
        priority: Some(3),
        expiration: Some("60000".try_into().unwrap()),
        message_id: Some("id".try_into().unwrap()),
        timestamp: Some(5),
        cluster_id: Some("".try_into().unwrap()),
        ..with_headers(vec![("x-delivery-count", 7.into())])
    };
    stage.put("q", published.clone()).await;
    stage.reject("q").await;
    let found = stage.take("end").await;
    let expected = Properties { headers: None, expiration: None, ..published };
    let properties = Properties { headers: None, ..found.properties() };
    assert_eq!(properties, expected, "{}", spelled(&found));
    let count = found.properties().headers.unwrap().get("x-delivery-count").unwrap().as_i64();
    assert_eq!(count, Some(7));
    found.ack().unwrap();
}
