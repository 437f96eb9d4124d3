//! The channels of a connection: frames are sorted here and handed to the virtual host.

use std::sync::Arc;
// Not tokio's, which may stand still.
use std::time::{Duration, Instant};

use bytes::Bytes;
use leveret_wire::method::{Encode, basic, channel, connection};
use leveret_wire::{
    Assembler, Content, DecodeError, Fault, Frame, FrameBatch, FrameKind, Method, PartialBody,
    ReplyCode, ShortStr,
};

use super::{Agreed, End, PUBLISH, Refused, is_fatal, texts, unexpected_frame};
use crate::arguments::words;
use crate::erlang::Binary;
use crate::outlet::Outlet;
use crate::profile::Profile;
use crate::refusal::Refusal;
use crate::vhost::{ChannelId, ConnectionId, Incoming, Vhost};

/// How long the frames of a read may keep the virtual host before other connections are served and the alarm is checked. Most
/// reads take less time; but a few bytes may ask for a lot of work.
const TIME_SLICE: Duration = Duration::from_millis(5);

/// After how many frames the clock and the outlet are checked: that takes longer than a small frame.
const CHECK_EVERY: usize = 16;

/// The channels of one connection.
#[derive(Debug)]
pub(super) struct Channels {
    connection: ConnectionId,
    outlet: Arc<Outlet>,
    channel_max: u16,
    max_message_size: u64,
    /// Channel `n` at `n - 1`.
    slots: Vec<Slot>,
    has_published: bool,
    /// How much there is of messages that are not finished.
    unfinished: usize,
    /// Channels on which a message went on with this read.
    continued: Vec<u16>,
}

/// A channel number.
#[derive(Debug)]
enum Slot {
    Free,
    Open(Box<Lane>),
    /// It was closed from here. Everything is passed over until the client agrees.
    Closing,
}

#[derive(Debug)]
struct Lane {
    id: ChannelId,
    assembler: Assembler<Carrier>,
    /// How much of a message counts as unfinished.
    unfinished: usize,
}

/// What is kept of a `basic.publish` until its message is whole.
#[derive(Debug)]
struct Carrier {
    /// Exchange and routing key, each with an octet for its length before it.
    names: Bytes,
    mandatory: bool,
    immediate: bool,
}

impl Carrier {
    /// Keeps no read. Says how many bytes there are.
    fn compact(&mut self) -> usize {
        if !self.names.is_unique() {
            self.names = Bytes::copy_from_slice(&self.names);
        }
        self.names.len()
    }

    fn names(&self) -> (ShortStr<'_>, ShortStr<'_>) {
        let exchange = usize::from(self.names.first().copied().unwrap_or(0));
        let exchange_end = exchange + 1;
        let exchange = self.names.get(1..exchange_end).unwrap_or_default();
        let key = self.names.get(exchange_end + 1..).unwrap_or_default();
        (
            ShortStr::from_bytes(exchange).unwrap_or_default(),
            ShortStr::from_bytes(key).unwrap_or_default(),
        )
    }
}

/// Whether the client hangs up with this frame, or agrees that we do.
pub(super) fn ends_the_connection(frame: &Frame<'_>) -> bool {
    frame.channel == 0
        && frame.kind == FrameKind::Method
        && matches!(
            Method::decode(frame.payload),
            Ok(Method::ConnectionCloseOk(_) | Method::ConnectionClose(_))
        )
}

/// Class and method of a method frame's payload.
fn method_id(payload: &[u8]) -> Option<(u16, u16)> {
    let [a, b, c, d] = *payload.first_chunk()?;
    Some((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])))
}

/// RabbitMQ's words for a part of a message where there are none.
fn content_on_channel_0(frame: &Frame<'_>, profile: Profile) -> End {
    const SNIPPET: usize = 16;
    let (how_many, shown) = match frame.payload.get(..SNIPPET) {
        Some(first) if frame.payload.len() > SNIPPET => ("first 16", first),
        _ => ("all", frame.payload),
    };
    let octets = Binary(shown, profile);
    let text = format!("type {}, {how_many} octets = {octets}", frame.kind as u8);
    refused(ReplyCode::UNEXPECTED_FRAME, text, None)
}

fn refused(code: ReplyCode, text: impl std::fmt::Display, method: Option<(u16, u16)>) -> End {
    Refused::new(Refusal::new(code, text), method).into()
}

impl Channels {
    pub(super) fn new(agreed: &Agreed, outlet: Arc<Outlet>, max_message_size: u64) -> Self {
        Channels {
            connection: agreed.connection,
            outlet,
            channel_max: agreed.channel_max,
            max_message_size,
            slots: Vec::new(),
            has_published: false,
            unfinished: 0,
            continued: Vec::new(),
        }
    }

    /// How many bytes there are of messages that are not finished.
    pub(super) fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Sends a heartbeat, unless something else is on its way.
    pub(super) fn probe(&self) {
        self.outlet.probe();
    }

    /// A channel number is used otherwise from here on, and what was unfinished there is forgotten.
    fn replace(&mut self, index: usize, by: Slot) -> Option<Slot> {
        let slot = std::mem::replace(self.slots.get_mut(index)?, by);
        if let Slot::Open(lane) = &slot {
            self.unfinished -= lane.unfinished;
        }
        Some(slot)
    }

    /// What a read brought and is not finished is copied, so that it does not keep the whole read, and counted.
    fn count_unfinished(&mut self) {
        for number in std::mem::take(&mut self.continued) {
            if let Some(Slot::Open(lane)) = self.slots.get_mut(usize::from(number) - 1) {
                self.unfinished -= lane.unfinished;
                lane.unfinished = lane.assembler.compact(Carrier::compact);
                self.unfinished += lane.unfinished;
            }
        }
    }

    /// Whether the client has published since it was asked last.
    pub(super) fn has_published(&mut self) -> bool {
        std::mem::take(&mut self.has_published)
    }

    /// Waits until the client has read enough of what it asked for to ask for more.
    pub(super) async fn until_room(&self) {
        self.outlet.until_room().await;
    }

    /// The body that a body frame of this size belongs to, if it is large.
    pub(super) fn large_body(&mut self, channel: u16, size: usize) -> Option<&mut PartialBody> {
        match self.slots.get_mut(usize::from(channel).checked_sub(1)?)? {
            Slot::Open(lane) => lane.assembler.large_body(size),
            Slot::Free | Slot::Closing => None,
        }
    }

    /// Tells the client something about its connection.
    pub(super) fn tell(&self, method: &impl Encode) {
        self.outlet.send(0, method);
    }

    /// Does what the frames of a read ask for, until the time slice is over or the client has to read before it asks for more.
    /// Says whether frames may be left.
    pub(super) fn frames<'f>(
        &mut self,
        vhost: &mut Vhost,
        batch: &FrameBatch,
        frames: &mut impl Iterator<Item = Frame<'f>>,
    ) -> Result<bool, End> {
        for number in vhost.closed_channels(self.connection) {
            // The client was told. What it sent before it heard is passed over.
            self.replace(usize::from(number) - 1, Slot::Closing);
        }
        let began = Instant::now();
        let mut left = false;
        for (number, frame) in (1_usize..).zip(frames) {
            match (frame.kind, frame.channel) {
                (FrameKind::Heartbeat, _) => {}
                (FrameKind::Method, 0) => self.connection_method(frame.payload)?,
                (_, 0) => return Err(content_on_channel_0(&frame, vhost.profile())),
                _ => self.channel_frame(vhost, frame, batch)?,
            }
            if (number.is_multiple_of(CHECK_EVERY) || vhost.is_full(self.connection))
                && (began.elapsed() >= TIME_SLICE || !self.outlet.has_room())
            {
                left = true;
                break;
            }
        }
        if !self.continued.is_empty() {
            self.count_unfinished();
        }
        Ok(left)
    }

    fn connection_method(&mut self, payload: &[u8]) -> Result<(), End> {
        match Method::decode(payload)? {
            Method::ConnectionClose(_) => {
                self.outlet.send(0, &connection::CloseOk {});
                Err(End::Gone)
            }
            Method::ConnectionUpdateSecret(_) => {
                self.outlet.send(0, &connection::UpdateSecretOk {});
                Ok(())
            }
            _ => {
                let text = "unexpected method in connection state running";
                Err(refused(ReplyCode::CHANNEL_ERROR, text, method_id(payload)))
            }
        }
    }

    #[inline]
    fn channel_frame(
        &mut self,
        vhost: &mut Vhost,
        frame: Frame<'_>,
        batch: &FrameBatch,
    ) -> Result<(), End> {
        let index = usize::from(frame.channel) - 1;
        let Some(Slot::Open(lane)) = self.slots.get_mut(index) else {
            return self.frame_of_no_channel(vhost, frame);
        };
        let content = match frame.kind {
            FrameKind::Method => match Method::decode(frame.payload)? {
                Method::BasicPublish(publish) => {
                    // Between class, method and a reserved number in front, and the flags behind.
                    let names = batch.keep(&frame.payload[6..frame.payload.len() - 1]);
                    let basic::Publish { mandatory, immediate, .. } = publish;
                    lane.assembler.begin(Carrier { names, mandatory, immediate })?;
                    self.continued.push(frame.channel);
                    return Ok(());
                }
                // Only a broker says these. RabbitMQ awaits what follows them, which makes no difference to a client that
                // does not follow them up.
                Method::BasicDeliver(_) | Method::BasicReturn(_) | Method::BasicGetOk(_) => {
                    let (_, id) = method_id(frame.payload).unwrap_or_default();
                    return Err(unexpected_frame(FrameKind::Header, id).into());
                }
                method => {
                    lane.assembler.expect_idle()?;
                    if !texts::are_utf8(&method) {
                        return Err(Refused::new(words::not_utf8(), None).into());
                    }
                    return self.method(vhost, frame.channel, &method, method_id(frame.payload));
                }
            },
            FrameKind::Header => match lane.assembler.header(batch.keep(frame.payload)) {
                Ok(content) => content,
                Err(error) => return self.refuse_header(vhost, frame.channel, error),
            },
            FrameKind::Body => lane.assembler.body(batch.keep(frame.payload))?,
            FrameKind::Heartbeat => None,
        };
        let Some(Content { method, properties, body }) = content else {
            if self.continued.last() != Some(&frame.channel) {
                self.continued.push(frame.channel);
            }
            return Ok(());
        };
        self.unfinished -= std::mem::take(&mut lane.unfinished);
        self.continued.pop_if(|last| *last == frame.channel);
        self.has_published = true;
        let (exchange, routing_key) = method.names();
        let Carrier { mandatory, immediate, .. } = method;
        let incoming = Incoming { exchange, routing_key, mandatory, immediate, properties, body };
        match vhost.publish(lane.id, incoming) {
            Ok(()) => Ok(()),
            Err(refusal) => self.refuse(vhost, frame.channel, refusal, Some(PUBLISH)),
        }
    }

    /// A message that is too large costs its channel, before any of it is kept; what else is wrong with a header costs the
    /// connection.
    fn refuse_header(
        &mut self,
        vhost: &mut Vhost,
        number: u16,
        error: DecodeError,
    ) -> Result<(), End> {
        match *error.fault() {
            Fault::BodyTooLarge { announced, max } => {
                let refusal = words::message_too_large(announced, max);
                self.refuse(vhost, number, refusal, Some(PUBLISH))
            }
            _ => Err(error.into()),
        }
    }

    /// A frame for a number that has no open channel.
    fn frame_of_no_channel(&mut self, vhost: &mut Vhost, frame: Frame<'_>) -> Result<(), End> {
        let number = frame.channel;
        let index = usize::from(number) - 1;
        let closing = matches!(self.slots.get(index), Some(Slot::Closing));
        if frame.kind != FrameKind::Method {
            if closing {
                return Ok(());
            }
            return Err(unexpected_frame(FrameKind::Method, 0).into());
        }
        let id = method_id(frame.payload);
        match Method::decode(frame.payload)? {
            Method::ChannelCloseOk(_) if closing => self.slots[index] = Slot::Free,
            // Both sides closed at the same time: agree, and still await the agreement to ours.
            Method::ChannelClose(_) if closing => {
                self.outlet.send(number, &channel::CloseOk {});
            }
            _ if closing => {}
            Method::ChannelOpen(_) => {
                // How many there are counts, and not what they are called.
                let open = self.slots.iter().filter(|slot| !matches!(slot, Slot::Free)).count();
                if open >= usize::from(self.channel_max) {
                    let text = format!(
                        "number of channels opened ({open}) has reached the negotiated channel_max ({})",
                        self.channel_max
                    );
                    return Err(refused(ReplyCode::NOT_ALLOWED, text, id));
                }
                if self.slots.len() <= index {
                    self.slots.resize_with(index + 1, || Slot::Free);
                }
                let assembler = Assembler::new(self.max_message_size);
                let id = vhost.open_channel(self.connection, number);
                let lane = Lane { id, assembler, unfinished: 0 };
                self.slots[index] = Slot::Open(Box::new(lane));
                self.outlet.send(number, &channel::OpenOk {});
            }
            _ => {
                return Err(refused(ReplyCode::CHANNEL_ERROR, "expected 'channel.open'", id));
            }
        }
        Ok(())
    }

    fn method(
        &mut self,
        vhost: &mut Vhost,
        number: u16,
        method: &Method<'_>,
        id: Option<(u16, u16)>,
    ) -> Result<(), End> {
        let index = usize::from(number) - 1;
        let Some(Slot::Open(lane)) = self.slots.get(index) else { return Ok(()) };
        match method {
            Method::ChannelClose(_) => {
                vhost.close_channel(lane.id);
                self.replace(index, Slot::Free);
                self.outlet.send(number, &channel::CloseOk {});
                Ok(())
            }
            Method::ChannelOpen(_) => {
                let refusal = Refusal::new(ReplyCode::CHANNEL_ERROR, "second 'channel.open' seen");
                self.refuse(vhost, number, refusal, id)
            }
            method => match vhost.method(lane.id, method) {
                Ok(()) => Ok(()),
                Err(refusal) => self.refuse(vhost, number, refusal, id),
            },
        }
    }

    /// A client asked for what it cannot have: it loses the channel, or the connection.
    fn refuse(
        &mut self,
        vhost: &mut Vhost,
        number: u16,
        refusal: Refusal,
        method: Option<(u16, u16)>,
    ) -> Result<(), End> {
        let refused = Refused::new(refusal, method);
        let index = usize::from(number) - 1;
        let lane = match self.replace(index, Slot::Closing) {
            Some(Slot::Open(lane)) => Some(lane.id),
            _ => None,
        };
        if is_fatal(&refused.refusal) {
            // The connection's other channels go later, and may get something of this one.
            if let Some(lane) = lane {
                vhost.fail_channel(lane);
            }
            return Err(refused.into());
        }
        let close = channel::Close {
            reply_code: refused.refusal.code,
            reply_text: refused.refusal.reply_text(),
            class_id: refused.class_id,
            method_id: refused.method_id,
        };
        if let Some(lane) = lane {
            // What it published before is confirmed before that.
            vhost.flush_confirms(lane);
        }
        self.outlet.send(number, &close);
        // What it still gets, because something of its own died and reached a consumer of its own, comes after that.
        if let Some(lane) = lane {
            vhost.close_channel(lane);
        }
        Ok(())
    }
}
