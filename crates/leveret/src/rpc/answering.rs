//! Has requests handled, and answers them.

use std::sync::Arc;

use super::replier::{Outlet, WayBack};
use crate::consumer::{Abandoned, Call, Incoming};
use crate::error::BoxError;
use crate::inbox::once::{Once, Passed, kept};
use crate::inbox::{Changes, Opened, Unknown};
use crate::retry::{Diagnosis, Failure, Verdict};
use crate::text::escape;

/// Has requests handled, and answers them.
pub(super) struct Answering {
    /// With the layers around them.
    pub(super) methods: Call,
    pub(super) outlet: Outlet,
    pub(super) retries_calls: bool,
}

impl Answering {
    /// Whenever a request comes.
    pub(super) fn call(self) -> Call {
        Call::plain(move |incoming| Box::pin(self.answer(incoming)))
    }

    /// Once, and with the same reply for each copy.
    pub(super) fn once(self, once: Once) -> Call {
        let shared = Arc::new((self, once));
        Call::plain(move |incoming| {
            let shared = Arc::clone(&shared);
            Box::pin(async move { shared.0.answer_once(incoming, &shared.1).await })
        })
    }

    fn answer(&self, mut incoming: Incoming) -> impl Future<Output = Result<(), BoxError>> + use<> {
        let way = WayBack::of(incoming.raw_properties(), &self.outlet);
        incoming.set_way_back(way.clone());
        let retries_calls = self.retries_calls;
        let handling = self.methods.call(&incoming);
        async move {
            let handled = handling.await;
            let seen = outcome(&way, handled, retries_calls)?;
            sent(way.finish(seen.as_ref().map_or(Ok(()), Err)).await)
        }
    }

    async fn answer_once(&self, mut incoming: Incoming, once: &Once) -> Result<(), BoxError> {
        let way = WayBack::recorded(incoming.raw_properties(), &self.outlet);
        let mut work = match once.open(&incoming).await? {
            Opened::New(work) => work,
            Opened::Done(reply) => {
                match reply {
                    Some(reply) => sent(way.send_recorded(reply).await)?,
                    None => self.tell(&way, &nothing_left()).await?,
                }
                return Err(once.duplicate());
            }
            Opened::Released => return Err(Passed::Release.into()),
            Opened::Unknown(unknown) => {
                let error = unknown.failure().into();
                // Otherwise it is told when it is parked.
                if !self.retries_calls {
                    self.tell(&way, &error).await?;
                }
                return Err(error);
            }
        };
        work.lend(&mut incoming);
        incoming.set_way_back(way.clone());
        let handled = self.methods.call(&incoming).await;
        // With what was lent.
        drop(incoming);
        let changes = kept(&handled).unwrap_or(Changes::Undo);
        let seen = match outcome(&way, handled, self.retries_calls) {
            Ok(seen) => seen,
            Err(error) => {
                // A cast that has nothing left to do.
                if changes != Changes::Undo {
                    once.commit(work, changes, None).await?;
                }
                return Err(error);
            }
        };
        if let Some(seen) = seen.as_ref().filter(|seen| changes == Changes::Undo && may_pass(seen))
        {
            // A copy of it may do better.
            drop(work);
            return sent(way.finish(Err(seen)).await);
        }
        let reply = way.recordable(seen.as_ref().map_or(Ok(()), Err));
        once.commit(work, changes, reply.as_ref()).await?;
        match reply {
            Some(reply) => sent(way.send_recorded(reply).await),
            None => Ok(()),
        }
    }

    async fn tell(&self, way: &WayBack, error: &BoxError) -> Result<(), BoxError> {
        sent(way.finish(Err(&Diagnosis::of(error))).await)
    }
}

/// A request was handled, and its reply is no longer known.
fn nothing_left() -> BoxError {
    let text = "the request was handled before, and its reply is no longer known";
    Failure::done(text).kind(Unknown::Forgotten.as_str()).into()
}

fn may_pass(seen: &Diagnosis) -> bool {
    seen.verdict != Verdict::Permanent
}

/// What of an outcome is to be told to who asked: nothing, an error, or nothing yet, because it is tried again.
fn outcome(
    way: &WayBack,
    handled: Result<(), BoxError>,
    retries_calls: bool,
) -> Result<Option<Diagnosis>, BoxError> {
    let Err(error) = handled else { return Ok(None) };
    if error.is::<Abandoned>() {
        return Err(error);
    }
    let seen = Diagnosis::of(&error);
    let is_done = seen.verdict == Verdict::Done;
    // What is done is not tried again, and never parked.
    if !way.is_wanted() || (retries_calls && !is_done) {
        return Err(error);
    }
    tracing::debug!(kind = seen.kind, "a request failed: {}", escape(&seen.text));
    Ok(Some(seen))
}

/// A reply that may not have gone out must not be lost: somebody handles the request again.
pub(super) fn sent(replied: Result<(), crate::error::Error>) -> Result<(), BoxError> {
    replied.map_err(|error| Failure::requeue(error).into())
}
