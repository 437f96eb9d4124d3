//! Telling senders that their messages were handled, which is no more than an empty reply.

use super::answering::sent;
use super::replier::{Outlet, Replying, WayBack};
use super::service::tell_callers;
use crate::connection::Client;
use crate::consumer::{Call, OnPark};
use crate::error::{BoxError, Error};
use crate::inbox::once::{Passed, is_done};

/// Sends them.
pub(crate) struct Receipts(Outlet);

impl Receipts {
    pub(crate) async fn start(client: &Client, queue: &str) -> Result<Self, Error> {
        Ok(Receipts(Outlet::Confirmed(Replying::start(client, queue).await?)))
    }

    /// A handler after which the sender is told, before the message is acked. Of a copy, it is told the same.
    pub(crate) fn around(&self, handler: Call) -> Call {
        let outlet = self.0.clone();
        Call::plain(move |incoming| {
            let way = WayBack::of(incoming.raw_properties(), &outlet);
            let handling = handler.call(&incoming);
            Box::pin(async move {
                let handled = handling.await;
                if is_done(&handled) || is_copy(&handled) {
                    sent(way.finish(Ok(())).await)?;
                }
                handled
            })
        })
    }

    /// Who waits for a message that is parked is told that.
    pub(crate) fn on_park(&self) -> OnPark {
        tell_callers(self.0.clone())
    }
}

fn is_copy(handled: &Result<(), BoxError>) -> bool {
    handled.as_ref().is_err_and(|error| Passed::of(error) == Some(Passed::Duplicate))
}
