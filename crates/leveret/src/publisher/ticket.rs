//! The outcome of a publish, to be awaited.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::Handle;
use crate::amqp::lock;
use crate::error::{Error, ErrorKind};

/// The outcome of one publish: `Ok` once the broker has taken responsibility for the message.
///
/// It may be awaited now, later or, if the log is enough, never. It keeps its publisher alive.
#[must_use = "a message is safe only once its ticket says so"]
pub struct Ticket {
    handle: Arc<Handle>,
    /// Of the message; [`CONFIRMED`] or [`FAILED`] once its outcome was handed out. (No flag beside it: a ticket is
    /// moved often, and two words move faster than two and a bit.)
    number: u64,
}

/// No message gets as far as these.
const CONFIRMED: u64 = u64::MAX;
const FAILED: u64 = u64::MAX - 1;

impl Ticket {
    pub(super) fn new(handle: Arc<Handle>, number: u64) -> Self {
        Ticket { handle, number }
    }
}

impl Future for Ticket {
    type Output = Result<(), Error>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        if self.number == CONFIRMED || self.handle.shared.progress.is_confirmed(self.number) {
            self.number = CONFIRMED;
            return Poll::Ready(Ok(()));
        }
        if self.number == FAILED {
            let text = "the message failed: its ticket said why when it was awaited before";
            return Poll::Ready(Err(Error::new(ErrorKind::Invalid, text)));
        }
        let (outcome, _stale_waker) = lock(&self.handle.shared.state).poll(self.number, context);
        match &outcome {
            Poll::Ready(Ok(())) => self.number = CONFIRMED,
            Poll::Ready(Err(_)) => self.number = FAILED,
            Poll::Pending => {}
        }
        if matches!(&outcome, Poll::Ready(Err(error)) if error.kind() == ErrorKind::Unroutable)
            && let Some(callback) = &self.handle.shared.settings.on_unroutable
        {
            (callback.0)();
        }
        outcome
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.number < FAILED && !self.handle.shared.progress.is_confirmed(self.number) {
            let _waker = lock(&self.handle.shared.state).abandon(self.number);
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = (self.number < FAILED).then_some(self.number);
        f.debug_struct("Ticket").field("number", &number).finish_non_exhaustive()
    }
}
