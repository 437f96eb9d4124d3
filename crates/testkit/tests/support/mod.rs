//! Talking to RabbitMQ without a client: messages by its management API, connections byte by byte.
#![allow(dead_code, reason = "each test file uses its part")]

use leveret_testkit::rabbitmq::{Management, ManagementError};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub(crate) async fn declare(
    management: &Management,
    vhost: &str,
    queue: &str,
    kind: &str,
) -> Result<Value, ManagementError> {
    let properties = json!({ "durable": true, "arguments": { "x-queue-type": kind } });
    management.put(&["queues", vhost, queue], properties).await
}

/// Publishes a persistent message; whether it reached a queue.
pub(crate) async fn publish(
    management: &Management,
    vhost: &str,
    queue: &str,
    body: &str,
) -> Result<bool, ManagementError> {
    let message = json!({
        "properties": { "delivery_mode": 2 },
        "routing_key": queue,
        "payload": body,
        "payload_encoding": "string",
    });
    let answer = management.post(&["exchanges", vhost, "amq.default", "publish"], message).await?;
    Ok(answer["routed"] == Value::Bool(true))
}

/// Takes one message out of a queue, if there is one.
pub(crate) async fn take(
    management: &Management,
    vhost: &str,
    queue: &str,
) -> Result<Option<String>, ManagementError> {
    let how = json!({ "count": 1, "ackmode": "ack_requeue_false", "encoding": "auto" });
    let messages = management.post(&["queues", vhost, queue, "get"], how).await?;
    Ok(messages[0]["payload"].as_str().map(str::to_owned))
}

/// Opens an AMQP connection the way a client does, and leaves it alone from there.
pub(crate) async fn connect(addr: &str, vhost: &str) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(b"AMQP\x00\x00\x09\x01").await.unwrap();
    read_method(&mut stream).await; // start
    write_method(&mut stream, (10, 11), b"\0\0\0\0\x05PLAIN\0\0\0\x0c\0guest\0guest\x05en_US")
        .await; // start-ok
    read_method(&mut stream).await; // tune
    write_method(&mut stream, (10, 31), b"\x07\xff\0\x02\0\0\0\0").await; // tune-ok
    let open = [&[vhost.len() as u8], vhost.as_bytes(), b"\0\0"].concat();
    write_method(&mut stream, (10, 40), &open).await; // open
    assert_eq!(read_method(&mut stream).await, (10, 41), "open-ok was expected");
    stream
}

/// Frame type 1, channel 0, length, class, method, arguments, end octet.
async fn write_method(stream: &mut TcpStream, (class, method): (u16, u16), arguments: &[u8]) {
    let length = (arguments.len() + 4) as u32;
    let head = [&[1, 0, 0][..], &length.to_be_bytes(), &class.to_be_bytes(), &method.to_be_bytes()]
        .concat();
    stream.write_all(&[&head, arguments, b"\xce"].concat()).await.unwrap();
}

async fn read_method(stream: &mut TcpStream) -> (u16, u16) {
    let mut head = [0; 7];
    stream.read_exact(&mut head).await.unwrap();
    let length = u32::from_be_bytes(head[3..].try_into().unwrap()) as usize;
    let mut rest = vec![0; length + 1];
    stream.read_exact(&mut rest).await.unwrap();
    (u16::from_be_bytes([rest[0], rest[1]]), u16::from_be_bytes([rest[2], rest[3]]))
}
