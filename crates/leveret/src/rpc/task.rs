//! The task of an RPC caller: opens its channel when a call wants it, times calls out, and resends or fails the pending calls of a
//! channel that is lost.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::task::Waker;

use tokio::time::{Instant, sleep_until};

use super::Replies;
use super::asker::{Open, Shared, declare_reply_queue};
use super::correlation::CorrelationId;
use super::pump::Pumping;
use crate::amqp::{
    self, Channel, Confirm, Connection, ConsumeOptions, Consumer, DIRECT_REPLIES, ShortStr, Value,
    lock,
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
        let Err(error) = tokio::select! {
            ended = self.keep_open() => ended,
            never = self.watch_time() => match never {},
        };
        self.fail_all(ChannelState::Ended(error.clone()), &error);
    }

    /// Tells those whose reply is overdue: one timer for all calls, which are rarely late.
    async fn watch_time(&self) -> Infallible {
        loop {
            let alarm = lock(&self.shared.desk).alarm();
            let is_time = match alarm {
                None => {
                    self.shared.sooner.notified().await;
                    false
                }
                Some(alarm) => tokio::select! {
                    () = sleep_until(alarm) => true,
                    () = self.shared.sooner.notified() => false,
                },
            };
            if is_time {
                let overdue = lock(&self.shared.desk).end_overdue(Instant::now());
                overdue.into_iter().for_each(Waker::wake);
            }
        }
    }

    async fn keep_open(&self) -> Result<Infallible, Error> {
        let line = self.shared.channel.connection();
        let (mut refusals, mut suspects) = (0, HashSet::new());
        let mut cause = LossCause::Connection;
        loop {
            let up = line.up().await?;
            if cause == LossCause::MissingExchange {
                // It was deleted. If this client declared it before, it does so again.
                let exchange = &self.shared.settings.exchange;
                self.core.remembered.restore_exchange(&up.connection, exchange).await;
            }
            match self.open(&up.connection).await {
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

    async fn open(&self, connection: &Connection) -> Result<(Open, Option<Consumer>), amqp::Error> {
        let channel = connection.open_channel().await?.into_confirm().await?;
        let (reply_to, name) = match self.shared.settings.replies {
            Replies::QueuePerCall => return Ok((Open { channel, reply_to: None }, None)),
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
        Ok((Open { channel, reply_to: Some(reply_to) }, Some(consumer)))
    }

    /// Takes replies until the channel is lost, and resends the lost requests meanwhile.
    async fn serve(&self, open: Arc<Open>, consumer: Option<Consumer>) -> amqp::Error {
        let _entry = consumer.as_ref().and_then(|consumer| self.enter(&open, consumer));
        let pump = consumer.map(|consumer| Pumping::start(&self.shared, consumer));
        self.shared.channel.set(ChannelState::Open(Arc::clone(&open)));
        let lost = Lost { task: self, open: &open };
        tokio::select! {
            error = self.receive(&open.channel, pump.as_ref()) => return error,
            // If that costs the channel, replies end with it.
            _ = resend_all(&lost) => {}
        }
        self.receive(&open.channel, pump.as_ref()).await
    }

    /// Has the client's checks notice if the broker forgets the consumer of replies. For direct replies there is no queue whose
    /// consumers it could count: they are a state of the channel.
    fn enter(&self, open: &Open, consumer: &Consumer) -> Option<Entry> {
        let queue = open.reply_to.as_ref()?.to_str_lossy();
        if queue == DIRECT_REPLIES {
            return None;
        }
        let entry = Entry::new(&self.core, &queue, SeatKind::Replies);
        entry.live(consumer.pulse());
        Some(entry)
    }

    async fn receive(&self, channel: &Channel<Confirm>, pump: Option<&Pumping>) -> amqp::Error {
        let Some(pump) = pump else { return channel.ended().await };
        match pump.ended().await {
            Some(error) => {
                // The broker may have ended only the consumer.
                channel.close_now();
                error
            }
            None => channel.ended().await,
        }
    }

    /// The channel is lost, and with it every reply that was to come over it. `suspects` were pending when the broker closed the
    /// connection before.
    fn lost(&self, error: amqp::Error, suspects: &mut HashSet<CorrelationId>) {
        let cause = LossCause::of(&error);
        let error = Error::from_amqp("the reply can no longer come", error);
        let is_resent = matches!(cause, LossCause::Connection | LossCause::ConnectionClosed);
        if !is_resent || self.shared.settings.on_loss == OnLoss::Fail {
            // One of the requests is why, and would be again; or it is not to be sent twice.
            return self.fail_all(ChannelState::Closed { since: Instant::now() }, &error);
        }
        let wakers: Vec<Waker> = {
            let mut desk = lock(&self.shared.desk);
            self.shared.channel.set_closed();
            let mut wakers = Vec::new();
            if cause == LossCause::ConnectionClosed {
                // A request may be why, or a message of another channel: each request may be pending once when it happens.
                let pending = desk.resendable().collect();
                let before = std::mem::replace(suspects, pending);
                wakers.extend(before.into_iter().filter_map(|id| desk.fail(id, error.clone())));
            }
            desk.mark_lost();
            wakers
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Fails all pending calls.
    fn fail_all(&self, state: ChannelState<Open>, error: &Error) {
        let wakers = {
            let mut desk = lock(&self.shared.desk);
            self.shared.channel.set(state);
            desk.fail_all(error)
        };
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

/// The lost requests of a caller, and its next channel.
struct Lost<'a> {
    task: &'a RpcTask,
    open: &'a Open,
}

impl Resend for Lost<'_> {
    type Id = CorrelationId;

    async fn resend_next(&self) -> Result<Option<CorrelationId>, amqp::Error> {
        let (shared, channel) = (&self.task.shared, &self.open.channel);
        let patience = self.task.core.options.timeout;
        loop {
            let lost = lock(&shared.desk).take_lost();
            let Some((id, mut request)) = lost else { return Ok(None) };
            request.properties.reply_to = self.open.reply_to.clone();
            match channel.publish_within(&request.to_publish(), patience).await {
                Ok(confirmation) => {
                    let waker = lock(&shared.desk).resent(id, confirmation);
                    waker.into_iter().for_each(Waker::wake);
                    return Ok(Some(id));
                }
                Err(error) if channel.is_gone() => return Err(error),
                Err(error) => {
                    let what = "the request cannot be sent again";
                    let error = shared.channel.connection().failed(what, error);
                    let waker = lock(&shared.desk).fail(id, error);
                    waker.into_iter().for_each(Waker::wake);
                }
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
