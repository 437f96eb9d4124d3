//! Handling a message once: asks the inbox, has it handled, and commits.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::{Changes, Doing, Inbox, Opened, OpenedBatch, Report, Work};
use crate::connection::{Client, ClientEvent};
use crate::consumer::{Call, Incoming};
use crate::error::BoxError;
use crate::message::Message;
use crate::retry::{Diagnosis, Failure, Verdict};
use crate::telemetry::Remembered;
use crate::text::escape;

/// How long a message is held while its inbox cannot be asked. Then it goes back to its queue, where others may have it.
const HOLD: Duration = Duration::from_secs(30);

/// The first pause before the inbox is asked again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// How long a commit may take.
const COMMIT: Duration = Duration::from_secs(30);

/// An inbox with what is told about it.
#[derive(Clone)]
pub(crate) struct Once {
    inbox: Arc<dyn Inbox>,
    client: Client,
    queue: String,
    counts: Remembered,
}

/// A message is done, and its handler was not asked. As an error on its way to the runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    /// It was handled before.
    Duplicate,
    /// It was for the inbox.
    Release,
}

impl fmt::Display for Passed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Passed::Duplicate => "it was handled before",
            Passed::Release => "it lets go of other messages",
        })
    }
}

impl std::error::Error for Passed {}

impl Passed {
    /// Whether an error says so.
    pub(crate) fn of(error: &BoxError) -> Option<Passed> {
        error.downcast_ref().copied()
    }
}

impl Once {
    pub(crate) fn new(inbox: Arc<dyn Inbox>, client: &Client, queue: &str) -> Self {
        let (client, queue) = (client.clone(), queue.to_owned());
        Once { inbox, client, counts: Remembered::new(&queue), queue }
    }

    /// A handler that is called once for a message.
    pub(crate) fn around(self, handler: Call) -> Call {
        let once = Arc::new(self);
        Call::plain(move |incoming| {
            let (once, handler) = (Arc::clone(&once), handler.clone());
            Box::pin(async move { once.handle(incoming, &handler).await })
        })
    }

    async fn handle(&self, mut incoming: Incoming, handler: &Call) -> Result<(), BoxError> {
        let mut work = match self.open(&incoming).await? {
            Opened::New(work) => work,
            Opened::Done(_) => return Err(self.duplicate()),
            Opened::Released => return Err(Passed::Release.into()),
            Opened::Unknown(unknown) => return Err(unknown.failure().into()),
        };
        work.lend(&mut incoming);
        let handled = handler.call(&incoming).await;
        // With what was lent.
        drop(incoming);
        if let Some(changes) = kept(&handled) {
            self.commit(work, changes, None).await?;
        }
        handled
    }

    pub(crate) fn duplicate(&self) -> BoxError {
        self.count_duplicate();
        Passed::Duplicate.into()
    }

    pub(crate) fn count_duplicate(&self) {
        self.counts.duplicate();
    }

    /// Asks the inbox, again and again for a while if it cannot be asked.
    pub(crate) async fn open(&self, incoming: &Incoming) -> Result<Opened, BoxError> {
        self.asked(|| self.inbox.open(incoming)).await
    }

    /// The same for several messages.
    pub(crate) async fn open_batch(&self, batch: &[Incoming]) -> Result<OpenedBatch, BoxError> {
        self.asked(|| self.inbox.open_batch(batch)).await
    }

    async fn asked<'a, T>(&self, ask: impl Fn() -> Doing<'a, T>) -> Result<T, BoxError> {
        let began = Instant::now();
        let mut pause = PAUSES.0;
        loop {
            let error = match timeout(HOLD, ask()).await {
                Ok(Ok(opened)) => return Ok(opened),
                Ok(Err(error)) if is_permanent(&error) => return Err(error),
                Ok(Err(error)) => error,
                Err(_) => "it does not answer".into(),
            };
            let queue = self.queue.as_str();
            if began.elapsed() + pause >= HOLD {
                tracing::error!(
                    queue,
                    "a message goes back to its queue: its inbox cannot be asked: {}",
                    escape(&error.to_string())
                );
                return Err(Failure::requeue(error).kind("inbox").into());
            }
            let text = escape(&error.to_string());
            tracing::warn!(queue, "a message waits: its inbox cannot be asked: {text}");
            sleep(pause).await;
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    /// Commits. If that fails, nobody knows whether it has happened: the message comes again, and the inbox will tell. Whether
    /// that counts as a failure is in the error.
    pub(crate) async fn commit(
        &self,
        work: Box<dyn Work>,
        changes: Changes,
        reply: Option<&Message>,
    ) -> Result<(), BoxError> {
        let committed = timeout(COMMIT, work.commit(changes, reply)).await;
        let late = || Failure::requeue("the commit takes too long").kind("inbox").into();
        let report = committed.unwrap_or_else(|_| Err(late()))?;
        self.tell(report);
        Ok(())
    }

    fn tell(&self, report: Report) {
        for (sender, numbers) in report.given_up {
            let (from, to) = numbers.into_inner();
            self.counts.given_up(to - from + 1);
            let queue = self.queue.clone();
            tracing::warn!(queue, sender, from, to, "messages are no longer waited for");
            self.client.core().announce(ClientEvent::GivenUp { queue, sender, from, to });
        }
    }
}

/// Whether an inbox will not say anything else about a message.
pub(crate) fn is_permanent(error: &BoxError) -> bool {
    Diagnosis::of(error).verdict == Verdict::Permanent
}

/// Whether a message is handled.
pub(crate) fn is_done(handled: &Result<(), BoxError>) -> bool {
    kept(handled).is_some()
}

/// What stays of a message that is handled. To have nothing left to do is a success, and what was changed on the way is meant to
/// stay, unless it cannot.
pub(crate) fn kept(handled: &Result<(), BoxError>) -> Option<Changes> {
    match handled {
        Ok(()) => Some(Changes::Keep),
        Err(error) if Diagnosis::of(error).verdict == Verdict::Done => Some(Changes::KeepIfSound),
        Err(_) => None,
    }
}
