//! The jobs, done by amqprs. It hands acks to a callback and leaves the bookkeeping to the application: here it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use amqprs::callbacks::ChannelCallback;
use amqprs::channel::{
    BasicAckArguments, BasicConsumeArguments, BasicPublishArguments, BasicQosArguments, Channel,
    ConfirmSelectArguments, QueueDeclareArguments,
};
use amqprs::connection::{Connection, OpenConnectionArguments};
use amqprs::{Ack, BasicProperties, Cancel, CloseChannel, Nack, Return};
use async_trait::async_trait;
use tokio::sync::Notify;

use super::jobs::{CONFIRM_WINDOW, Job, NOWHERE, PREFETCH, PUBLISHED, Run};
use super::meter::{Failure, Latency, Measured, Meter, all, expect};
use super::tags::Tags;

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    let arguments = OpenConnectionArguments::new("127.0.0.1", run.port, "guest", "guest");
    let connection = Connection::open(&arguments).await?;
    let mut channels = Vec::new();
    for place in 0..run.channels {
        let channel = connection.open_channel(None).await?;
        let confirms = Arc::new(Confirms::default());
        if matches!(run.job, Job::Confirm | Job::Latency) {
            channel.register_callback(Acks::new(&confirms)).await?;
            channel.confirm_select(ConfirmSelectArguments::default()).await?;
        }
        channels.push((place, channel, confirms));
    }
    let meter = Meter::start();
    let channels = channels.into_iter();
    let measured = match run.job {
        Job::Publish => {
            all(channels.map(|(_, channel, _)| publish(channel, run))).await?;
            meter.stop(run.messages)
        }
        Job::Confirm => {
            let jobs = channels.map(|(place, channel, acks)| confirm(channel, acks, place, run));
            all(jobs).await?;
            meter.stop(run.messages)
        }
        Job::Latency => {
            let jobs = channels.map(|(_, channel, confirms)| one_by_one(channel, confirms, run));
            let latency = Latency::of(all(jobs).await?.concat());
            Measured { latency, ..meter.stop(run.messages) }
        }
        Job::Consume | Job::AutoAck => {
            all(channels.map(|(place, channel, _)| consume(channel, place, run))).await?;
            meter.stop(run.messages)
        }
        Job::Mandatory | Job::Returns => {
            return Err("amqprs has no outcomes that could be wrong".into());
        }
    };
    // It is done; that the channels were dropped just before makes amqprs report an error here.
    let _ = connection.close().await;
    Ok(measured)
}

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

impl Acks {
    fn new(confirms: &Arc<Confirms>) -> Self {
        Acks { tags: Tags::default(), confirms: Arc::clone(confirms) }
    }
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

async fn publish(channel: Channel, run: Run) -> Result<(), Failure> {
    let body = vec![b'x'; run.size];
    for _ in 0..run.share() {
        publish_one(&channel, NOWHERE, "key", &body).await?;
    }
    expect("arrived", run.published(), messages_in(&channel, PUBLISHED).await?)
}

async fn confirm(
    channel: Channel,
    confirms: Arc<Confirms>,
    place: u64,
    run: Run,
) -> Result<(), Failure> {
    let (queue, body) = (run.queue(place), vec![b'x'; run.size]);
    for number in 1..=run.share() {
        confirms.until(number.saturating_sub(CONFIRM_WINDOW as u64)).await;
        publish_one(&channel, "", &queue, &body).await?;
    }
    confirms.until(run.share()).await;
    expect("were confirmed", run.share(), confirms.count.load(Ordering::Acquire))
}

async fn one_by_one(
    channel: Channel,
    confirms: Arc<Confirms>,
    run: Run,
) -> Result<Vec<Duration>, Failure> {
    let (queue, body) = (run.queue(0), vec![b'x'; run.size]);
    let mut samples = Vec::with_capacity(run.messages as usize);
    for number in 1..=run.messages {
        let start = Instant::now();
        publish_one(&channel, "", &queue, &body).await?;
        confirms.until(number).await;
        samples.push(start.elapsed());
    }
    Ok(samples)
}

async fn consume(channel: Channel, place: u64, run: Run) -> Result<(), Failure> {
    let no_ack = run.job == Job::AutoAck;
    if !no_ack {
        channel.basic_qos(BasicQosArguments::new(0, PREFETCH, false)).await?;
    }
    let arguments =
        BasicConsumeArguments::new(&run.queue(place), "bench").manual_ack(!no_ack).finish();
    let (_, mut deliveries) = channel.basic_consume_rx(arguments).await?;
    for _ in 0..run.share() {
        let message = deliveries.recv().await.ok_or("the consumer ended")?;
        let (Some(deliver), Some(body)) = (message.deliver, message.content) else {
            return Err("half a delivery".into());
        };
        if body.len() != run.size {
            return Err("a body of another size".into());
        }
        if !no_ack {
            channel.basic_ack(BasicAckArguments::new(deliver.delivery_tag(), false)).await?;
        }
    }
    if !no_ack {
        let (queue, expected) = run.acked(place);
        expect("were acked", expected, messages_in(&channel, &queue).await?)?;
    }
    Ok(())
}
