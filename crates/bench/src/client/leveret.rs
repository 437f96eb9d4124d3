//! The jobs, done by Leveret.

use bytes::Bytes;
use leveret::amqp::{
    Channel, Confirm, ConsumeOptions, Outcome, Plain, Properties, Publish, ShortStr,
};

use super::channels::{Tally, measure, one_by_one, pipelined};
use super::jobs::{
    CONFIRM_WINDOW, Client, Job, NOWHERE, PREFETCH, PUBLISHED, RETURNS_WINDOW, Run, is_unroutable,
};
use crate::by_hand::uri;
use crate::meter::{Failure, Measured, expect};
use crate::rabbitmq::connect;

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    let connection = connect(&uri(run.setting.port)).await?;
    let (mut plain, mut confirming) = (Vec::new(), Vec::new());
    for _ in 0..run.setting.channels {
        let channel = connection.open_channel().await?;
        match run.job {
            Job::Publish | Job::Consume | Job::AutoAck => plain.push(channel),
            _ => confirming.push(channel.into_confirm().await?),
        }
    }
    let measured = match run.job {
        Job::Publish => measure(run, plain, publish).await?,
        Job::Consume | Job::AutoAck => measure(run, plain, consume).await?,
        Job::Confirm | Job::Mandatory => measure(run, confirming, confirm).await?,
        Job::Latency => measure(run, confirming, latency).await?,
        Job::Returns => measure(run, confirming, returns).await?,
    };
    connection.close().await?;
    Ok(measured)
}

/// As many octets as the toolkit puts on the wire with each message.
fn properties(run: Run) -> Properties<'static> {
    let id = ShortStr::from_static("0123456789abcdef-1234567");
    match run.candidate {
        Client::Stamped => Properties {
            delivery_mode: Some(2),
            message_id: Some(id),
            timestamp: Some(1_700_000_000),
            ..Properties::default()
        },
        _ => Properties::default(),
    }
}

async fn publish(channel: Channel<Plain>, _: u64, run: Run) -> Result<Tally, Failure> {
    let body = run.body();
    for _ in 0..run.share() {
        let (exchange, body) = (NOWHERE, body.clone());
        let publish = Publish { exchange, routing_key: "key", body, ..Publish::default() };
        channel.publish(&publish).await?;
    }
    let counted = channel.inspect_queue(PUBLISHED).await?.messages;
    expect("arrived", run.published(), counted.into())?;
    Ok(Tally::default())
}

async fn confirm(channel: Channel<Confirm>, index: u64, run: Run) -> Result<Tally, Failure> {
    let (queue, body) = (run.queue(index), run.body());
    let mandatory = run.job == Job::Mandatory;
    let publish = |_| async {
        let (body, properties) = (body.clone(), properties(run));
        let publish =
            Publish { routing_key: &queue, mandatory, properties, body, ..Publish::default() };
        channel.publish(&publish).await
    };
    let is_acked = |_, outcome: Outcome| Ok(outcome.is_acked());
    let acked = pipelined(run.share(), CONFIRM_WINDOW, publish, is_acked).await?;
    expect("were confirmed", run.share(), acked)?;
    Ok(Tally::default())
}

async fn latency(channel: Channel<Confirm>, index: u64, run: Run) -> Result<Tally, Failure> {
    let (queue, body) = (run.queue(index), run.body());
    let publish = |_| async {
        let publish = Publish { routing_key: &queue, body: body.clone(), ..Publish::default() };
        Ok(channel.publish(&publish).await?.await.is_acked())
    };
    one_by_one(run, publish).await
}

async fn consume(channel: Channel<Plain>, index: u64, run: Run) -> Result<Tally, Failure> {
    let auto_ack = run.job == Job::AutoAck;
    let options = ConsumeOptions { prefetch: PREFETCH, auto_ack, ..ConsumeOptions::default() };
    let mut consumer = channel.consume(&run.queue(index), options).await?;
    for _ in 0..run.share() {
        let delivery = consumer.next().await.ok_or("the consumer ended")??;
        if delivery.body().len() != run.setting.size {
            return Err("a body of another size".into());
        }
        delivery.ack()?;
    }
    if !auto_ack {
        let (queue, expected) = run.acked(index);
        expect("were acked", expected, channel.inspect_queue(&queue).await?.messages.into())?;
    }
    Ok(Tally::default())
}

/// Counts the outcomes that are wrong.
async fn returns(channel: Channel<Confirm>, index: u64, run: Run) -> Result<Tally, Failure> {
    let queue = run.queue(index);
    let (channel, queue) = (&channel, &*queue);
    let publish = |number: u64| async move {
        let routing_key = if is_unroutable(number) { "nowhere" } else { queue };
        let body = Bytes::from(number.to_string());
        let publish = Publish { routing_key, mandatory: true, body, ..Publish::default() };
        channel.publish(&publish).await
    };
    let is_wrong = |number, outcome: Outcome| Ok(is_wrong(number, &outcome));
    let wrong = pipelined(run.messages, RETURNS_WINDOW, publish, is_wrong).await?;
    Ok(Tally { mislabelled: Some(wrong), ..Tally::default() })
}

fn is_wrong(number: u64, outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Acked => is_unroutable(number),
        Outcome::Returned(returned) => {
            !is_unroutable(number) || returned.body != number.to_string()
        }
        _ => true,
    }
}
