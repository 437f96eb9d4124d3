//! One message, from its admission to the end of its handler.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::FutureExt as _;
use tokio_util::task::AbortOnDropHandle;

use super::Mode;
use super::failure::identity;
use super::handler_tasks::{Abandoned, HandlerTasks, InlineBudget};
use super::instrumented::{InstrumentedCall, InstrumentedHandler, Started};
use super::runner::{Disposition, report};
use super::seen::Seen;
use super::service::catch_panic;
use crate::delivery::Delivery;
use crate::error::BoxError;
use crate::inbox::once::Passed;
use crate::retry::{Diagnosis, Failure};
use crate::text::escape;

type Outcome = Result<(), BoxError>;

/// How the messages of a runner are handled. Its subscriptions share this.
pub(super) struct MessageHandler {
    pub(super) handler: Arc<InstrumentedHandler>,
    pub(super) mode: Mode,
    pub(super) seen: Option<Seen>,
    /// None: all handlers run in the task of their subscription.
    pub(super) tasks: Option<HandlerTasks>,
}

/// Whether a message is handled.
pub(super) enum Admission {
    /// It is, and its key is remembered afterwards, if it has one.
    Handle(Option<Vec<u8>>),
    /// It is settled already.
    Settled(Disposition),
}

impl MessageHandler {
    #[inline]
    pub(super) fn admit(&self, delivery: &mut Delivery) -> Admission {
        match self.mode == Mode::AtMostOnce || self.seen.is_some() {
            true => self.admit_new(delivery),
            false => Admission::Handle(None),
        }
    }

    fn admit_new(&self, delivery: &mut Delivery) -> Admission {
        if self.mode == Mode::AtMostOnce && delivery.redelivered() {
            report(delivery.acker().ack());
            return Admission::Settled(Disposition::Skipped);
        }
        let key = self.seen.as_ref().and_then(|seen| seen.key_of(delivery.incoming()));
        if let (Some(seen), Some(key)) = (&self.seen, &key)
            && seen.contains(key)
        {
            report(delivery.acker().ack());
            return Admission::Settled(Disposition::Duplicate);
        }
        if self.mode == Mode::AtMostOnce {
            // Settled before its handler begins: it cannot come again.
            report(delivery.acker().ack());
        }
        Admission::Handle(key)
    }

    /// Starts the handler of an admitted message. Most handlers that wait for nothing end at once.
    #[inline]
    pub(super) fn start(&self, delivery: &Delivery) -> Result<Outcome, RunningCall> {
        if let Some(tasks) = &self.tasks {
            let is_inline = tasks.budget.allows();
            tasks.budget.add_share();
            if !is_inline {
                return Err(self.spawn(tasks, delivery));
            }
        }
        match self.handler.start(delivery.incoming()) {
            Started::Ended(outcome) => Ok(outcome),
            Started::Running(call) => Err(RunningCall::Inline(call)),
        }
    }

    /// Arguments are picked in the task: that may take as long as the handler.
    fn spawn(&self, tasks: &HandlerTasks, delivery: &Delivery) -> RunningCall {
        let (handler, incoming) = (Arc::clone(&self.handler), delivery.incoming().clone());
        let abandoned = tasks.abandoned.clone();
        let task = tokio::spawn(async move {
            // A task may have its first turn only when its runner has ended: then its handler does not begin.
            match abandoned.is_cancelled() {
                true => Err(Abandoned.into()),
                false => handler.call(&incoming).await,
            }
        });
        RunningCall::Task(AbortOnDropHandle::new(task))
    }

    /// Settles a message after its handler, unless that failed.
    #[inline]
    pub(super) fn settle(
        &self,
        delivery: &mut Delivery,
        key: &mut Option<Vec<u8>>,
        outcome: Outcome,
    ) -> Result<Disposition, Box<Diagnosis>> {
        match outcome {
            Ok(()) => {
                if let (Some(seen), Some(key)) = (&self.seen, key.take()) {
                    seen.add(key);
                }
                report(delivery.acker().ack());
                Ok(Disposition::Handled)
            }
            // Its delivery is dropped, and goes back.
            Err(error) if error.is::<Abandoned>() => Ok(Disposition::Abandoned),
            Err(error) if self.mode == Mode::AtMostOnce => {
                let (routing_key, message_id) = identity(delivery);
                tracing::error!(
                    queue = delivery.queue(),
                    routing_key,
                    message_id,
                    "a message that is not tried again failed: {}",
                    escape(&text_of(&error))
                );
                Ok(Disposition::Failed)
            }
            Err(error) => match Passed::of(&error) {
                Some(passed) => {
                    report(delivery.acker().ack());
                    Ok(passed.into())
                }
                None => Err(Box::new(diagnosed(&error))),
            },
        }
    }
}

/// Its `Display` is the application's, and may panic.
fn text_of(error: &BoxError) -> String {
    catch_panic(|| error.to_string()).unwrap_or_else(|panic| panic.to_string())
}

fn diagnosed(error: &BoxError) -> Diagnosis {
    catch_panic(|| Diagnosis::of(error)).unwrap_or_else(|panic| Diagnosis::of(&panic))
}

/// An admitted message. Dropped, it goes back to its queue unless it was settled.
pub(super) struct Message {
    pub(super) delivery: Delivery,
    pub(super) key: Option<Vec<u8>>,
    /// The number of the consumer that it came from.
    pub(super) consumer: u64,
}

/// A call of a handler. Dropped, it ends, or as soon as it no longer computes in a task.
pub(super) enum RunningCall {
    /// The subscription polls it.
    Inline(InstrumentedCall),
    Task(AbortOnDropHandle<Outcome>),
    /// On its way from the subscription to a task.
    Moving,
}

impl RunningCall {
    fn move_to_task(&mut self) {
        *self = match std::mem::replace(self, RunningCall::Moving) {
            RunningCall::Inline(call) => {
                RunningCall::Task(AbortOnDropHandle::new(tokio::spawn(call)))
            }
            other => other,
        };
    }
}

impl Future for RunningCall {
    /// None: its task has ended with its runtime.
    type Output = Option<Outcome>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            RunningCall::Inline(call) => call.poll_unpin(context).map(Some),
            RunningCall::Task(task) => Poll::Ready(match ready!(task.poll_unpin(context)) {
                Ok(outcome) => Some(outcome),
                Err(error) if error.is_cancelled() => None,
                Err(panic) => Some(Err(Failure::requeue(panic).into())),
            }),
            RunningCall::Moving => Poll::Ready(None),
        }
    }
}

/// A message and the call of its handler. Dropped, both end.
pub(super) struct Handling {
    /// Taken out when the call ends.
    message: Option<Message>,
    call: RunningCall,
    /// None: the call stays in the task of its subscription.
    budget: Option<Arc<InlineBudget>>,
}

impl Handling {
    pub(super) fn new(
        message: Message,
        call: RunningCall,
        budget: Option<Arc<InlineBudget>>,
    ) -> Self {
        Handling { message: Some(message), call, budget }
    }

    pub(super) fn is_in_task(&self) -> bool {
        matches!(self.call, RunningCall::Task(_))
    }
}

impl Future for Handling {
    /// None: the message goes back to its queue, because the runtime of the call has ended.
    type Output = Option<(Message, Outcome)>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // What it computes after it has waited would hold up all others.
        if self.budget.as_ref().is_some_and(|budget| !budget.allows()) {
            self.call.move_to_task();
        }
        let outcome = ready!(self.call.poll_unpin(context));
        Poll::Ready(self.message.take().zip(outcome))
    }
}
