//! Calls the method of a request, and sends what it returns.

use std::sync::Arc;

use super::reply_route::{ReplyOutput, ReplyRoute};
use crate::consumer::{Abandoned, Call, Incoming};
use crate::error::BoxError;
use crate::inbox::once::{Once, Passed, kept};
use crate::inbox::{Changes, Opened, Unknown};
use crate::retry::{Diagnosis, Failure, Verdict};
use crate::text::escape;

/// The handler of a service: calls a method, and replies.
pub(super) struct ReplyingHandler {
    /// With the layers around them.
    pub(super) methods: Call,
    pub(super) output: ReplyOutput,
    pub(super) retries_calls: bool,
}

impl ReplyingHandler {
    /// Handles a request each time it comes.
    pub(super) fn call(self) -> Call {
        Call::plain(move |incoming| Box::pin(self.handle(incoming)))
    }

    /// Handles a request once. Each copy gets the same reply.
    pub(super) fn once(self, once: Once) -> Call {
        let shared = Arc::new((self, once));
        Call::plain(move |incoming| {
            let shared = Arc::clone(&shared);
            Box::pin(async move { shared.0.handle_once(incoming, &shared.1).await })
        })
    }

    fn handle(&self, mut incoming: Incoming) -> impl Future<Output = Result<(), BoxError>> + use<> {
        let route = ReplyRoute::of(incoming.raw_properties(), &self.output);
        incoming.set_reply_route(route.clone());
        let retries_calls = self.retries_calls;
        let handling = self.methods.call(&incoming);
        async move {
            let handled = handling.await;
            let diagnosis = outcome(&route, handled, retries_calls)?;
            or_requeue(route.finish(diagnosis.as_ref().map_or(Ok(()), Err)).await)
        }
    }

    async fn handle_once(&self, mut incoming: Incoming, once: &Once) -> Result<(), BoxError> {
        let route = ReplyRoute::recorded(incoming.raw_properties(), &self.output);
        let mut work = match once.open(&incoming).await? {
            Opened::New(work) => work,
            Opened::Done(reply) => {
                match reply {
                    Some(reply) => or_requeue(route.send_recorded(reply).await)?,
                    None => self.send_error(&route, &no_reply_recorded()).await?,
                }
                return Err(once.duplicate());
            }
            Opened::Released => return Err(Passed::Release.into()),
            Opened::Unknown(unknown) => {
                let error = unknown.failure().into();
                // With retries, the caller gets the error when the request is parked.
                if !self.retries_calls {
                    self.send_error(&route, &error).await?;
                }
                return Err(error);
            }
        };
        work.lend(&mut incoming);
        incoming.set_reply_route(route.clone());
        let handled = self.methods.call(&incoming).await;
        // With what was lent.
        drop(incoming);
        let changes = kept(&handled).unwrap_or(Changes::Undo);
        let diagnosis = match outcome(&route, handled, self.retries_calls) {
            Ok(diagnosis) => diagnosis,
            Err(error) => {
                // A cast that has nothing left to do.
                if changes != Changes::Undo {
                    once.commit(work, changes, None).await?;
                }
                return Err(error);
            }
        };
        if let Some(diagnosis) = diagnosis
            .as_ref()
            .filter(|diagnosis| changes == Changes::Undo && may_succeed_later(diagnosis))
        {
            // A copy of the request may succeed.
            drop(work);
            return or_requeue(route.finish(Err(diagnosis)).await);
        }
        let reply = route.recordable(diagnosis.as_ref().map_or(Ok(()), Err));
        once.commit(work, changes, reply.as_ref()).await?;
        match reply {
            Some(reply) => or_requeue(route.send_recorded(reply).await),
            None => Ok(()),
        }
    }

    async fn send_error(&self, route: &ReplyRoute, error: &BoxError) -> Result<(), BoxError> {
        or_requeue(route.finish(Err(&Diagnosis::of(error))).await)
    }
}

/// A request was handled, and its reply is no longer known.
fn no_reply_recorded() -> BoxError {
    let text = "the request was handled before, and its reply is no longer known";
    Failure::done(text).kind(Unknown::Forgotten.as_str()).into()
}

fn may_succeed_later(diagnosis: &Diagnosis) -> bool {
    diagnosis.verdict != Verdict::Permanent
}

/// What the caller gets of an outcome: no error, an error, or nothing yet, because the request is tried again.
fn outcome(
    route: &ReplyRoute,
    handled: Result<(), BoxError>,
    retries_calls: bool,
) -> Result<Option<Diagnosis>, BoxError> {
    let Err(error) = handled else { return Ok(None) };
    if error.is::<Abandoned>() {
        return Err(error);
    }
    let diagnosis = Diagnosis::of(&error);
    let is_done = diagnosis.verdict == Verdict::Done;
    // What is done is not tried again, and never parked.
    if !route.is_wanted() || (retries_calls && !is_done) {
        return Err(error);
    }
    tracing::debug!(kind = diagnosis.kind, "a request failed: {}", escape(&diagnosis.text));
    Ok(Some(diagnosis))
}

/// A reply that may be lost makes the service handle the request again.
pub(super) fn or_requeue(replied: Result<(), crate::error::Error>) -> Result<(), BoxError> {
    replied.map_err(|error| Failure::requeue(error).into())
}
