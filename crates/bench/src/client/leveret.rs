//! The jobs, done by Leveret.

use std::collections::VecDeque;
use std::time::Instant;

use bytes::Bytes;
use leveret::amqp::{
    Channel, Confirm, Confirmation, Connection, ConsumeOptions, Options, Outcome, Plain,
    Properties, Publish, ShortStr,
};

use super::jobs::{
    CONFIRM_WINDOW, Client, Job, NOWHERE, PREFETCH, PUBLISHED, RETURNS_WINDOW, Run, is_unroutable,
};
use super::meter::{Failure, Latency, Measured, Meter, all, expect};

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    let options = Options::from_uri(&format!("amqp://127.0.0.1:{}", run.port))?;
    let connection = Connection::open(&options).await?;
    let measured = match run.job {
        Job::Publish => {
            let channels = plain_channels(&connection, run).await?;
            let meter = Meter::start();
            all(channels.into_iter().map(|channel| publish(channel, run))).await?;
            meter.stop(run.messages)
        }
        Job::Confirm | Job::Mandatory => {
            let channels = confirm_channels(&connection, run).await?;
            let meter = Meter::start();
            all((0..).zip(channels).map(|(place, channel)| confirm(channel, place, run))).await?;
            meter.stop(run.messages)
        }
        Job::Latency => {
            let channels = confirm_channels(&connection, run).await?;
            let meter = Meter::start();
            let samples = all(channels.into_iter().map(|channel| one_by_one(channel, run))).await?;
            let latency = Latency::of(samples.concat());
            Measured { latency, ..meter.stop(run.messages) }
        }
        Job::Consume | Job::AutoAck => {
            let channels = plain_channels(&connection, run).await?;
            let meter = Meter::start();
            all((0..).zip(channels).map(|(place, channel)| consume(channel, place, run))).await?;
            meter.stop(run.messages)
        }
        Job::Returns => {
            let channels = confirm_channels(&connection, run).await?;
            let meter = Meter::start();
            let wrong = all(channels.into_iter().map(|channel| returns(channel, run))).await?;
            Measured { mislabelled: Some(wrong.iter().sum()), ..meter.stop(run.messages) }
        }
    };
    connection.close().await?;
    Ok(measured)
}

async fn plain_channels(connection: &Connection, run: Run) -> Result<Vec<Channel>, Failure> {
    let mut channels = Vec::new();
    for _ in 0..run.channels {
        channels.push(connection.open_channel().await?);
    }
    Ok(channels)
}

async fn confirm_channels(
    connection: &Connection,
    run: Run,
) -> Result<Vec<Channel<Confirm>>, Failure> {
    let mut channels = Vec::new();
    for channel in plain_channels(connection, run).await? {
        channels.push(channel.into_confirm().await?);
    }
    Ok(channels)
}

fn body(run: Run) -> Bytes {
    Bytes::from(vec![b'x'; run.size])
}

/// As many octets as the toolkit puts on the wire with each message.
fn properties(run: Run) -> Properties<'static> {
    let id = ShortStr::from_static("0123456789abcdef-1234567");
    match run.client {
        Client::Stamped => Properties {
            delivery_mode: Some(2),
            message_id: Some(id),
            timestamp: Some(1_700_000_000),
            ..Properties::default()
        },
        _ => Properties::default(),
    }
}

async fn publish(channel: Channel<Plain>, run: Run) -> Result<(), Failure> {
    let body = body(run);
    for _ in 0..run.share() {
        let publish = Publish {
            exchange: NOWHERE,
            routing_key: "key",
            body: body.clone(),
            ..Publish::default()
        };
        channel.publish(&publish).await?;
    }
    let counted = channel.inspect_queue(PUBLISHED).await?.messages;
    expect("arrived", run.published(), counted.into())
}

async fn confirm(channel: Channel<Confirm>, place: u64, run: Run) -> Result<(), Failure> {
    let (queue, body) = (run.queue(place), body(run));
    let mandatory = run.job == Job::Mandatory;
    let mut unconfirmed = VecDeque::<Confirmation>::with_capacity(CONFIRM_WINDOW);
    let mut acked = 0;
    for _ in 0..run.share() {
        if unconfirmed.len() == CONFIRM_WINDOW
            && let Some(oldest) = unconfirmed.pop_front()
        {
            acked += u64::from(oldest.await.is_acked());
        }
        let (body, properties) = (body.clone(), properties(run));
        let publish =
            Publish { routing_key: &queue, mandatory, properties, body, ..Publish::default() };
        unconfirmed.push_back(channel.publish(&publish).await?);
    }
    for confirmation in unconfirmed {
        acked += u64::from(confirmation.await.is_acked());
    }
    expect("were confirmed", run.share(), acked)
}

async fn one_by_one(
    channel: Channel<Confirm>,
    run: Run,
) -> Result<Vec<std::time::Duration>, Failure> {
    let (queue, body) = (run.queue(0), body(run));
    let mut samples = Vec::with_capacity(run.messages as usize);
    for _ in 0..run.messages {
        let publish = Publish { routing_key: &queue, body: body.clone(), ..Publish::default() };
        let start = Instant::now();
        if !channel.publish(&publish).await?.await.is_acked() {
            return Err("a publish was not confirmed".into());
        }
        samples.push(start.elapsed());
    }
    Ok(samples)
}

async fn consume(channel: Channel<Plain>, place: u64, run: Run) -> Result<(), Failure> {
    let auto_ack = run.job == Job::AutoAck;
    let options = ConsumeOptions { prefetch: PREFETCH, auto_ack, ..ConsumeOptions::default() };
    let mut consumer = channel.consume(&run.queue(place), options).await?;
    for _ in 0..run.share() {
        let delivery = consumer.next().await.ok_or("the consumer ended")??;
        if delivery.body().len() != run.size {
            return Err("a body of another size".into());
        }
        delivery.ack()?;
    }
    if !auto_ack {
        let (queue, expected) = run.acked(place);
        expect("were acked", expected, channel.inspect_queue(&queue).await?.messages.into())?;
    }
    Ok(())
}

/// Counts the outcomes that are wrong.
async fn returns(channel: Channel<Confirm>, run: Run) -> Result<u64, Failure> {
    let queue = run.queue(0);
    let mut unconfirmed = VecDeque::<(u64, Confirmation)>::with_capacity(RETURNS_WINDOW);
    let mut wrong = 0;
    for number in 0..run.messages {
        if unconfirmed.len() == RETURNS_WINDOW
            && let Some((number, oldest)) = unconfirmed.pop_front()
        {
            wrong += u64::from(is_wrong(number, &oldest.await));
        }
        let routing_key = if is_unroutable(number) { "nowhere" } else { &queue };
        let body = Bytes::from(number.to_string());
        let publish = Publish { routing_key, mandatory: true, body, ..Publish::default() };
        unconfirmed.push_back((number, channel.publish(&publish).await?));
    }
    for (number, confirmation) in unconfirmed {
        wrong += u64::from(is_wrong(number, &confirmation.await));
    }
    Ok(wrong)
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
