//! The keeper of an asker: opens its channel when it is needed, takes the replies to the desk, tells who has waited too long, and
//! when the channel is lost decides what becomes of the questions that were under way.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::task::Waker;

use tokio::time::{Instant, sleep_until};

use super::Replies;
use super::asker::{Open, Phase, Shared, declare_reply_queue};
use super::correlation::CorrelationId;
use super::pump::Pumping;
use crate::amqp::{
    self, Channel, Confirm, Connection, ConsumeOptions, Consumer, DIRECT_REPLIES, ShortStr, Value,
    lock,
};
use crate::client::core::Core;
use crate::client::registry::{Entry, SeatKind};
use crate::error::Error;
use crate::publisher::{OnLoss, Why};

/// The name of the consumer of replies, the only one of its channel. Each reply has it in front, and RabbitMQ writes whenever 1,414
/// octets have gathered: the shorter they are, the more come at once.
const TAG: &str = "r";

pub(super) struct Keeper {
    shared: Arc<Shared>,
    core: Arc<Core>,
}

impl Keeper {
    pub(super) fn new(shared: Arc<Shared>, core: Arc<Core>) -> Self {
        Keeper { shared, core }
    }

    /// Keeps a channel open from the first question on, until the client is closed.
    pub(super) async fn run(self) {
        self.shared.kick.notified().await;
        let Err(error) = tokio::select! {
            ended = self.keep_open() => ended,
            never = self.watch_time() => match never {},
        };
        self.end(Phase::Ended(error.clone()), &error);
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
        let (mut refusals, mut no_exchange, mut suspects) = (0, false, HashSet::new());
        loop {
            let up = self.shared.line.up().await?;
            if std::mem::take(&mut no_exchange) {
                // Somebody has deleted it. If this client declared it before, it does so again.
                let exchange = &self.shared.settings.exchange;
                self.core.remembered.restore_exchange(&up.connection, exchange).await;
            }
            match self.open(&up.connection).await {
                Ok((open, consumer)) => {
                    let error = self.serve(Arc::new(open), consumer).await;
                    no_exchange = Why::of(&error) == Why::NoExchange;
                    self.lost(error, &mut suspects);
                }
                Err(error) if error.is_connection_error() => {}
                Err(error) => {
                    refusals += 1;
                    let error = Error::from_amqp(self.shared.settings.what.clone(), error);
                    self.end(Phase::Refused { error: error.clone(), count: refusals }, &error);
                    self.shared.kick.notified().await;
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

    /// Takes replies to the desk until the channel is over; and first sends again what was under way on the one before.
    async fn serve(&self, open: Arc<Open>, consumer: Option<Consumer>) -> amqp::Error {
        let again = {
            // Before anybody sends over this channel: that is not to be sent again.
            let desk = lock(&self.shared.desk);
            let again = desk.to_send_again();
            self.shared.phase.send_replace(Phase::Open(Arc::clone(&open)));
            again
        };
        let _entry = consumer.as_ref().and_then(|consumer| self.enter(&open, consumer));
        let pump = consumer.map(|consumer| Pumping::start(&self.shared, consumer));
        tokio::select! {
            error = self.receive(&open.channel, pump.as_ref()) => return error,
            () = self.send_again(&open, again) => {}
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

    /// Sends again what was under way, with the same ids. Fails what cannot be.
    async fn send_again(&self, open: &Open, ids: Vec<CorrelationId>) {
        for id in ids {
            let request = lock(&self.shared.desk).request(id);
            let Some(mut request) = request else { continue };
            request.properties.reply_to = open.reply_to.clone();
            let patience = self.core.options.timeout;
            let sent = open.channel.publish_within(&request.to_publish(), patience).await;
            let mut desk = lock(&self.shared.desk);
            let waker = match sent {
                Ok(confirmation) => desk.sent_again(id, confirmation),
                // The next channel has its turn.
                Err(_) if open.channel.is_gone() => return,
                Err(error) => {
                    let what = "the request cannot be sent again";
                    desk.fail(id, self.shared.line.failed(what, error))
                }
            };
            drop(desk);
            waker.into_iter().for_each(Waker::wake);
        }
    }

    /// The channel is gone, and with it every reply that was to come over it. `suspects` were under way when the broker
    /// closed the connection before.
    fn lost(&self, error: amqp::Error, suspects: &mut HashSet<CorrelationId>) {
        let is_replayed = self.shared.settings.on_loss == OnLoss::Replay;
        match Why::of(&error) {
            Why::Lost if is_replayed => {
                self.shared.phase.send_replace(Phase::Closed);
            }
            // One of the requests may be why, or what somebody else has sent: each may be there once when it happens.
            Why::Connection if is_replayed => {
                let error = Error::from_amqp("the reply can no longer come", error);
                let mut desk = lock(&self.shared.desk);
                self.shared.phase.send_replace(Phase::Closed);
                let again = desk.to_send_again().into_iter().collect();
                let before = std::mem::replace(suspects, again);
                let twice = before.intersection(suspects);
                let wakers: Vec<Waker> =
                    twice.filter_map(|id| desk.fail(*id, error.clone())).collect();
                drop(desk);
                wakers.into_iter().for_each(Waker::wake);
            }
            // One of them is why, and would be again.
            _ => {
                let error = Error::from_amqp("the reply can no longer come", error);
                self.end(Phase::Closed, &error);
            }
        }
    }

    /// Tells all that wait.
    fn end(&self, phase: Phase, error: &Error) {
        let wakers = {
            let mut desk = lock(&self.shared.desk);
            self.shared.phase.send_replace(phase);
            desk.fail_all(error)
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Keeper {
    /// Without it, nobody would be answered or told that it is late.
    fn drop(&mut self) {
        if !matches!(&*self.shared.phase.borrow(), Phase::Ended(_)) {
            let error = Error::ended_with_its_runtime(&self.shared.settings.what);
            self.end(Phase::Ended(error.clone()), &error);
        }
    }
}

/// Whether the broker says that it has direct replies.
fn has_direct_replies(connection: &Connection) -> bool {
    let capabilities = connection.server_properties().get("capabilities");
    let capabilities = capabilities.as_ref().and_then(Value::as_table);
    capabilities.and_then(|table| table.get("direct_reply_to")?.as_bool()).unwrap_or(false)
}
