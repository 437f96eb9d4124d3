//! Calls and answers by hand with lapin, as one writes it who wants to be fast and to lose nothing: one channel for requests
//! and their direct replies, a map from correlation ids to who waits; replies are confirmed before their requests are acked,
//! many of them at once.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures_util::{StreamExt, TryStreamExt};
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::jobs::{Callers, PATIENCE, PREFETCH, Run, SERVICE, all_callers, body, share};
use crate::client::{Failure, Latency, Measured, Meter};

const DIRECT_REPLIES: &str = "amq.rabbitmq.reply-to";

async fn connect(run: Run) -> Result<(Connection, Channel), Failure> {
    let uri = format!("amqp://guest:guest@127.0.0.1:{}/%2f", run.port);
    let connection = Connection::connect(&uri, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok((connection, channel))
}

type Waiting = Mutex<HashMap<String, oneshot::Sender<Vec<u8>>>>;

fn lock(waiting: &Waiting) -> std::sync::MutexGuard<'_, HashMap<String, oneshot::Sender<Vec<u8>>>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) async fn call(run: Run) -> Result<Measured, Failure> {
    let (connection, channel) = connect(run).await?;
    let waiting = Arc::new(Waiting::default());
    let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
    let replies = channel
        .basic_consume(DIRECT_REPLIES.into(), "".into(), options, FieldTable::default())
        .await?;
    tokio::spawn(hand_out(replies, Arc::clone(&waiting)));
    let meter = Meter::start();
    let caller = |caller| {
        let (channel, waiting) = (channel.clone(), Arc::clone(&waiting));
        async move {
            let mut times = Vec::new();
            for number in share(caller, run) {
                let began = Instant::now();
                let call = one_call(&channel, &waiting, number, run.size);
                if run.timeout {
                    timeout(PATIENCE, call).await??;
                } else {
                    call.await?;
                }
                times.push(began.elapsed());
            }
            Ok(times)
        }
    };
    let times = all_callers(run, |number| Box::pin(caller(number))).await?;
    let mut measured = meter.stop(run.calls);
    measured.latency = Latency::of(times.into_iter().flatten().collect());
    let _ = connection.close(200, "done".into()).await;
    Ok(measured)
}

/// Gives each reply to who waits for it.
async fn hand_out(mut replies: lapin::Consumer, waiting: Arc<Waiting>) {
    while let Some(Ok(reply)) = replies.next().await {
        let id = reply.properties.correlation_id().as_ref().map(ShortString::as_str);
        if let Some(waits) = id.and_then(|id| lock(&waiting).remove(id)) {
            let _ = waits.send(reply.data);
        }
    }
}

async fn one_call(
    channel: &Channel,
    waiting: &Waiting,
    number: u64,
    size: u32,
) -> Result<(), Failure> {
    let id = fresh_id();
    let (sender, receiver) = oneshot::channel();
    lock(waiting).insert(id.clone(), sender);
    let properties = BasicProperties::default()
        .with_reply_to(DIRECT_REPLIES.into())
        .with_correlation_id(id.into());
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let request = body(number, size);
    // The reply says more than the confirm would.
    drop(channel.basic_publish("".into(), SERVICE.into(), options, &request, properties).await?);
    if receiver.await? != request {
        return Err(format!("call {number} got the reply to another").into());
    }
    Ok(())
}

/// As long as a UUID, and cheaper.
fn fresh_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("5f0c9e1a-7d42-4b6e-9c3d-{:012x}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Answers until `stop` is done.
pub(super) async fn serve(
    run: Run,
    ready: impl FnOnce(),
    stop: impl Future<Output = ()>,
) -> Result<Measured, Failure> {
    let (connection, replying) = connect(run).await?;
    let channel = connection.create_channel().await?;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(SERVICE.into(), options, FieldTable::default()).await?;
    channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let requests = channel
        .basic_consume(SERVICE.into(), "".into(), options, FieldTable::default())
        .await?
        .take_until(Box::pin(stop));
    let meter = Meter::start();
    ready();
    match run.handlers {
        Callers::Together => {
            let answer = |delivery| answer(&replying, delivery);
            let answers = requests.map(answer).buffer_unordered(PREFETCH.into());
            answers.try_for_each(async |_| Ok(())).await?;
        }
        Callers::Tasks => {
            // The prefetch bounds how many there are.
            let (failed, mut failures) = mpsc::channel(1);
            let mut requests = pin!(requests);
            while let Some(delivery) = requests.next().await {
                let (replying, failed) = (replying.clone(), failed.clone());
                tokio::spawn(async move {
                    if let Err(failure) = answer(&replying, delivery).await {
                        let _ = failed.try_send(failure);
                    }
                });
            }
            drop(failed);
            if let Some(failure) = failures.recv().await {
                return Err(failure);
            }
        }
    }
    let measured = meter.stop(run.calls);
    let _ = connection.close(200, "done".into()).await;
    Ok(measured)
}

async fn answer(replying: &Channel, delivery: lapin::Result<Delivery>) -> Result<(), Failure> {
    let delivery = delivery?;
    let to = delivery.properties.reply_to().clone().ok_or("a request without reply-to")?;
    let id = delivery.properties.correlation_id().clone().ok_or("and without an id")?;
    let properties = BasicProperties::default().with_correlation_id(id);
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let sent = replying.basic_publish("".into(), to, options, &delivery.data, properties);
    sent.await?.await?;
    delivery.ack(BasicAckOptions::default()).await?;
    Ok(())
}
