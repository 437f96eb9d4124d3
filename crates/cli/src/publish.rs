//! `leveret publish`: sends messages, each confirmed.

use std::collections::VecDeque;
use std::io::{self, BufRead};
use std::time::{Duration, SystemTime};

use clap::Args;
use leveret::{Client, Publisher, Ticket};
use serde::Serialize;

use crate::failure::Failure;
use crate::message::{Body, MessageOptions};
use crate::output::{Form, counted, print, print_json};
use crate::reach::{Reach, duration};

/// Publishes a message, and waits until the broker has it safe.
///
/// It is an error if no queue gets it. Without an exchange, it goes to the queue that the key names.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The routing key; without --exchange, the name of the queue.
    #[arg(value_name = "KEY")]
    key: String,

    #[command(flatten)]
    body: Body,

    /// The exchange to publish to.
    #[arg(short, long, value_name = "NAME", default_value = "")]
    exchange: String,

    /// Each line of the standard input is a message.
    #[arg(long, conflicts_with_all = ["body", "file"])]
    lines: bool,

    /// It arrives after this time, as in 90s or 36h.
    #[arg(long = "in", value_name = "TIME", value_parser = duration, conflicts_with = "at")]
    delay: Option<Duration>,

    /// It arrives at this time, as in 2030-01-31T12:00:00Z.
    #[arg(long, value_name = "TIME", value_parser = time)]
    at: Option<SystemTime>,

    /// That no queue gets it is no error.
    #[arg(long, conflicts_with_all = ["delay", "at"])]
    allow_unroutable: bool,

    #[command(flatten)]
    message: MessageOptions,
    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
}

fn time(text: &str) -> Result<SystemTime, String> {
    humantime::parse_rfc3339_weak(text)
        .map_err(|_| "a time in UTC is needed, as in 2030-01-31T12:00:00Z".to_owned())
}

/// How many are under way at most.
const WINDOW: usize = 1000;
/// Why messages failed is told of so many.
const TOLD: u64 = 10;

#[derive(Debug, Default, Serialize)]
struct Report {
    published: u64,
    failed: u64,
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let body = (!arguments.lines).then(|| arguments.body.read()).transpose()?;
    let command = async |client: &Client| {
        let mut publisher = client.publisher(&arguments.exchange).window(WINDOW);
        if arguments.allow_unroutable {
            publisher = publisher.allow_unroutable();
        }
        let publisher = publisher.build().await?;
        match body {
            Some(body) => {
                send(&publisher, &arguments, body).await?.await?;
                Ok(Report { published: 1, failed: 0 })
            }
            None => publish_lines(&publisher, &arguments).await,
        }
    };
    let report = arguments.reach.with_client(command).await?;
    match arguments.form.json {
        true => print_json(&report)?,
        false => print(&format!("{} published", counted(report.published, "message")))?,
    }
    match report.failed {
        0 => Ok(()),
        failed => Err(Failure::new(format_args!("{} not published", counted(failed, "message")))),
    }
}

async fn send(
    publisher: &Publisher,
    arguments: &Arguments,
    body: Vec<u8>,
) -> Result<Ticket, Failure> {
    let (key, message) = (&arguments.key, arguments.message.message(body));
    let sent = match (arguments.delay, arguments.at) {
        (Some(delay), _) => publisher.send_in(key, message, delay).await,
        (None, Some(time)) => publisher.send_at(key, message, time).await,
        (None, None) => publisher.send(key, message).await,
    };
    Ok(sent?)
}

async fn publish_lines(publisher: &Publisher, arguments: &Arguments) -> Result<Report, Failure> {
    let mut report = Report::default();
    let mut under_way = VecDeque::new();
    let mut number = 0;
    while let Some(line) = next_line().await? {
        number += 1;
        if under_way.len() >= WINDOW {
            report.settle(&mut under_way).await;
        }
        under_way.push_back((number, send(publisher, arguments, line).await?));
    }
    while !under_way.is_empty() {
        report.settle(&mut under_way).await;
    }
    Ok(report)
}

impl Report {
    async fn settle(&mut self, under_way: &mut VecDeque<(u64, Ticket)>) {
        let Some((line, ticket)) = under_way.pop_front() else { return };
        match ticket.await {
            Ok(()) => self.published += 1,
            Err(error) => {
                self.failed += 1;
                if self.failed <= TOLD {
                    eprintln!("leveret: line {line}: {error}");
                }
            }
        }
    }
}

/// The next line, without its end. Reading may take as long as somebody types.
async fn next_line() -> Result<Option<Vec<u8>>, Failure> {
    let read = tokio::task::spawn_blocking(|| {
        let mut line = Vec::new();
        let read = io::stdin().lock().read_until(b'\n', &mut line)?;
        while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            line.pop();
        }
        Ok((read > 0).then_some(line))
    });
    let failed =
        |error: io::Error| Failure::new(format_args!("cannot read the standard input: {error}"));
    read.await.map_err(Failure::new)?.map_err(failed)
}
