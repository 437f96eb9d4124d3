//! The task of an RPC channel: opens the channel when a call wants it, and resends or fails the pending calls of
//! a channel that is lost.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::task::Waker;

use tokio::time::Instant;

use super::Replies;
use super::channel::{OpenChannel, ReplySink, RequestConfirms, Shared, declare_reply_queue};
use super::correlation::CorrelationId;
use super::pending_calls::PendingCalls;
use super::reply::Reply;
use super::request::CallFailure;
use crate::amqp::{
    self, Connection, ConsumeOptions, Consumer, DIRECT_REPLIES, ShortStr, Value, deadline_in, lock,
};
use crate::connection::core::Core;
use crate::connection::registry::{Entry, SeatKind};
use crate::connection::{ChannelState, LossCause, Resend, resend_all};
use crate::error::Error;
use crate::publisher::OnLoss;

/// The name of the consumer of replies, the only one of its channel. Each reply has it in front, and RabbitMQ writes whenever 1,414
/// octets have gathered: the shorter they are, the more come at once.
const TAG: &str = "r";

pub(super) struct RpcTask {
    shared: Arc<Shared>,
    core: Arc<Core>,
}

impl RpcTask {
    pub(super) fn new(shared: Arc<Shared>, core: Arc<Core>) -> Self {
        RpcTask { shared, core }
    }

    /// Keeps a channel open from the first call on, until the client is closed.
    pub(super) async fn run(self) {
        self.shared.channel.until_wanted().await;
        let Err(error) = self.keep_open().await;
        self.fail_all(ChannelState::Ended(error.clone()), &error);
    }

    async fn keep_open(&self) -> Result<Infallible, Error> {
        let connection = self.shared.channel.connection();
        let (mut refusals, mut suspects) = (0, HashSet::new());
        let mut cause = LossCause::Connection;
        loop {
            let live = connection.up().await?;
            if cause == LossCause::MissingExchange {
                // It was deleted. If this client declared it before, it does so again.
                let exchange = &self.shared.settings.exchange;
                self.core.remembered.restore_exchange(&live.connection, exchange).await;
            }
            match self.open(&live.connection).await {
                Ok((open, consumer)) => {
                    let error = self.serve(Arc::new(open), consumer).await;
                    cause = LossCause::of(&error);
                    self.lost(error, &mut suspects);
                }
                Err(error) if error.is_connection_error() => {}
                Err(error) => {
                    refusals += 1;
                    let error = Error::from_amqp(self.shared.channel.what().to_owned(), error);
                    let state = ChannelState::Refused { error: error.clone(), count: refusals };
                    self.fail_all(state, &error);
                    self.shared.channel.until_wanted().await;
                }
            }
        }
    }

    async fn open(
        &self,
        connection: &Connection,
    ) -> Result<(OpenChannel, Option<Consumer>), amqp::Error> {
        let epoch = lock(&self.shared.pending).next_epoch();
        let confirms = RequestConfirms::new(&self.shared, epoch);
        let channel = connection.open_channel().await?.into_tracked(confirms).await?;
        let (reply_to, name) = match self.shared.settings.replies {
            Replies::QueuePerCall => {
                return Ok((OpenChannel { channel, epoch, reply_to: None }, None));
            }
            Replies::Direct if has_direct_replies(connection) => {
                (ShortStr::from_static(DIRECT_REPLIES), DIRECT_REPLIES.to_owned())
            }
            Replies::Direct | Replies::Queue => {
                let name = declare_reply_queue(&channel).await?;
                (name.clone().try_into()?, name)
            }
        };
        let options =
            ConsumeOptions { auto_ack: true, tag: TAG.to_owned(), ..ConsumeOptions::default() };
        let consumer = channel.consume(&name, options).await?;
        consumer.set_sink(Arc::new(ReplySink(Arc::clone(&self.shared))));
        Ok((OpenChannel { channel, epoch, reply_to: Some(reply_to) }, Some(consumer)))
    }

    /// Keeps the channel until it is lost, and resends the lost requests meanwhile.
    async fn serve(&self, open: Arc<OpenChannel>, mut consumer: Option<Consumer>) -> amqp::Error {
        let _entry = consumer.as_ref().and_then(|consumer| self.enter(&open, consumer));
        self.shared.channel.set(ChannelState::Open(Arc::clone(&open)));
        let lost = Lost { task: self, open: &open };
        let ended = async {
            while let Some(consumer) = &mut consumer
                && let Some(delivery) = consumer.next().await
            {
                match delivery {
                    // The sink takes the replies, except for those that came together with the end.
                    Ok(delivery) => {
                        let reply = Reply::of(&delivery);
                        self.shared.receive_one(reply.correlation_id(), reply);
                    }
                    Err(error) => {
                        // The broker may have ended only the consumer.
                        open.channel.close_now();
                        return error;
                    }
                }
            }
            open.channel.ended().await
        };
        let mut ended = std::pin::pin!(ended);
        tokio::select! {
            error = &mut ended => return error,
            // If that costs the channel, the consumer ends with it.
            _ = resend_all(&lost) => {}
        }
        ended.await
    }

    /// Has the client's checks notice if the broker forgets the consumer of replies. For direct replies there is no queue whose
    /// consumers it could count: they are a state of the channel.
    fn enter(&self, open: &OpenChannel, consumer: &Consumer) -> Option<Entry> {
        let queue = open.reply_to.as_ref()?.to_str_lossy();
        if queue == DIRECT_REPLIES {
            return None;
        }
        let entry = Entry::new(&self.core, &queue, SeatKind::Replies);
        entry.live(consumer.pulse());
        Some(entry)
    }

    /// The channel is lost, and with it every reply that was to come over it. `suspects` were pending when the broker closed the
    /// connection before.
    fn lost(&self, error: amqp::Error, suspects: &mut HashSet<CorrelationId>) {
        let cause = LossCause::of(&error);
        let error = Error::from_amqp("the reply can no longer come", error);
        let is_resent = matches!(cause, LossCause::Connection | LossCause::ConnectionClosed);
        let state = ChannelState::Closed { since: Instant::now() };
        if !is_resent || self.shared.settings.on_loss == OnLoss::Fail {
            // One of the requests is why, and would be again; or it is not to be sent twice.
            return self.fail_all(state, &error);
        }
        self.end_channel(state, |pending| {
            let mut wakers = Vec::new();
            if cause == LossCause::ConnectionClosed {
                // A request may be why, or a message of another channel: each request may be pending once when it happens.
                let before = std::mem::replace(suspects, pending.resendable().collect());
                let failure = |id| pending.fail(id, CallFailure::Lost(error.clone()));
                wakers.extend(before.into_iter().filter_map(failure));
            }
            pending.mark_lost();
            wakers
        });
    }

    fn fail_all(&self, state: ChannelState<OpenChannel>, error: &Error) {
        self.end_channel(state, |pending| pending.fail_all(error));
    }

    /// Ends the use of the channel, and decides about the calls that are pending on it.
    fn end_channel(
        &self,
        state: ChannelState<OpenChannel>,
        decide: impl FnOnce(&mut PendingCalls) -> Vec<Waker>,
    ) {
        let wakers = {
            let mut pending = lock(&self.shared.pending);
            pending.next_epoch();
            decide(&mut pending)
        };
        self.shared.channel.set(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for RpcTask {
    /// Without it, no call would be answered or time out.
    fn drop(&mut self) {
        if !self.shared.channel.is_ended() {
            let error = Error::ended_with_its_runtime(self.shared.channel.what());
            self.fail_all(ChannelState::Ended(error.clone()), &error);
        }
    }
}

/// The lost requests, and the channel to resend them on.
struct Lost<'a> {
    task: &'a RpcTask,
    open: &'a Arc<OpenChannel>,
}

impl Resend for Lost<'_> {
    type Id = CorrelationId;

    async fn resend_next(&self) -> Result<Option<CorrelationId>, amqp::Error> {
        let (shared, open) = (&self.task.shared, self.open);
        loop {
            let lost = lock(&shared.pending).take_lost();
            let Some((id, mut request)) = lost else { return Ok(None) };
            request.properties.reply_to = open.reply_to.clone();
            let deadline = deadline_in(self.task.core.options.timeout);
            match shared.send_on(open, &request, deadline, |pending| pending.resent(id)).await {
                Ok(true) => return Ok(Some(id)),
                Ok(false) => return Err(open.channel.ended().await),
                Err(error) => shared.fail(id, CallFailure::Lost(error)),
            }
        }
    }
}

/// Whether the broker says that it has direct replies.
fn has_direct_replies(connection: &Connection) -> bool {
    let capabilities = connection.server_properties().get("capabilities");
    let capabilities = capabilities.as_ref().and_then(Value::as_table);
    capabilities.and_then(|table| table.get("direct_reply_to")?.as_bool()).unwrap_or(false)
}
