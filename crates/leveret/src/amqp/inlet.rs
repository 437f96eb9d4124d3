//! What comes from the broker: frames are sorted here and handed to whom they concern.
//!
//! The reader owns what only it needs, the assemblers and the consumers of each channel, so that a delivery takes one
//! lock: that of its consumer's queue. A consumer is woken once per read, and not once per message.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use leveret_wire::method::{basic, channel, connection};
use leveret_wire::{Assembler, Content, Frame, FrameBatch, FrameKind, Method, ShortStr};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout;

use super::calls::{Replied, Reply, Subject};
use super::confirm::Returned;
use super::connection::{Core, closed_here};
use super::consumer::{ConsumerQueue, End, Envelope};
use super::delivery::Source;
use super::error::{Error, ErrorKind, close_reason};
use super::handshake::Reader;
use super::link::ChannelState;
use super::lock;

/// The reading half of a connection.
#[derive(Debug)]
pub(super) struct Inlet<R> {
    core: Arc<Core>,
    reader: Reader<R>,
    /// Channel `n` at `n - 1`, once a frame came for it.
    channels: Vec<Option<Lane>>,
    /// Whom to wake when all frames of a read are sorted.
    consumers: Vec<Arc<ConsumerQueue>>,
    publishers: Vec<Arc<ChannelState>>,
    wakers: Vec<Waker>,
}

/// A channel, as its frames see it.
#[derive(Debug)]
struct Lane {
    state: Arc<ChannelState>,
    assembler: Assembler<Carrier>,
    consumers: Vec<(Bytes, Arc<ConsumerQueue>)>,
    /// The highest delivery tag that came.
    last_tag: u64,
}

/// The method that a content follows.
#[derive(Debug)]
enum Carrier {
    /// For the consumer at this place.
    Deliver(usize, Envelope),
    Get(basic::GetOk<'static>),
    Return(basic::Return<'static>),
}

impl<R: AsyncRead + Unpin> Inlet<R> {
    pub(super) fn new(core: Arc<Core>, reader: Reader<R>) -> Self {
        Inlet {
            core,
            reader,
            channels: Vec::new(),
            consumers: Vec::new(),
            publishers: Vec::new(),
            wakers: Vec::new(),
        }
    }

    /// Reads until the connection ends, and says why it did.
    pub(super) async fn run(&mut self) -> Error {
        // Frames may have come along with the last one of the handshake, hence the read comes last.
        loop {
            let sorted = self.sort();
            self.wake();
            if let Err(error) = sorted {
                return error;
            }
            self.wait_for_consumers().await;
            if let Err(error) = self.read().await {
                return error;
            }
        }
    }

    async fn read(&mut self) -> Result<(), Error> {
        let Reader { stream, inbound } = &mut self.reader;
        let heartbeat = self.core.agreed.heartbeat;
        let mut space = inbound.space();
        let read = if heartbeat.is_zero() {
            stream.read_buf(&mut space).await
        } else {
            // Two intervals, as the specification has it: one for the broker's, one for the network's delay.
            timeout(heartbeat * 2, stream.read_buf(&mut space)).await.map_err(|_| {
                let text = format!("nothing was heard from the broker for {:?}", heartbeat * 2);
                Error::new(ErrorKind::HeartbeatLost, text)
            })?
        };
        match read {
            Ok(0) => {
                Err(Error::new(ErrorKind::ConnectionLost, "the broker hung up without a word"))
            }
            Ok(_) => Ok(()),
            Err(error) => {
                Err(Error::caused(ErrorKind::ConnectionLost, "the connection broke", error))
            }
        }
    }

    fn sort(&mut self) -> Result<(), Error> {
        loop {
            let batch = self.reader.inbound.take()?;
            if batch.is_empty() {
                return Ok(());
            }
            for frame in batch.frames() {
                if frame.channel == 0 {
                    self.connection_frame(frame)?;
                } else {
                    self.channel_frame(frame, &batch)?;
                }
            }
        }
    }

    fn connection_frame(&mut self, frame: Frame<'_>) -> Result<(), Error> {
        match frame.kind {
            FrameKind::Heartbeat => return Ok(()),
            FrameKind::Method => {}
            kind => return Err(Error::protocol(format!("a {kind} frame on channel 0"))),
        }
        match Method::decode(frame.payload)? {
            Method::ConnectionClose(close) => {
                let text = close.reply_text.to_str_lossy();
                let reason = close_reason(close.reply_code, &text, close.class_id, close.method_id);
                let kind = ErrorKind::ConnectionClosed(close.reply_code);
                let error = Error::new(kind, format!("the broker closed the connection: {reason}"));
                self.core.sender.close(error.clone(), |outbound, max| {
                    drop(outbound.method(0, &connection::CloseOk {}, max));
                });
                Err(error)
            }
            Method::ConnectionCloseOk(_) => Err(closed_here()),
            Method::ConnectionBlocked(blocked) => {
                self.core.set_blocked(Some(blocked.reason.to_string()));
                Ok(())
            }
            Method::ConnectionUnblocked(_) => {
                self.core.set_blocked(None);
                Ok(())
            }
            reply @ Method::ConnectionUpdateSecretOk(_) => {
                self.core.calls.reply(Reply::Method(reply.into_owned())).map(drop)
            }
            other => Err(Error::protocol(format!("{} on channel 0", other.name()))),
        }
    }

    fn channel_frame(&mut self, frame: Frame<'_>, batch: &FrameBatch) -> Result<(), Error> {
        let index = usize::from(frame.channel) - 1;
        if !matches!(self.channels.get(index), Some(Some(_))) {
            self.open_lane(frame.channel)?;
        }
        let Some(Some(lane)) = self.channels.get_mut(index) else { return Ok(()) };
        if lane.state.check_open().is_err() {
            return self.closing_frame(frame);
        }
        let done = match frame.kind {
            FrameKind::Method => match Method::decode(frame.payload)? {
                Method::BasicDeliver(deliver) => {
                    let place = lane.consumer(&deliver.consumer_tag)?;
                    lane.last_tag = deliver.delivery_tag;
                    // Exchange and routing key are the last two fields: kept as one piece.
                    let (exchange, key) = (deliver.exchange.len(), deliver.routing_key.len());
                    let names = &frame.payload[frame.payload.len() - key - 1 - exchange..];
                    let envelope = Envelope {
                        tag: deliver.delivery_tag,
                        redelivered: deliver.redelivered,
                        source: Source::new(batch.keep(names), exchange),
                    };
                    lane.assembler.begin(Carrier::Deliver(place, envelope))?;
                    None
                }
                Method::BasicGetOk(get) => {
                    lane.last_tag = lane.last_tag.max(get.delivery_tag);
                    lane.assembler.begin(Carrier::Get(get.into_owned()))?;
                    None
                }
                Method::BasicReturn(returned) => {
                    lane.assembler.begin(Carrier::Return(returned.into_owned()))?;
                    None
                }
                method => {
                    lane.assembler.expect_idle()?;
                    return self.method(index, method);
                }
            },
            FrameKind::Header => lane.assembler.header(batch.keep(frame.payload))?,
            FrameKind::Body => lane.assembler.body(batch.keep(frame.payload))?,
            FrameKind::Heartbeat => {
                let text = format!("a heartbeat on channel {}", frame.channel);
                return Err(Error::protocol(text));
            }
        };
        match done {
            Some(content) => self.content(index, content),
            None => Ok(()),
        }
    }

    /// The first frame of a channel came.
    fn open_lane(&mut self, id: u16) -> Result<(), Error> {
        let Some(state) = self.core.channel(id) else {
            return Err(Error::protocol(format!("a frame for channel {id}, which is not open")));
        };
        let index = usize::from(id) - 1;
        if self.channels.len() <= index {
            self.channels.resize_with(index + 1, || None);
        }
        let assembler = Assembler::new(self.core.limits.max_message_size);
        self.channels[index] = Some(Lane { state, assembler, consumers: Vec::new(), last_tag: 0 });
        Ok(())
    }

    /// A frame for a channel that this side has closed: only the broker's agreement matters.
    fn closing_frame(&mut self, frame: Frame<'_>) -> Result<(), Error> {
        if frame.kind != FrameKind::Method {
            return Ok(());
        }
        match Method::decode(frame.payload)? {
            Method::ChannelCloseOk(_) => self.close_lane(frame.channel, None),
            // Both sides closed at the same time: agree, and still await the agreement to ours.
            Method::ChannelClose(_) => self.agree_to_close(frame.channel)?,
            _ => {}
        }
        Ok(())
    }

    fn agree_to_close(&self, id: u16) -> Result<(), Error> {
        self.core.sender.send(|outbound, max| Ok(outbound.method(id, &channel::CloseOk {}, max)?))
    }

    fn close_lane(&mut self, id: u16, error: Option<&Error>) {
        self.core.remove_channel(id);
        if let Some(lane) = self.channels.get_mut(usize::from(id) - 1).and_then(Option::take) {
            lane.end(error.unwrap_or(&super::link::closed_here()));
        }
    }

    fn method(&mut self, index: usize, method: Method<'_>) -> Result<(), Error> {
        let Some(Some(lane)) = self.channels.get_mut(index) else { return Ok(()) };
        let id = lane.state.id;
        match method {
            Method::BasicAck(ack) => self.confirmed(index, ack.delivery_tag, ack.multiple, true),
            Method::BasicNack(nack) => {
                self.confirmed(index, nack.delivery_tag, nack.multiple, false)
            }
            Method::BasicCancel(cancel) => {
                let text = format!("the broker cancelled the consumer {}", cancel.consumer_tag);
                let error = Error::new(ErrorKind::ConsumerCancelled, text);
                lane.end_consumer(&cancel.consumer_tag, End::Failed(error));
                if cancel.nowait {
                    return Ok(());
                }
                let agreed = basic::CancelOk { consumer_tag: cancel.consumer_tag };
                self.core.sender.send(|outbound, max| Ok(outbound.method(id, &agreed, max)?))
            }
            Method::ChannelClose(close) => {
                let text = close.reply_text.to_str_lossy();
                let reason = close_reason(close.reply_code, &text, close.class_id, close.method_id);
                let kind = ErrorKind::ChannelClosed(close.reply_code);
                let error = Error::new(kind, format!("the broker closed the channel: {reason}"));
                // Closed before the answer is sent: no frame may follow it on this channel.
                lane.state.fail(&error);
                self.agree_to_close(id)?;
                if !self.closing(index) {
                    self.close_lane(id, Some(&error));
                }
                Ok(())
            }
            Method::ChannelFlow(flow) => {
                let answer = channel::FlowOk { active: flow.active };
                self.core.sender.send(|outbound, max| Ok(outbound.method(id, &answer, max)?))
            }
            Method::BasicConsumeOk(reply) => {
                let tag = Bytes::copy_from_slice(reply.consumer_tag.as_bytes());
                let reply = Method::BasicConsumeOk(reply.into_owned());
                if let Replied::Begin(queue) = lane.state.calls.reply(Reply::Method(reply))? {
                    lane.consumers.push((tag, queue));
                }
                Ok(())
            }
            Method::BasicCancelOk(reply) => {
                lane.end_consumer(&reply.consumer_tag, End::Cancelled);
                let reply = Method::BasicCancelOk(reply.into_owned());
                lane.state.calls.reply(Reply::Method(reply)).map(drop)
            }
            reply @ Method::BasicRecoverOk(_) => {
                // All that came before will come again under other tags; the old ones are of no more use.
                lock(&lane.state.settled).mark_through(lane.last_tag);
                lane.state.calls.reply(Reply::Method(reply.into_owned())).map(drop)
            }
            reply => lane.state.calls.reply(Reply::Method(reply.into_owned())).map(drop),
        }
    }

    fn closing(&self, index: usize) -> bool {
        let lane = self.channels.get(index).and_then(Option::as_ref);
        lane.is_some_and(|lane| lane.state.close_sent.load(Ordering::Acquire))
    }

    fn confirmed(
        &mut self,
        index: usize,
        number: u64,
        multiple: bool,
        acked: bool,
    ) -> Result<(), Error> {
        let Some(Some(lane)) = self.channels.get(index) else { return Ok(()) };
        let mut ledger = lock(&lane.state.confirms.ledger);
        ledger.answered(number, multiple, acked, &mut self.wakers)?;
        drop(ledger);
        if !self.publishers.last().is_some_and(|last| Arc::ptr_eq(last, &lane.state)) {
            self.publishers.push(Arc::clone(&lane.state));
        }
        Ok(())
    }

    fn content(&mut self, index: usize, content: Content<Carrier>) -> Result<(), Error> {
        let Some(Some(lane)) = self.channels.get_mut(index) else { return Ok(()) };
        let Content { method, properties, body } = content;
        match method {
            Carrier::Deliver(place, envelope) => {
                let tag = envelope.tag;
                let Some((_, queue)) = lane.consumers.get(place) else { return Ok(()) };
                if queue.auto_ack {
                    lock(&lane.state.settled).mark(tag);
                }
                if queue.push(Content { method: envelope, properties, body }) {
                    if !self.consumers.last().is_some_and(|last| Arc::ptr_eq(last, queue)) {
                        self.consumers.push(Arc::clone(queue));
                    }
                    return Ok(());
                }
                // The consumer was dropped, and its cancel is on its way.
                if queue.auto_ack {
                    return Ok(());
                }
                self.give_back(index, tag)
            }
            Carrier::Get(method) => {
                let got = Content { method, properties, body };
                match lane.state.calls.reply(Reply::Got(Box::new(got)))? {
                    Replied::GiveBack(tag) => self.give_back(index, tag),
                    _ => Ok(()),
                }
            }
            Carrier::Return(method) => lane.state.message_returned(Returned {
                reply_code: method.reply_code,
                reply_text: method.reply_text.to_string(),
                exchange: method.exchange.to_string(),
                routing_key: method.routing_key.to_string(),
                properties,
                body,
            }),
        }
    }

    /// A delivery that nobody wants goes back to its queue.
    fn give_back(&self, index: usize, tag: u64) -> Result<(), Error> {
        let Some(Some(lane)) = self.channels.get(index) else { return Ok(()) };
        lock(&lane.state.settled).mark(tag);
        let back = basic::Nack { delivery_tag: tag, multiple: false, requeue: true };
        let id = lane.state.id;
        self.core.sender.send(|outbound, max| Ok(outbound.method(id, &back, max)?))
    }

    fn wake(&mut self) {
        for waker in self.wakers.drain(..) {
            waker.wake();
        }
        for channel in self.publishers.drain(..) {
            channel.confirms.progress.notify_waiters();
        }
        for queue in &self.consumers {
            queue.wake();
        }
    }

    /// A consumer without prefetch that does not keep up makes us stop reading, and with us all channels: but not for
    /// long. One that takes nothing for that time is ended.
    async fn wait_for_consumers(&mut self) {
        let patience = self.core.limits.slow_consumer_timeout;
        for queue in std::mem::take(&mut self.consumers) {
            if queue.is_over_bound() && timeout(patience, queue.until_within_bound()).await.is_err()
            {
                self.end_slow_consumer(&queue, patience);
            }
        }
    }

    fn end_slow_consumer(&mut self, queue: &Arc<ConsumerQueue>, patience: Duration) {
        let text = format!(
            "the consumer took nothing for {patience:?} with more than {} deliveries waiting; \
             give it a prefetch limit, or take deliveries faster",
            queue.bound
        );
        let error = Error::new(ErrorKind::ConsumerTooSlow, text);
        for lane in self.channels.iter_mut().flatten() {
            let Some(place) = lane.consumers.iter().position(|(_, one)| Arc::ptr_eq(one, queue))
            else {
                continue;
            };
            let tag = ShortStr::from_bytes(lane.consumers[place].0.to_vec()).unwrap_or_default();
            let cancel = basic::Cancel { consumer_tag: tag.borrowed(), nowait: false };
            let id = lane.state.id;
            let send = || self.core.sender.send(|out, max| Ok(out.method(id, &cancel, max)?));
            let subject = Subject::Consumer(tag.clone(), None);
            drop(lane.state.calls.begin(basic::Cancel::NAME, subject, send));
        }
        queue.end(End::Failed(error));
    }

    /// The connection ended: so do its consumers.
    pub(super) fn end(&mut self, error: &Error) {
        for lane in self.channels.drain(..).flatten() {
            lane.end(error);
        }
    }
}

impl Lane {
    /// The place of a consumer.
    #[inline]
    fn consumer(&self, tag: &ShortStr<'_>) -> Result<usize, Error> {
        let place = self.consumers.iter().position(|(name, _)| name == tag.as_bytes());
        place.ok_or_else(|| {
            Error::protocol(format!("a delivery for {tag}, which is no consumer here"))
        })
    }

    fn end_consumer(&mut self, tag: &ShortStr<'_>, end: End) {
        let found = self.consumers.iter().position(|(name, _)| name == tag.as_bytes());
        if let Some(place) = found {
            self.consumers.swap_remove(place).1.end(end);
        }
    }

    fn end(self, error: &Error) {
        self.state.fail(error);
        for (_, queue) in self.consumers {
            queue.end(End::Failed(error.clone()));
        }
    }
}
