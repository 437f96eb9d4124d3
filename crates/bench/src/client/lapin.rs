//! The jobs, done by lapin in its best form: many futures at once, since a publish or an ack resolves only when another
//! thread has dealt with it.

use deadpool_lapin::{Config, PoolConfig, Runtime};
use futures_util::{StreamExt as _, stream};
use lapin::options::{BasicAckOptions, BasicPublishOptions};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, PublisherConfirm,
};

use super::channels::{Tally, concurrent, measure, one_by_one};
use super::jobs::{
    CONFIRM_WINDOW, Job, NOWHERE, PREFETCH, PUBLISHED, RETURNS_WINDOW, Run, is_unroutable,
};
use crate::by_hand::{self, MANDATORY, messages_in};
use crate::meter::{Failure, Measured, expect};

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    run_on(&by_hand::connect(run.setting.port).await?, run).await
}

/// With a connection of deadpool-lapin's pool. It pools connections and nothing else: the job opens and keeps channels of its own.
pub(crate) async fn run_pooled(run: Run) -> Result<Measured, Failure> {
    let config =
        Config { url: Some(by_hand::uri(run.setting.port)), pool: Some(PoolConfig::new(1)) };
    let pool = config.create_pool(ConnectionProperties::default, Runtime::Tokio1)?;
    run_on(&*pool.get().await?, run).await
}

/// Does the job on this connection, and closes it.
async fn run_on(connection: &Connection, run: Run) -> Result<Measured, Failure> {
    let mut channels = Vec::new();
    for _ in 0..run.setting.channels {
        channels.push(match run.job {
            Job::Publish | Job::Consume | Job::AutoAck => connection.create_channel().await?,
            _ => by_hand::confirm_channel(connection).await?,
        });
    }
    let measured = match run.job {
        Job::Publish => measure(run, channels, publish).await?,
        Job::Confirm => measure(run, channels, confirm).await?,
        Job::Latency => measure(run, channels, latency).await?,
        Job::Consume | Job::AutoAck => measure(run, channels, consume).await?,
        Job::Mandatory => return Err("lapin keeps nothing to know a return by".into()),
        Job::Returns => measure(run, channels, returns).await?,
    };
    by_hand::close(connection).await;
    Ok(measured)
}

async fn publish_one(
    channel: &Channel,
    exchange: &str,
    routing_key: &str,
    options: BasicPublishOptions,
    body: &[u8],
) -> lapin::Result<PublisherConfirm> {
    let properties = BasicProperties::default();
    channel.basic_publish(exchange.into(), routing_key.into(), options, body, properties).await
}

const PLAIN: BasicPublishOptions = BasicPublishOptions { mandatory: false, ..MANDATORY };

async fn publish(channel: Channel, _: u64, run: Run) -> Result<Tally, Failure> {
    let body = run.body();
    concurrent(stream::iter(0..run.share()), CONFIRM_WINDOW, |_| async {
        publish_one(&channel, NOWHERE, "key", PLAIN, &body).await.map(|_| true)
    })
    .await?;
    expect("arrived", run.published(), messages_in(&channel, PUBLISHED).await?)?;
    Ok(Tally::default())
}

async fn confirm(channel: Channel, index: u64, run: Run) -> Result<Tally, Failure> {
    let (queue, body) = (run.queue(index), run.body());
    let acked = concurrent(stream::iter(0..run.share()), CONFIRM_WINDOW, |_| async {
        let outcome = publish_one(&channel, "", &queue, PLAIN, &body).await?.await?;
        Ok::<_, lapin::Error>(outcome == Confirmation::Ack(None))
    });
    expect("were confirmed", run.share(), acked.await?)?;
    Ok(Tally::default())
}

async fn latency(channel: Channel, index: u64, run: Run) -> Result<Tally, Failure> {
    let (queue, body) = (run.queue(index), run.body());
    let publish = |_| async {
        let outcome = publish_one(&channel, "", &queue, PLAIN, &body).await?.await?;
        Ok(outcome == Confirmation::Ack(None))
    };
    one_by_one(run, publish).await
}

async fn consume(channel: Channel, index: u64, run: Run) -> Result<Tally, Failure> {
    let acks = run.job != Job::AutoAck;
    let consumer = by_hand::consume(&channel, &run.queue(index), acks.then_some(PREFETCH)).await?;
    let deliveries = consumer.take(run.share() as usize);
    let received = concurrent(deliveries, PREFETCH.into(), |delivery| async {
        let delivery = delivery?;
        if acks {
            delivery.ack(BasicAckOptions::default()).await?;
        }
        Ok::<_, lapin::Error>(delivery.data.len() == run.setting.size)
    });
    expect("of the right size were received", run.share(), received.await?)?;
    if acks {
        let (queue, expected) = run.acked(index);
        expect("were acked", expected, messages_in(&channel, &queue).await?)?;
    }
    Ok(Tally::default())
}

/// Counts the outcomes that are wrong.
async fn returns(channel: Channel, index: u64, run: Run) -> Result<Tally, Failure> {
    let queue = run.queue(index);
    let (channel, queue) = (&channel, &*queue);
    let is_wrong = |number: u64| async move {
        let routing_key = if is_unroutable(number) { "nowhere" } else { queue };
        let body = number.to_string();
        let publish = publish_one(channel, "", routing_key, MANDATORY, body.as_bytes());
        Ok::<_, lapin::Error>(match publish.await?.await?.take_message() {
            None => is_unroutable(number),
            Some(message) => !is_unroutable(number) || message.data != body.as_bytes(),
        })
    };
    let wrong = concurrent(stream::iter(0..run.messages), RETURNS_WINDOW, is_wrong).await?;
    Ok(Tally { mislabelled: Some(wrong), ..Tally::default() })
}
