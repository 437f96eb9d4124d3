//! Calls and answers by hand with lapin, fast and without losses: one channel for requests
//! and their direct replies, a map from correlation ids to callers; replies are confirmed before their requests are acked,
//! many of them at once.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use lapin::message::Delivery;
use lapin::options::BasicAckOptions;
use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Channel};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::{CALL_TIMEOUT, PREFETCH, Run, SERVICE, Scheduling, call_all, call_in_turn};
use crate::by_hand::{self, MANDATORY};
use crate::meter::{Failure, Measured, Meter};

const DIRECT_REPLIES: &str = "amq.rabbitmq.reply-to";

type Waiting = Mutex<HashMap<String, oneshot::Sender<Vec<u8>>>>;

fn lock(waiting: &Waiting) -> MutexGuard<'_, HashMap<String, oneshot::Sender<Vec<u8>>>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) async fn call(run: Run) -> Result<Measured, Failure> {
    let connection = by_hand::connect(run.setting.port).await?;
    let channel = by_hand::confirm_channel(&connection).await?;
    let waiting = Arc::new(Waiting::default());
    let replies = by_hand::consume(&channel, DIRECT_REPLIES, None).await?;
    tokio::spawn(hand_out(replies, Arc::clone(&waiting)));
    let caller = |caller| {
        let (channel, waiting) = (channel.clone(), Arc::clone(&waiting));
        async move {
            let (channel, waiting) = (&channel, &*waiting);
            let call = |request| async move {
                let call = one_call(channel, waiting, request);
                if run.setting.calls.timeout {
                    timeout(CALL_TIMEOUT, call).await?
                } else {
                    call.await
                }
            };
            call_in_turn(run, caller, call).await
        }
    };
    let measured = call_all(run, |number| Box::pin(caller(number))).await?;
    by_hand::close(&connection).await;
    Ok(measured)
}

/// Gives each reply to its caller.
async fn hand_out(mut replies: lapin::Consumer, waiting: Arc<Waiting>) {
    while let Some(Ok(reply)) = replies.next().await {
        let id = reply.properties.correlation_id().as_ref().map(ShortString::as_str);
        if let Some(waits) = id.and_then(|id| lock(&waiting).remove(id)) {
            let _ = waits.send(reply.data);
        }
    }
}

async fn one_call(channel: &Channel, waiting: &Waiting, request: Bytes) -> Result<Bytes, Failure> {
    let id = fresh_id();
    let (sender, receiver) = oneshot::channel();
    lock(waiting).insert(id.clone(), sender);
    let properties = BasicProperties::default()
        .with_reply_to(DIRECT_REPLIES.into())
        .with_correlation_id(id.into());
    let sent = channel.basic_publish("".into(), SERVICE.into(), MANDATORY, &request, properties);
    // The reply says more than the confirm would.
    drop(sent.await?);
    Ok(receiver.await?.into())
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
    let connection = by_hand::connect(run.setting.port).await?;
    let replying = by_hand::confirm_channel(&connection).await?;
    let channel = connection.create_channel().await?;
    by_hand::declare_queue(&channel, SERVICE, FieldTable::default()).await?;
    let requests = by_hand::consume(&channel, SERVICE, Some(PREFETCH)).await?;
    let requests = requests.take_until(Box::pin(stop));
    let meter = Meter::start();
    ready();
    match run.setting.calls.handlers {
        Scheduling::Together => {
            let answer = |delivery| answer(&replying, delivery);
            let answers = requests.map(answer).buffer_unordered(PREFETCH.into());
            answers.try_for_each(async |_| Ok(())).await?;
        }
        Scheduling::Tasks => {
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
    let measured = meter.stop(run.messages);
    by_hand::close(&connection).await;
    Ok(measured)
}

async fn answer(replying: &Channel, delivery: lapin::Result<Delivery>) -> Result<(), Failure> {
    let delivery = delivery?;
    let to = delivery.properties.reply_to().clone().ok_or("a request without reply-to")?;
    let id = delivery.properties.correlation_id().clone().ok_or("and without an id")?;
    let properties = BasicProperties::default().with_correlation_id(id);
    let sent = replying.basic_publish("".into(), to, MANDATORY, &delivery.data, properties);
    sent.await?.await?;
    delivery.ack(BasicAckOptions::default()).await?;
    Ok(())
}
