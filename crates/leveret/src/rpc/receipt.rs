//! Receipts: empty replies by which senders learn that a consumer has handled their messages.

use super::reply_route::{ReplyOutput, ReplyRoute};
use super::replying_handler::or_requeue;
use crate::connection::Client;
use crate::consumer::{Call, OnPark};
use crate::error::{BoxError, Error};
use crate::inbox::once::{Passed, is_done};

/// Sends receipts.
pub(crate) struct Receipts(ReplyOutput);

impl Receipts {
    pub(crate) async fn start(client: &Client, queue: &str) -> Result<Self, Error> {
        Ok(Receipts(ReplyOutput::confirmed(client, queue).await?))
    }

    /// A handler that sends a receipt after it has succeeded, before the message is acked. A copy of the message gets the same one.
    pub(crate) fn around(&self, handler: Call) -> Call {
        let output = self.0.clone();
        Call::plain(move |incoming| {
            let route = ReplyRoute::of(incoming.raw_properties(), &output);
            let handling = handler.call(&incoming);
            Box::pin(async move {
                let handled = handling.await;
                if is_done(&handled) || is_copy(&handled) {
                    or_requeue(route.finish(Ok(())).await)?;
                }
                handled
            })
        })
    }

    /// The sender of a message that is parked gets an error.
    pub(crate) fn on_park(&self) -> OnPark {
        self.0.clone().on_park()
    }
}

fn is_copy(handled: &Result<(), BoxError>) -> bool {
    handled.as_ref().is_err_and(|error| Passed::of(error) == Some(Passed::Duplicate))
}
