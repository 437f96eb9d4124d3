//! The argument by which a method sends replies before its last one.

use std::fmt;

use super::reply_route::ReplyRoute;
use crate::consumer::{FromIncoming, Given, Incoming};
use crate::error::{Error, ErrorKind};
use crate::message::IntoMessage;

/// Sends replies to a request before the last one, which is what the method returns: progress, or the parts of a stream. As
/// an argument of a method.
///
/// ```
/// use leveret::{End, Json, Replier};
///
/// async fn count(Json(to): Json<u32>, mut replier: Replier) -> Result<End, leveret::Error> {
///     for number in 1..=to {
///         replier.send(Json(number)).await?;
///     }
///     Ok(End)
/// }
/// ```
pub struct Replier {
    route: ReplyRoute,
}

impl Replier {
    /// Whether the caller asked for replies.
    pub fn is_wanted(&self) -> bool {
        self.route.is_wanted()
    }

    /// Sends a reply that others follow. It is on its way when this returns; the request is not acked before all its
    /// replies are confirmed.
    ///
    /// It fails if an earlier reply could not be delivered, because the caller is gone; or if the method has returned, and the last
    /// reply is sent. If the caller asked for no reply, it does nothing.
    pub async fn send(&mut self, message: impl IntoMessage) -> Result<(), Error> {
        self.route.send_more(message).await
    }
}

impl FromIncoming for Replier {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        match incoming.reply_route() {
            Some(route) if route.is_recorded() => Err(has_one_reply()),
            Some(route) => Ok(Replier { route: route.clone() }),
            None => Err(has_no_replier()),
        }
    }

    fn check(given: &Given<'_>) -> Result<(), Error> {
        match given.is_service() {
            true if given.has_inbox() => Err(has_one_reply()),
            true => Ok(()),
            false => Err(has_no_replier()),
        }
    }
}

fn has_one_reply() -> Error {
    let text = "a method takes a Replier, and its service handles requests exactly once, with one reply for each: return the \
                reply, or leave out exactly_once";
    Error::new(ErrorKind::Invalid, text)
}

fn has_no_replier() -> Error {
    let text = "a handler takes a Replier, which only methods of a service have: make it a method by Client::service, or publish \
                the reply";
    Error::new(ErrorKind::Invalid, text)
}

impl fmt::Debug for Replier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replier").field("is_wanted", &self.is_wanted()).finish()
    }
}
