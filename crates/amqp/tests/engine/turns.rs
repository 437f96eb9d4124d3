//! Whose turn it is: reading and writing share a task.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use leveret_amqp::{Connection, ConsumeOptions, Options, Publish};
use leveret_testkit::peer::Peer;
use leveret_wire::method::basic;
use leveret_wire::{Properties, Table};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::time::timeout;

use crate::support::{consuming, open_channel};
use crate::{SOON, deliver, tune};

/// More than is read before consumers have their turn.
const LARGE: usize = 300 * 1024;

#[tokio::test]
async fn an_ack_that_waited_for_more_to_read_goes_out_when_there_is_no_more() {
    let (pipe, theirs) = tokio::io::duplex(4 * LARGE);
    let mut broker = Peer::over(theirs);
    let options = Options::default();
    let connecting = Connection::open_over(pipe, &options);
    let (connection, _) =
        tokio::join!(connecting, broker.accept_connection_with(tune(0), Table::new()));
    let channel = open_channel(&connection.unwrap(), &mut broker).await;
    let mut consumer = consuming(&channel, ConsumeOptions::default(), &mut broker).await;
    // Acked while the reader lets its consumers run and has more to read. Nothing else happens after that.
    let acking = tokio::spawn(async move {
        let first = consumer.next().await.unwrap().unwrap();
        first.ack().unwrap();
        (consumer.next().await.unwrap().unwrap(), consumer)
    });
    for tag in 1..=2 {
        let body = Bytes::from(vec![b'x'; LARGE]);
        broker.send_content(1, &deliver(tag), &Properties::default(), body).await;
    }
    let ack = timeout(SOON, broker.expect::<basic::Ack>(1)).await.expect("the ack is not written");
    assert_eq!(ack.delivery_tag, 1);
    drop(acking.await.unwrap());
}

/// A pipe from which nothing but heartbeats comes, without end, once it is told to: as from a broker that sends faster than they can
/// be read.
struct Flood {
    pipe: DuplexStream,
    has_begun: Arc<AtomicBool>,
}

impl AsyncRead for Flood {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.has_begun.load(Ordering::Relaxed) {
            return Pin::new(&mut self.pipe).poll_read(context, buffer);
        }
        // A socket counts what a task does with it.
        ready!(pin!(tokio::task::consume_budget()).poll(context));
        buffer.put_slice(b"\x08\x00\x00\x00\x00\x00\x00\xce");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Flood {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.pipe).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_shutdown(context)
    }
}

#[tokio::test]
async fn a_broker_that_never_stops_to_send_is_written_to_all_the_same() {
    let (pipe, theirs) = tokio::io::duplex(1 << 16);
    let mut broker = Peer::over(theirs);
    let has_begun = Arc::new(AtomicBool::new(false));
    let flood = Flood { pipe, has_begun: Arc::clone(&has_begun) };
    let options = Options::default();
    let connecting = Connection::open_over(flood, &options);
    let (connection, _) =
        tokio::join!(connecting, broker.accept_connection_with(tune(0), Table::new()));
    let connection = connection.unwrap();
    let channel = open_channel(&connection, &mut broker).await;
    has_begun.store(true, Ordering::Relaxed);
    // Has the reader look.
    broker.send_heartbeat().await;
    for number in 0..10 {
        tokio::task::yield_now().await;
        let body = Bytes::from(number.to_string());
        let publish = Publish { routing_key: "q", body: body.clone(), ..Publish::default() };
        channel.publish(&publish).await.unwrap();
        let published = timeout(SOON, broker.expect_content::<basic::Publish<'_>>(1)).await;
        assert_eq!(published.expect("nothing is written").body, body);
    }
}
