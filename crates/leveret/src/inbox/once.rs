//! Handling a message once: asks the inbox, has it handled, and commits.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::{Changes, Inbox, Opened, Report, Work};
use crate::client::{Client, ClientEvent};
use crate::consumer::{BoxError, Call, Incoming};
use crate::message::Message;
use crate::retry::{Diagnosis, Failure, Verdict};
use crate::telemetry::Remembered;

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
        let sender = sender_of(&incoming);
        let handled = handler.call(&incoming).await;
        // With what was lent.
        drop(incoming);
        if is_done(&handled) {
            self.commit(work, Changes::Keep, None, &sender).await?;
        }
        handled
    }

    pub(crate) fn duplicate(&self) -> BoxError {
        self.counts.duplicate();
        Passed::Duplicate.into()
    }

    /// Asks the inbox, again and again for a while if it cannot be asked.
    pub(crate) async fn open(&self, incoming: &Incoming) -> Result<Opened, BoxError> {
        let began = Instant::now();
        let mut pause = PAUSES.0;
        loop {
            let opened = timeout(HOLD, self.inbox.open(incoming)).await;
            let error = match opened {
                Ok(Ok(opened)) => return Ok(opened),
                Ok(Err(error)) => error,
                Err(_) => "it does not answer".into(),
            };
            let queue = self.queue.as_str();
            if began.elapsed() + pause >= HOLD {
                tracing::error!(
                    queue,
                    "a message goes back to its queue: its inbox cannot be asked: {error}"
                );
                return Err(Failure::requeue(error).kind("inbox").into());
            }
            tracing::warn!(queue, "a message waits: its inbox cannot be asked: {error}");
            sleep(pause).await;
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    /// Commits. If that fails, nobody knows whether it has happened: the message comes again, and the inbox will tell.
    pub(crate) async fn commit(
        &self,
        work: Box<dyn Work>,
        changes: Changes,
        reply: Option<&Message>,
        sender: &str,
    ) -> Result<(), BoxError> {
        let committed = timeout(COMMIT, work.commit(changes, reply)).await;
        let report = committed.unwrap_or_else(|_| Err("the commit takes too long".into()))?;
        self.tell(report, sender);
        Ok(())
    }

    fn tell(&self, report: Report, sender: &str) {
        for numbers in report.given_up {
            let (from, to) = numbers.into_inner();
            self.counts.given_up(to - from + 1);
            let queue = self.queue.clone();
            tracing::warn!(queue, sender, from, to, "messages are no longer waited for");
            let sender = sender.to_owned();
            self.client.core().announce(ClientEvent::GivenUp { queue, sender, from, to });
        }
    }
}

/// Whether a message is handled. To have nothing left to do is a success, and what was changed on the way is meant to stay.
pub(crate) fn is_done(handled: &Result<(), BoxError>) -> bool {
    match handled {
        Ok(()) => true,
        Err(error) => Diagnosis::of(error).verdict == Verdict::Done,
    }
}

/// Who has counted a message; nobody, if it is known otherwise.
pub(crate) fn sender_of(incoming: &Incoming) -> String {
    let sender = incoming.header(super::remember::SENDER);
    sender.as_ref().and_then(|sender| sender.as_str()).unwrap_or_default().to_owned()
}
