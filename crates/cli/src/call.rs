//! `leveret call`: asks a service.

use std::time::Duration;

use clap::{Args, ValueEnum};
use leveret::{Client, Error, ErrorKind, Replies, Reply};
use serde::Serialize;

use crate::failure::Failure;
use crate::message::{Body, MessageOptions, readable};
use crate::output::{Form, print, print_bytes, print_json};
use crate::reach::{Reach, deadline_in, duration};

/// Calls a method of a service, and shows its reply.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The service.
    #[arg(value_name = "SERVICE")]
    service: String,

    /// The method.
    #[arg(value_name = "METHOD")]
    method: String,

    #[command(flatten)]
    body: Body,

    /// The exchange of the service, if it has one of its own.
    #[arg(short, long, value_name = "NAME")]
    exchange: Option<String>,

    /// How long the reply may take.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    within: Duration,

    /// Ask for no reply; it is enough that the request is in the queue of the service.
    #[arg(long, conflicts_with = "stream")]
    cast: bool,

    /// There may be several replies; each is shown as it comes.
    #[arg(long)]
    stream: bool,

    /// Where replies come to. With queue-per-call, a reply needs no correlation id.
    #[arg(long, value_name = "WHERE", value_enum, default_value_t)]
    replies: ReplyQueue,

    /// Write only the body, as it is.
    #[arg(long, conflicts_with = "json")]
    raw: bool,

    #[command(flatten)]
    message: MessageOptions,
    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
}

/// Where replies come to.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum ReplyQueue {
    /// RabbitMQ's direct reply-to, without a queue.
    #[default]
    Direct,
    /// One queue for all replies.
    Queue,
    /// A queue for each call: whatever comes there is its reply.
    QueuePerCall,
}

impl From<ReplyQueue> for Replies {
    fn from(queue: ReplyQueue) -> Self {
        match queue {
            ReplyQueue::Direct => Replies::Direct,
            ReplyQueue::Queue => Replies::Queue,
            ReplyQueue::QueuePerCall => Replies::QueuePerCall,
        }
    }
}

/// A reply, for a program.
#[derive(Serialize)]
struct Told<'a> {
    content_type: Option<String>,
    body: Option<&'a str>,
    /// If it is no text.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<&'a [u8]>,
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let message = arguments.message.message(arguments.body.read()?);
    let command = async |client: &Client| {
        let rpc = client.rpc(&arguments.service).timeout(arguments.within);
        let mut rpc = rpc.replies(arguments.replies.into());
        if let Some(exchange) = &arguments.exchange {
            rpc = rpc.exchange(exchange);
        }
        let rpc = rpc.build().await?;
        if arguments.cast {
            return Ok(rpc.cast(&arguments.method, message).await?);
        }
        if !arguments.stream {
            let reply = rpc.call::<Reply>(&arguments.method, message).await;
            return arguments.show(&reply.map_err(failed)?);
        }
        let mut replies = rpc.stream::<Reply>(&arguments.method, message).await?;
        while let Some(reply) = replies.next().await {
            arguments.show(&reply.map_err(failed)?)?;
        }
        Ok(())
    };
    let reach = &arguments.reach;
    match (arguments.stream, arguments.cast) {
        (true, _) => reach.with_client(command).await,
        (_, true) => reach.with_client_briefly(command).await,
        _ => {
            let deadline = deadline_in(reach.timeout().saturating_add(arguments.within));
            reach.until(deadline).with_client_briefly(command).await
        }
    }
}

/// Why there is no reply. A service that does not answer is no silence of the broker's.
fn failed(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::TimedOut => Failure::new(error),
        _ => error.into(),
    }
}

impl Arguments {
    fn show(&self, reply: &Reply) -> Result<(), Failure> {
        if self.raw {
            return print_bytes(reply.body());
        }
        if !self.form.json {
            return print(&readable(reply.body()));
        }
        let content_type = reply.properties().content_type;
        let body = std::str::from_utf8(reply.body()).ok();
        print_json(&Told {
            content_type: content_type.map(|text| text.to_str_lossy().into_owned()),
            body,
            bytes: body.is_none().then_some(reply.body()),
        })
    }
}
