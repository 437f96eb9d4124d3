//! The jobs, done by amqprs. It hands acks to a callback and leaves the bookkeeping to the application: here it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use amqprs::callbacks::ChannelCallback;
use amqprs::channel::{
    BasicAckArguments, BasicConsumeArguments, BasicPublishArguments, BasicQosArguments, Channel,
    ConfirmSelectArguments, QueueDeclareArguments,
};
use amqprs::connection::{Connection, OpenConnectionArguments};
use amqprs::{Ack, BasicProperties, Cancel, CloseChannel, Nack, Return};
use async_trait::async_trait;
use tokio::sync::Notify;

use super::channels::{Tally, measure, one_by_one};
use super::jobs::{CONFIRM_WINDOW, Job, NOWHERE, PREFETCH, PUBLISHED, Run};
use super::tags::Tags;
use crate::meter::{Failure, Measured, expect};

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    let arguments = OpenConnectionArguments::new("127.0.0.1", run.setting.port, "guest", "guest");
    let connection = Connection::open(&arguments).await?;
    let mut channels = Vec::new();
    for _ in 0..run.setting.channels {
        let channel = connection.open_channel(None).await?;
        let confirms = Arc::new(Confirms::default());
        if matches!(run.job, Job::Confirm | Job::Latency) {
            let acks = Acks { tags: Tags::default(), confirms: Arc::clone(&confirms) };
            channel.register_callback(acks).await?;
            channel.confirm_select(ConfirmSelectArguments::default()).await?;
        }
        channels.push((channel, confirms));
    }
    let measured = match run.job {
        Job::Publish => measure(run, channels, publish).await?,
        Job::Confirm => measure(run, channels, confirm).await?,
        Job::Latency => measure(run, channels, latency).await?,
        Job::Consume | Job::AutoAck => measure(run, channels, consume).await?,
        Job::Mandatory | Job::Returns => {
            return Err("amqprs has no outcomes that could be wrong".into());
        }
    };
    // It is done; that the channels were dropped just before makes amqprs report an error here.
    let _ = connection.close().await;
    Ok(measured)
}

type Confirming = (Channel, Arc<Confirms>);

/// How many publishes of a channel were confirmed.
#[derive(Default)]
struct Confirms {
    count: AtomicU64,
    progress: Notify,
}

impl Confirms {
    async fn until(&self, count: u64) {
        while self.count.load(Ordering::Acquire) < count {
            self.progress.notified().await;
        }
    }
}

struct Acks {
    tags: Tags,
    confirms: Arc<Confirms>,
}

#[async_trait]
impl ChannelCallback for Acks {
    async fn close(&mut self, _: &Channel, _: CloseChannel) -> Result<(), amqprs::error::Error> {
        Ok(())
    }

    async fn cancel(&mut self, _: &Channel, _: Cancel) -> Result<(), amqprs::error::Error> {
        Ok(())
    }

    async fn flow(&mut self, _: &Channel, active: bool) -> Result<bool, amqprs::error::Error> {
        Ok(active)
    }

    async fn publish_ack(&mut self, _: &Channel, ack: Ack) {
        self.tags.mark(ack.delivery_tag(), ack.mutiple());
        self.confirms.count.store(self.tags.count(), Ordering::Release);
        self.confirms.progress.notify_one();
    }

    async fn publish_nack(&mut self, _: &Channel, _: Nack) {}

    async fn publish_return(&mut self, _: &Channel, _: Return, _: BasicProperties, _: Vec<u8>) {}
}

async fn messages_in(channel: &Channel, queue: &str) -> Result<u64, Failure> {
    let declare = QueueDeclareArguments::new(queue).passive(true).finish();
    let (_, messages, _) = channel.queue_declare(declare).await?.ok_or("no answer")?;
    Ok(messages.into())
}

async fn publish_one(
    channel: &Channel,
    exchange: &str,
    routing_key: &str,
    body: &[u8],
) -> Result<(), amqprs::error::Error> {
    let arguments = BasicPublishArguments::new(exchange, routing_key);
    channel.basic_publish(BasicProperties::default(), body.to_vec(), arguments).await
}

async fn publish((channel, _): Confirming, _: u64, run: Run) -> Result<Tally, Failure> {
    let body = run.body();
    for _ in 0..run.share() {
        publish_one(&channel, NOWHERE, "key", &body).await?;
    }
    expect("arrived", run.published(), messages_in(&channel, PUBLISHED).await?)?;
    Ok(Tally::default())
}

async fn confirm((channel, confirms): Confirming, index: u64, run: Run) -> Result<Tally, Failure> {
    let (queue, body) = (run.queue(index), run.body());
    for number in 1..=run.share() {
        confirms.until(number.saturating_sub(CONFIRM_WINDOW as u64)).await;
        publish_one(&channel, "", &queue, &body).await?;
    }
    confirms.until(run.share()).await;
    expect("were confirmed", run.share(), confirms.count.load(Ordering::Acquire))?;
    Ok(Tally::default())
}

async fn latency((channel, confirms): Confirming, index: u64, run: Run) -> Result<Tally, Failure> {
    let (queue, body) = (run.queue(index), run.body());
    let (channel, confirms, queue, body) = (&channel, &confirms, &queue, &body);
    let publish = |number| async move {
        publish_one(channel, "", queue, body).await?;
        confirms.until(number).await;
        Ok(true)
    };
    one_by_one(run, publish).await
}

async fn consume((channel, _): Confirming, index: u64, run: Run) -> Result<Tally, Failure> {
    let no_ack = run.job == Job::AutoAck;
    if !no_ack {
        channel.basic_qos(BasicQosArguments::new(0, PREFETCH, false)).await?;
    }
    let arguments =
        BasicConsumeArguments::new(&run.queue(index), "bench").manual_ack(!no_ack).finish();
    let (_, mut deliveries) = channel.basic_consume_rx(arguments).await?;
    for _ in 0..run.share() {
        let message = deliveries.recv().await.ok_or("the consumer ended")?;
        let (Some(deliver), Some(body)) = (message.deliver, message.content) else {
            return Err("half a delivery".into());
        };
        if body.len() != run.setting.size {
            return Err("a body of another size".into());
        }
        if !no_ack {
            channel.basic_ack(BasicAckArguments::new(deliver.delivery_tag(), false)).await?;
        }
    }
    if !no_ack {
        let (queue, expected) = run.acked(index);
        expect("were acked", expected, messages_in(&channel, &queue).await?)?;
    }
    Ok(Tally::default())
}
