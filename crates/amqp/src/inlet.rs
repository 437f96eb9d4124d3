//! What comes from the broker: frames are sorted here and handed to whom they concern.
//!
//! The reader owns what only it needs, the assemblers and the consumers of each channel, so that a delivery takes one
//! lock: that of its consumer's queue. A consumer is woken once per read, and not once per message.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};
use std::time::Duration;

use leveret_wire::method::{basic, channel, connection};
use leveret_wire::{
    Assembler, Content, Frame, FrameBatch, FrameKind, Method, PartialBody, ShortStr,
};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout_at;

use super::calls::{Begun, Got, Reply, Subject};
use super::confirm::Returned;
use super::connection::Core;
use super::consumer::{ConsumerQueue, End};
use super::delivery::{DeliveryInfo, is_of_stream};
use super::error::{ClosedWith, Error, ErrorKind, closed_by_broker};
use super::handshake::Reader;
use super::handshake::deadline_in;
use super::link::{ChannelState, Pause};
use super::liveness::Liveness;
use super::lock;

/// How much is read before consumers get a chance to take it. If reading ran on for as long as there is something to read,
/// large messages would pile up, in memory that is new for each of them and costs a page fault every 4 KiB.
const AHEAD: usize = 256 * 1024;

/// How often it is read, however little, before the writer gets a chance. tokio lets a task do 128 things before it has to let
/// others run; what reads first, and has all of them, would leave nothing for who writes.
const IN_A_ROW: u32 = 32;

/// The reading half of a connection.
#[derive(Debug)]
pub(super) struct Inlet<R> {
    core: Arc<Core>,
    reader: Reader<R>,
    /// Of the broker.
    liveness: Liveness,
    /// Channel `n` at `n - 1`.
    channels: Vec<Slot>,
    /// Whom to wake when all frames of a read are sorted.
    consumers: Vec<Arc<ConsumerQueue>>,
    publishers: Vec<Arc<ChannelState>>,
    wakers: Vec<Waker>,
    /// What the sender was told: the last read gave something at once.
    reading: bool,
    /// How much was read since others had a chance to run, and how often.
    ahead: usize,
    in_a_row: u32,
}

/// A channel number.
#[derive(Debug)]
enum Slot {
    /// No frame came for it yet.
    Unused,
    Open(Box<Lane>),
    /// The broker closed it. It may still send what was under way before, deliveries above all, until the number is
    /// opened anew: all that is passed over.
    Drained,
}

/// A channel, as its frames see it.
#[derive(Debug)]
struct Lane {
    state: Arc<ChannelState>,
    assembler: Assembler<Carrier>,
    consumers: Vec<Arc<ConsumerQueue>>,
    /// Consumers that ended lately, the last first: deliveries to them may still be under way.
    retired: VecDeque<Arc<ConsumerQueue>>,
    /// Of what kind those were that are not among them any more, if there are any.
    forgotten: Option<Kind>,
    /// The highest delivery tag that came. The next is one more.
    last_tag: u64,
    /// How many direct replies came since: they have a tag that 3.10 gives to the next delivery as well, and 4.3 does
    /// not.
    replies: u64,
}

/// How many ended consumers a channel remembers by name.
const KEEP_RETIRED: usize = 64;

/// What has to be known of a consumer to take deliveries that come too late.
#[derive(Clone, Copy, Debug)]
struct Kind {
    replies: bool,
    auto_ack: bool,
}

impl Kind {
    fn of(queue: &ConsumerQueue) -> Kind {
        Kind { replies: queue.replies, auto_ack: queue.auto_ack }
    }

    /// One of either kind. What would be wrong for one of them is not done: a delivery that cannot be given back for
    /// certain stays with the channel.
    fn or(self, other: Kind) -> Kind {
        let (replies, auto_ack) = (self.replies || other.replies, self.auto_ack || other.auto_ack);
        Kind { replies, auto_ack }
    }
}

/// The method that a content follows.
#[derive(Debug)]
enum Carrier {
    /// For the consumer at this place, or for one that ended.
    Deliver(Option<usize>, DeliveryInfo),
    /// For a consumer that ended, without a need to be settled.
    Passed,
    // In boxes, because all that is moved with each delivery is as large as the largest of these.
    Get(Box<basic::GetOk<'static>>),
    Return(Box<basic::Return<'static>>),
}

impl<R: AsyncRead + Unpin> Inlet<R> {
    pub(super) fn new(core: Arc<Core>, reader: Reader<R>) -> Self {
        let liveness = Liveness::new(core.agreed.heartbeat);
        Inlet {
            core,
            reader,
            liveness,
            channels: Vec::new(),
            consumers: Vec::new(),
            publishers: Vec::new(),
            wakers: Vec::new(),
            reading: false,
            ahead: 0,
            in_a_row: 0,
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
            self.let_others_run().await;
            self.wait_for_consumers().await;
            if let Err(error) = self.read().await {
                return error;
            }
        }
    }

    async fn read(&mut self) -> Result<(), Error> {
        let Reader { stream, inbound } = &mut self.reader;
        let mut space =
            inbound.space_for(|channel, size| large_body(&mut self.channels, channel, size));
        let mut room = space.room();
        let mut read = pin!(stream.read_buf(&mut room));
        let at_once = poll_fn(|context| Poll::Ready(read.as_mut().poll(context))).await;
        if at_once.is_ready() != self.reading {
            self.reading = at_once.is_ready();
            self.core.sender.set_reading(self.reading);
        }
        let read = match at_once {
            Poll::Ready(read) => read,
            Poll::Pending => self.liveness.within(&self.core, read).await?,
        };
        match read {
            Ok(0) => {
                Err(Error::new(ErrorKind::ConnectionLost, "the broker hung up without a word"))
            }
            Ok(read) => {
                self.liveness.heard(&self.core);
                if !self.reading {
                    // Who had to wait has let others run.
                    (self.ahead, self.in_a_row) = (0, 0);
                }
                self.ahead += read;
                self.in_a_row += 1;
                Ok(())
            }
            Err(error) => {
                Err(Error::caused(ErrorKind::ConnectionLost, "the connection broke", error))
            }
        }
    }

    /// Consumers that were woken have to share a thread with this task, it may be; and the writer shares the task.
    async fn let_others_run(&mut self) {
        if self.ahead >= AHEAD || self.in_a_row >= IN_A_ROW {
            (self.ahead, self.in_a_row) = (0, 0);
            tokio::task::yield_now().await;
        }
    }

    /// Nothing is read for now, so acks go out.
    fn stop_reading(&mut self) {
        if std::mem::take(&mut self.reading) {
            self.core.sender.set_reading(false);
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
                let error = closed_by_broker(
                    "connection",
                    &ClosedWith {
                        code: close.reply_code,
                        text: &close.reply_text.to_str_lossy(),
                        class: close.class_id,
                        method: close.method_id,
                    },
                );
                self.core.sender.close(error.clone(), |outbound, max| {
                    drop(outbound.method(0, &connection::CloseOk {}, max));
                });
                Err(error)
            }
            Method::ConnectionCloseOk(_) => match self.core.sender.closed() {
                Some(reason) => Err(reason),
                None => Err(Error::protocol("connection.close-ok, and nobody asked for it")),
            },
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
        if !matches!(self.channels.get(index), Some(Slot::Open(_))) && !self.open_lane(frame)? {
            return Ok(());
        }
        let Some(Slot::Open(lane)) = self.channels.get_mut(index) else { return Ok(()) };
        if lane.state.check_open().is_err() {
            return self.closing_frame(frame);
        }
        let done = match frame.kind {
            FrameKind::Method => match Method::decode(frame.payload)? {
                Method::BasicDeliver(deliver) => {
                    let carrier = lane.deliver(&deliver, frame.payload, batch)?;
                    lane.assembler.begin(carrier)?;
                    None
                }
                Method::BasicGetOk(get) => {
                    lane.next_tag(get.delivery_tag)?;
                    lane.assembler.begin(Carrier::Get(Box::new(get.into_owned())))?;
                    None
                }
                Method::BasicReturn(returned) => {
                    lane.assembler.begin(Carrier::Return(Box::new(returned.into_owned())))?;
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

    /// A frame for a number without an open channel. Says whether it is for a channel that begins with it: its
    /// `open-ok`, or the broker's refusal.
    fn open_lane(&mut self, frame: Frame<'_>) -> Result<bool, Error> {
        let id = frame.channel;
        let index = usize::from(id) - 1;
        let begins = frame.kind == FrameKind::Method
            && matches!(
                Method::decode(frame.payload)?,
                Method::ChannelOpenOk(_) | Method::ChannelClose(_)
            );
        let state = if begins { self.core.channel(id) } else { None };
        match (state, self.channels.get(index)) {
            (Some(state), _) => {
                if self.channels.len() <= index {
                    self.channels.resize_with(index + 1, || Slot::Unused);
                }
                self.channels[index] = Slot::Open(Box::new(Lane {
                    state,
                    assembler: Assembler::new(self.core.limits.max_message_size),
                    consumers: Vec::new(),
                    retired: VecDeque::new(),
                    forgotten: None,
                    last_tag: 0,
                    replies: 0,
                }));
                Ok(true)
            }
            (None, Some(Slot::Drained)) => Ok(false),
            (None, _) => {
                Err(Error::protocol(format!("a frame for channel {id}, which is not open")))
            }
        }
    }

    /// A frame for a channel that this side has closed: only the broker's agreement matters.
    fn closing_frame(&mut self, frame: Frame<'_>) -> Result<(), Error> {
        if frame.kind != FrameKind::Method {
            return Ok(());
        }
        match Method::decode(frame.payload)? {
            Method::ChannelCloseOk(_) => self.close_lane(frame.channel, None),
            // Both sides closed at the same time. RabbitMQ ends the channel when it gets the agreement to its own close,
            // and may forget to agree to ours; what it still sends is drained.
            Method::ChannelClose(_) => {
                self.agree_to_close(frame.channel);
                self.close_lane(frame.channel, None);
            }
            _ => {}
        }
        Ok(())
    }

    fn agree_to_close(&self, id: u16) {
        // If this side has closed the connection meanwhile, nothing needs to be agreed to.
        let agree = &channel::CloseOk {};
        let _ = self.core.sender.send(|outbound, max| Ok(outbound.method(id, agree, max)?));
    }

    /// The number is free again.
    fn close_lane(&mut self, id: u16, error: Option<&Error>) {
        self.core.remove_channel(id);
        if let Some(slot) = self.channels.get_mut(usize::from(id) - 1)
            && let Slot::Open(lane) = std::mem::replace(slot, Slot::Drained)
        {
            lane.state.fail(error.unwrap_or(&super::link::closed_here()));
        }
    }

    fn method(&mut self, index: usize, method: Method<'_>) -> Result<(), Error> {
        let Some(Slot::Open(lane)) = self.channels.get_mut(index) else { return Ok(()) };
        let state = &lane.state;
        match method {
            Method::BasicAck(ack) => self.confirmed(index, ack.delivery_tag, ack.multiple, true),
            Method::BasicNack(nack) => {
                self.confirmed(index, nack.delivery_tag, nack.multiple, false)
            }
            Method::BasicCancel(cancel) => {
                let text = format!("the broker cancelled the consumer {}", cancel.consumer_tag);
                let error = Error::new(ErrorKind::ConsumerCancelled, text);
                if !cancel.nowait {
                    let consumer_tag = cancel.consumer_tag.borrowed();
                    self.core.answer(state, &basic::CancelOk { consumer_tag });
                }
                lane.end_consumer(&cancel.consumer_tag, End::Failed(error));
                Ok(())
            }
            Method::ChannelClose(close) => {
                let error = closed_by_broker(
                    "channel",
                    &ClosedWith {
                        code: close.reply_code,
                        text: &close.reply_text.to_str_lossy(),
                        class: close.class_id,
                        method: close.method_id,
                    },
                );
                // Closed before the answer is sent: no frame may follow it on this channel.
                state.fail(&error);
                let id = state.id;
                self.agree_to_close(id);
                self.close_lane(id, Some(&error));
                Ok(())
            }
            Method::ChannelFlow(flow) => {
                state.pause(Pause::Flow, !flow.active);
                self.core.sender.look_again();
                self.core.answer(state, &channel::FlowOk { active: flow.active });
                Ok(())
            }
            Method::BasicConsumeOk(reply) => {
                let reply = Method::BasicConsumeOk(reply.into_owned());
                if let Some(Begun { queue, unwanted }) = state.calls.reply(Reply::Method(reply))? {
                    if unwanted {
                        cancel(&self.core, state, &queue.tag);
                    }
                    lane.consumers.push(queue);
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
                lock(&state.settled).resume(lane.last_tag);
                for queue in &lane.consumers {
                    queue.set_stale(lane.last_tag);
                }
                state.calls.reply(Reply::Method(reply.into_owned())).map(drop)
            }
            reply @ Method::ConfirmSelectOk(_) => {
                // Returns that came before belong to publishes without confirms.
                state.confirming.store(true, Ordering::Relaxed);
                state.calls.reply(Reply::Method(reply.into_owned())).map(drop)
            }
            reply @ Method::TxCommitOk(_) => {
                state.committed(&self.core.sender);
                state.calls.reply(Reply::Method(reply.into_owned())).map(drop)
            }
            // To a close of the channel that had this number before, see `closing_frame`.
            Method::ChannelCloseOk(_) => Ok(()),
            reply => state.calls.reply(Reply::Method(reply.into_owned())).map(drop),
        }
    }

    fn confirmed(
        &mut self,
        index: usize,
        number: u64,
        multiple: bool,
        acked: bool,
    ) -> Result<(), Error> {
        let Some(Slot::Open(lane)) = self.channels.get(index) else { return Ok(()) };
        lane.state.sink().answered(number, multiple, acked, &mut self.wakers)?;
        if !self.publishers.last().is_some_and(|last| Arc::ptr_eq(last, &lane.state)) {
            self.publishers.push(Arc::clone(&lane.state));
        }
        Ok(())
    }

    fn content(&mut self, index: usize, content: Content<Carrier>) -> Result<(), Error> {
        let Some(Slot::Open(lane)) = self.channels.get_mut(index) else { return Ok(()) };
        let Content { method, properties, body } = content;
        match method {
            Carrier::Deliver(place, info) => {
                let tag = info.delivery_tag();
                let queue = place.and_then(|place| lane.consumers.get(place));
                if queue.is_some_and(|queue| queue.auto_ack && !queue.replies) {
                    lock(&lane.state.settled).mark(tag);
                }
                let content = Content { method: info, properties, body };
                let unwanted = match queue {
                    Some(queue) => queue.push(content),
                    None => Some(content),
                };
                let is_last =
                    |queue| self.consumers.last().is_some_and(|last| Arc::ptr_eq(last, queue));
                match (unwanted, queue) {
                    (None, Some(queue)) if !is_last(queue) => {
                        self.consumers.push(Arc::clone(queue));
                    }
                    // The consumer was dropped.
                    (Some(content), queue) if queue.is_none_or(|queue| !queue.auto_ack) => {
                        self.core.requeue(&lane.state, tag, is_of_stream(&content.properties));
                    }
                    _ => {}
                }
                Ok(())
            }
            Carrier::Passed => Ok(()),
            Carrier::Get(method) => {
                let got = Content { method: *method, properties, body };
                let got = Got::new(got, &self.core, &lane.state);
                lane.state.calls.reply(Reply::Got(got)).map(drop)
            }
            Carrier::Return(method) => {
                lane.state.message_returned(Returned {
                    reply_code: method.reply_code,
                    reply_text: method.reply_text.to_string(),
                    exchange: method.exchange.to_string(),
                    routing_key: method.routing_key.to_string(),
                    properties,
                    body,
                });
                Ok(())
            }
        }
    }

    fn wake(&mut self) {
        let wakers = &mut self.wakers;
        self.consumers.retain(|queue| !queue.pass_on(wakers));
        // A task that has its confirm or its reply has the next message ready.
        if self.wakers.len() > 1 {
            self.core.sender.expect(self.wakers.len());
        }
        for waker in self.wakers.drain(..) {
            waker.wake();
        }
        for channel in self.publishers.drain(..) {
            channel.confirm_progress.notify_waiters();
        }
        for queue in &self.consumers {
            queue.wake();
        }
    }

    /// A consumer without prefetch that does not keep up makes us stop reading, and with us all channels: but not for
    /// long. Those that have taken nothing by then are ended.
    async fn wait_for_consumers(&mut self) {
        let patience = self.core.limits.slow_consumer_timeout;
        let mut deadline = None;
        for queue in std::mem::take(&mut self.consumers) {
            if !queue.is_over_bound() {
                continue;
            }
            self.stop_reading();
            // One deadline for all of them together.
            let deadline = *deadline.get_or_insert_with(|| deadline_in(patience));
            if timeout_at(deadline, queue.until_within_bound()).await.is_err() {
                self.end_slow_consumer(&queue, patience);
            }
        }
    }

    fn end_slow_consumer(&mut self, queue: &Arc<ConsumerQueue>, patience: Duration) {
        let text = format!(
            "the consumer {} took nothing for {patience:?} with more deliveries waiting than it may have: take them \
             faster, consume without auto-ack, or give it a connection of its own",
            queue.tag
        );
        for slot in &self.channels {
            if let Slot::Open(lane) = slot
                && lane.consumers.iter().any(|one| Arc::ptr_eq(one, queue))
                && queue.begin_cancel()
            {
                cancel(&self.core, &lane.state, &queue.tag);
            }
        }
        queue.end(End::Failed(Error::new(ErrorKind::ConsumerTooSlow, text)));
    }

    /// The connection ended: so do its channels and consumers.
    pub(super) fn end(&mut self, error: &Error) {
        for slot in self.channels.drain(..) {
            if let Slot::Open(lane) = slot {
                lane.state.fail(error);
            }
        }
    }
}

/// The body that a body frame of this size belongs to, if it is large.
fn large_body(channels: &mut [Slot], channel: u16, size: usize) -> Option<&mut PartialBody> {
    match channels.get_mut(usize::from(channel).checked_sub(1)?)? {
        Slot::Open(lane) => lane.assembler.large_body(size),
        Slot::Unused | Slot::Drained => None,
    }
}

/// Cancels a consumer that nobody waits for.
fn cancel(core: &Core, state: &ChannelState, tag: &ShortStr<'static>) {
    let cancel = basic::Cancel { consumer_tag: tag.borrowed(), nowait: false };
    let subject = Subject::Consumer(tag.clone(), None);
    let send =
        || state.send(&core.sender, |outbound, max| Ok(outbound.method(state.id, &cancel, max)?));
    drop(state.calls.begin(basic::Cancel::NAME, subject, send));
}

impl Lane {
    /// Delivery tags count up by one; anything else would wreck the books.
    fn next_tag(&mut self, tag: u64) -> Result<(), Error> {
        let skipped = tag.checked_sub(self.last_tag + 1).filter(|skipped| *skipped <= self.replies);
        let Some(skipped) = skipped else {
            let text = format!("delivery tag {tag} after {}", self.last_tag);
            return Err(Error::protocol(text));
        };
        if skipped > 0 {
            let mut settled = lock(&self.state.settled);
            for reply in self.last_tag + 1..tag {
                settled.mark(reply);
            }
        }
        self.last_tag = tag;
        self.replies = 0;
        Ok(())
    }

    #[inline]
    fn deliver(
        &mut self,
        deliver: &basic::Deliver<'_>,
        payload: &[u8],
        batch: &FrameBatch,
    ) -> Result<Carrier, Error> {
        let place = self.consumers.iter().position(|one| one.tag == deliver.consumer_tag);
        let known = match place {
            Some(place) => self.consumers.get(place),
            None => self.retired.iter().find(|one| one.tag == deliver.consumer_tag),
        };
        let Some(kind) = known.map(|queue| Kind::of(queue)).or(self.forgotten) else {
            let tag = &deliver.consumer_tag;
            let text = format!("a delivery for {tag}, which is no consumer here");
            return Err(Error::protocol(text));
        };
        match kind.replies {
            true => self.replies += 1,
            false => self.next_tag(deliver.delivery_tag)?,
        }
        if place.is_none() && kind.auto_ack {
            return Ok(Carrier::Passed);
        }
        // Exchange and routing key are the last two fields: kept as one piece, with the octets of their lengths.
        let names = 1 + deliver.exchange.len() + 1 + deliver.routing_key.len();
        let names = batch.keep(&payload[payload.len() - names..]);
        let info = DeliveryInfo::new(deliver.delivery_tag, deliver.redelivered, names);
        Ok(Carrier::Deliver(place, info))
    }

    fn end_consumer(&mut self, tag: &ShortStr<'_>, end: End) {
        if let Some(place) = self.consumers.iter().position(|one| one.tag == *tag) {
            let queue = self.consumers.swap_remove(place);
            queue.end(end);
            self.retired.push_front(queue);
        }
        if self.retired.len() > KEEP_RETIRED
            && let Some(oldest) = self.retired.pop_back()
        {
            let kind = Kind::of(&oldest);
            self.forgotten = Some(self.forgotten.map_or(kind, |other| other.or(kind)));
        }
    }
}
