//! What goes out on one connection: the broker encodes into it, the connection's writer takes it whole.

use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Buf;
use leveret_wire::method::Encode;
use leveret_wire::{FrameMax, Outbound};
use tokio::sync::Notify;

/// From here on the consumers of a connection get nothing more until its writer has taken the buffer: what they would
/// get stays in its queues, for others to take. Enough to keep a socket busy for some milliseconds.
pub(crate) const HIGH_WATER_MARK: usize = 1024 * 1024;

/// From here on the client's frames wait: answers that it does not read must not fill the memory. Deliveries alone do not get
/// there, unless a single message is as large.
const STOP_READING: usize = 4 * HIGH_WATER_MARK;

/// The outbound buffer of one connection.
#[derive(Debug)]
pub(crate) struct Outlet {
    state: Mutex<State>,
    filled: Notify,
    /// The writer has taken all there was.
    taken: Notify,
}

#[derive(Debug)]
struct State {
    outbound: Outbound,
    frame_max: FrameMax,
    /// The writer has nothing to do; whoever fills the buffer wakes it.
    writer_waits: bool,
    /// Somebody was turned away, and wants to know when there is room.
    was_full: bool,
    /// Nothing is taken any more, and the writer ends when all is written.
    closed: bool,
}

impl State {
    /// What cannot be encoded ends the connection: a client must not wait for it, nor take what follows for it. Every method fits
    /// the smallest frame, and a header may be of any size, so this does not happen.
    #[inline]
    fn encode<E>(&mut self, encode: impl FnOnce(&mut Outbound, FrameMax) -> Result<(), E>) {
        let max = self.frame_max;
        self.closed |= encode(&mut self.outbound, max).is_err();
    }
}

/// Whether consumers may get more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Some,
    None,
}

/// What the writer found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Bytes to write.
    Some,
    /// Bytes to write; and there is room again where there was none.
    Drained,
    /// All was written, and no more will come.
    End,
}

impl Outlet {
    pub(crate) fn new() -> Self {
        let state = State {
            outbound: Outbound::new(),
            frame_max: FrameMax::DEFAULT,
            writer_waits: false,
            was_full: false,
            closed: false,
        };
        Outlet { state: Mutex::new(state), filled: Notify::new(), taken: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The largest frame that was agreed on.
    pub(crate) fn set_frame_max(&self, max: FrameMax) {
        self.lock().frame_max = max;
    }

    /// Encodes frames. Says whether the writer is to be woken, which is for the caller to do, once for many.
    #[inline]
    #[must_use = "the writer may sleep"]
    pub(crate) fn put<E>(
        &self,
        encode: impl FnOnce(&mut Outbound, FrameMax) -> Result<(), E>,
    ) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        state.encode(encode);
        std::mem::take(&mut state.writer_waits)
    }

    /// Encodes a delivery, and says whether there is room for another. If not, [`Taken::Drained`] will tell when.
    #[inline]
    #[must_use = "the writer may sleep"]
    pub(crate) fn deliver<E>(
        &self,
        encode: impl FnOnce(&mut Outbound, FrameMax) -> Result<(), E>,
    ) -> (bool, Room) {
        let mut state = self.lock();
        if state.closed {
            return (false, Room::None);
        }
        state.encode(encode);
        let full = state.outbound.remaining() >= HIGH_WATER_MARK;
        state.was_full |= full;
        let room = if full { Room::None } else { Room::Some };
        (std::mem::take(&mut state.writer_waits), room)
    }

    /// How many bytes the writer has not taken yet, if there is no room for more. Then [`Taken::Drained`] will tell when they
    /// are written.
    pub(crate) fn remaining_if_full(&self) -> usize {
        let mut state = self.lock();
        let remaining = state.outbound.remaining();
        let full = remaining >= HIGH_WATER_MARK;
        state.was_full |= full;
        if full { remaining } else { 0 }
    }

    /// Whether the client may ask for more.
    pub(crate) fn has_room(&self) -> bool {
        self.lock().outbound.remaining() < STOP_READING
    }

    /// Encodes a method and wakes the writer.
    pub(crate) fn send(&self, channel: u16, method: &(impl Encode + ?Sized)) {
        if self.put(|outbound, max| outbound.method(channel, method, max)) {
            self.wake();
        }
    }

    /// Sends a heartbeat, unless there is something on its way anyway.
    pub(crate) fn probe(&self) {
        let mut state = self.lock();
        if !state.closed && !state.outbound.has_remaining() {
            state.outbound.heartbeat();
            drop(state);
            self.wake();
        }
    }

    pub(crate) fn wake(&self) {
        self.filled.notify_one();
    }

    /// Waits until so much of what was asked for is on its way that more may be asked.
    pub(crate) async fn until_room(&self) {
        loop {
            let mut taken = pin!(self.taken.notified());
            taken.as_mut().enable();
            if self.has_room() {
                return;
            }
            taken.await;
        }
    }

    /// Takes nothing more; the writer ends when all is written.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.wake();
    }

    /// The writer's side: waits for bytes and swaps them against its empty buffer.
    pub(crate) async fn take(&self, buffer: &mut Outbound) -> Taken {
        loop {
            {
                let mut state = self.lock();
                if state.outbound.has_remaining() {
                    std::mem::swap(&mut state.outbound, buffer);
                    self.taken.notify_waiters();
                    let drained = std::mem::take(&mut state.was_full);
                    return if drained { Taken::Drained } else { Taken::Some };
                }
                if state.closed {
                    return Taken::End;
                }
                state.writer_waits = true;
            }
            // A permit is kept for us if the wake-up comes before we wait.
            self.filled.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leveret_wire::method::channel;
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn the_writer_takes_all_there_is_and_then_the_end() {
        let outlet = Outlet::new();
        outlet.send(1, &channel::OpenOk {});
        outlet.send(2, &channel::OpenOk {});
        outlet.close();
        outlet.send(3, &channel::OpenOk {});
        let mut buffer = Outbound::new();
        assert_eq!(outlet.take(&mut buffer).await, Taken::Some);
        assert_eq!(buffer.remaining(), 32);
        assert_eq!(outlet.take(&mut Outbound::new()).await, Taken::End);
    }

    #[tokio::test]
    async fn a_full_one_says_when_there_is_room_again() {
        let outlet = Outlet::new();
        let deliver =
            || outlet.deliver(|outbound, max| outbound.method(1, &channel::OpenOk {}, max));
        while deliver().1 == Room::Some {}
        assert_eq!(outlet.take(&mut Outbound::new()).await, Taken::Drained);
        assert_eq!(deliver().1, Room::Some);
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_read_the_answers_may_not_ask_for_more() {
        let outlet = Outlet::new();
        while timeout(Duration::from_secs(1), outlet.until_room()).await.is_ok() {
            (0..1000).for_each(|_| outlet.send(1, &channel::OpenOk {}));
        }
        assert!(outlet.lock().outbound.remaining() < STOP_READING + 16_000);
        let mut buffer = Outbound::new();
        let (_, taken) = tokio::join!(outlet.until_room(), outlet.take(&mut buffer));
        assert_eq!(taken, Taken::Some);
    }
}
