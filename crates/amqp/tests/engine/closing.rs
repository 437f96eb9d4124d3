//! A channel that both sides close at the same time.

use std::time::Duration;

use leveret_wire::ReplyCode;
use leveret_wire::method::channel;
use tokio::time::timeout;

use crate::support::{connected_with_channels, open_channel};

/// RabbitMQ ends the channel as soon as its own close is agreed to, and may never agree to the client's.
#[tokio::test(start_paused = true)]
async fn an_agreement_that_never_comes_is_not_waited_for() {
    let (connection, mut broker) = connected_with_channels(1).await;
    let channel = open_channel(&connection, &mut broker).await;
    let id = channel.id();
    channel.close_now();
    broker.expect::<channel::Close<'_>>(id).await;
    let close = channel::Close {
        reply_code: ReplyCode::NOT_FOUND,
        reply_text: "NOT_FOUND".try_into().unwrap(),
        class_id: 60,
        method_id: 40,
    };
    broker.send(id, &close).await;
    broker.expect::<channel::CloseOk>(id).await;
    timeout(Duration::from_secs(1), channel.close())
        .await
        .expect("the end of the channel")
        .unwrap();

    // The number is free, and an agreement that comes late does no harm to whoever has it now.
    let next = open_channel(&connection, &mut broker).await;
    assert_eq!(next.id(), id);
    broker.send(id, &channel::CloseOk {}).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    next.check_open().unwrap();
}
