//! The jobs, done by lapin in its best form: many futures at once, since a publish or an ack resolves only when another
//! thread has dealt with it.

use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};

use super::jobs::{
    CONFIRM_WINDOW, Job, NOWHERE, PREFETCH, PUBLISHED, RETURNS_WINDOW, Run, is_unroutable,
};
use super::meter::{Failure, Latency, Measured, Meter, all, expect};

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    let connection = Connection::connect(&uri(run), ConnectionProperties::default()).await?;
    run_on(&connection, run).await
}

pub(crate) fn uri(run: Run) -> String {
    format!("amqp://guest:guest@127.0.0.1:{}/%2f", run.port)
}

/// Does the job on this connection, and closes it.
pub(crate) async fn run_on(connection: &Connection, run: Run) -> Result<Measured, Failure> {
    let mut channels = Vec::new();
    for place in 0..run.channels {
        let channel = connection.create_channel().await?;
        if matches!(run.job, Job::Confirm | Job::Latency | Job::Returns) {
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
        }
        channels.push((place, channel));
    }
    let meter = Meter::start();
    let measured = match run.job {
        Job::Publish => {
            all(channels.into_iter().map(|(_, channel)| publish(channel, run))).await?;
            meter.stop(run.messages)
        }
        Job::Confirm => {
            all(channels.into_iter().map(|(place, channel)| confirm(channel, place, run))).await?;
            meter.stop(run.messages)
        }
        Job::Latency => {
            let jobs = channels.into_iter().map(|(_, channel)| one_by_one(channel, run));
            let latency = Latency::of(all(jobs).await?.concat());
            Measured { latency, ..meter.stop(run.messages) }
        }
        Job::Consume | Job::AutoAck => {
            all(channels.into_iter().map(|(place, channel)| consume(channel, place, run))).await?;
            meter.stop(run.messages)
        }
        Job::Mandatory => return Err("lapin keeps nothing to know a return by".into()),
        Job::Returns => {
            let wrong = all(channels.into_iter().map(|(_, channel)| returns(channel, run))).await?;
            Measured { mislabelled: Some(wrong.iter().sum()), ..meter.stop(run.messages) }
        }
    };
    // It is done; that the channels were dropped just before makes lapin report an error here.
    let _ = connection.close(200, "done".into()).await;
    Ok(measured)
}

/// What a passive declaration says of a queue.
async fn messages_in(channel: &Channel, queue: &str) -> Result<u64, Failure> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let queue = channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
    Ok(queue.message_count().into())
}

async fn publish_one(
    channel: &Channel,
    exchange: &str,
    routing_key: &str,
    mandatory: bool,
    body: &[u8],
) -> lapin::Result<lapin::PublisherConfirm> {
    let options = BasicPublishOptions { mandatory, ..BasicPublishOptions::default() };
    let properties = BasicProperties::default();
    channel.basic_publish(exchange.into(), routing_key.into(), options, body, properties).await
}

async fn publish(channel: Channel, run: Run) -> Result<(), Failure> {
    let body = vec![b'x'; run.size];
    stream::iter(0..run.share())
        .map(|_| publish_one(&channel, NOWHERE, "key", false, &body))
        .buffer_unordered(CONFIRM_WINDOW)
        .try_for_each(|_| std::future::ready(Ok(())))
        .await?;
    expect("arrived", run.published(), messages_in(&channel, PUBLISHED).await?)
}

async fn confirm(channel: Channel, place: u64, run: Run) -> Result<(), Failure> {
    let (queue, body) = (run.queue(place), vec![b'x'; run.size]);
    let acked = stream::iter(0..run.share())
        .map(|_| async { publish_one(&channel, "", &queue, false, &body).await?.await })
        .buffer_unordered(CONFIRM_WINDOW)
        .try_fold(0, |acked, outcome| {
            let is_acked = matches!(outcome, Confirmation::Ack(None));
            std::future::ready(Ok(acked + u64::from(is_acked)))
        })
        .await?;
    expect("were confirmed", run.share(), acked)
}

async fn one_by_one(channel: Channel, run: Run) -> Result<Vec<Duration>, Failure> {
    let (queue, body) = (run.queue(0), vec![b'x'; run.size]);
    let mut samples = Vec::with_capacity(run.messages as usize);
    for _ in 0..run.messages {
        let start = Instant::now();
        let outcome = publish_one(&channel, "", &queue, false, &body).await?.await?;
        if outcome != Confirmation::Ack(None) {
            return Err("a publish was not confirmed".into());
        }
        samples.push(start.elapsed());
    }
    Ok(samples)
}

async fn consume(channel: Channel, place: u64, run: Run) -> Result<(), Failure> {
    let no_ack = run.job == Job::AutoAck;
    if !no_ack {
        channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    }
    let options = BasicConsumeOptions { no_ack, ..BasicConsumeOptions::default() };
    let arguments = FieldTable::default();
    let consumer =
        channel.basic_consume(run.queue(place).into(), "".into(), options, arguments).await?;
    let received = consumer
        .take(run.share() as usize)
        .map(|delivery| async {
            let delivery = delivery?;
            if !no_ack {
                delivery.ack(BasicAckOptions::default()).await?;
            }
            Ok::<bool, lapin::Error>(delivery.data.len() == run.size)
        })
        .buffer_unordered(PREFETCH.into())
        .try_fold(0, |sum, right| std::future::ready(Ok(sum + u64::from(right))))
        .await?;
    expect("of the right size were received", run.share(), received)?;
    if !no_ack {
        let (queue, expected) = run.acked(place);
        expect("were acked", expected, messages_in(&channel, &queue).await?)?;
    }
    Ok(())
}

/// Counts the outcomes that are wrong.
async fn returns(channel: Channel, run: Run) -> Result<u64, Failure> {
    let queue = run.queue(0);
    let wrong = stream::iter(0..run.messages)
        .map(|number| {
            let (channel, queue) = (&channel, &queue);
            async move {
                let routing_key = if is_unroutable(number) { "nowhere" } else { queue };
                let body = number.to_string();
                let publish = publish_one(channel, "", routing_key, true, body.as_bytes());
                let outcome = publish.await?.await?;
                let returned = outcome.take_message();
                let right = match returned {
                    None => !is_unroutable(number),
                    Some(message) => is_unroutable(number) && message.data == body.as_bytes(),
                };
                Ok::<u64, lapin::Error>(u64::from(!right))
            }
        })
        .buffer_unordered(RETURNS_WINDOW)
        .try_fold(0, |sum, wrong| std::future::ready(Ok(sum + wrong)))
        .await?;
    Ok(wrong)
}
