//! `leveret publish`: sends messages, each confirmed.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use clap::Args;
use leveret::{Client, ErrorKind, Publisher, Ticket, UnconfirmedPublisher};
use serde::Serialize;

use crate::failure::{Failure, Status};
use crate::lines::Lines;
use crate::message::{Body, MessageOptions};
use crate::output::{Form, counted, fault, print, print_json, unless_unread};
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

    /// How many bytes a line may have. RabbitMQ takes messages of 16 MiB, unless told otherwise.
    #[arg(long, value_name = "BYTES", requires = "lines", default_value_t = 16 * 1024 * 1024)]
    max_line: u64,

    /// It arrives after this time, as in 90s or 36h.
    #[arg(long = "in", value_name = "TIME", value_parser = duration, conflicts_with = "at")]
    delay: Option<Duration>,

    /// It arrives at this time, as in 2030-01-31T12:00:00Z.
    #[arg(long, value_name = "TIME", value_parser = time)]
    at: Option<SystemTime>,

    /// That no queue gets it is no error.
    #[arg(long, conflicts_with_all = ["delay", "at"])]
    allow_unroutable: bool,

    /// How many channels lines are spread over. With more than one, they do not keep their order.
    #[arg(
        long,
        visible_alias = "mq-publisher-channel-pool-size",
        env = "LEVERET_PUBLISHER_CHANNEL_POOL_SIZE",
        value_name = "COUNT",
        default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=1000)
    )]
    publisher_channel_pool_size: u16,

    /// Whether to wait until the broker has messages safe. Without, nobody knows what became of them.
    #[arg(
        long,
        visible_alias = "mq-publisher-confirm-delivery",
        env = "LEVERET_PUBLISHER_CONFIRM_DELIVERY",
        value_name = "BOOL",
        default_value_t = true,
        action = clap::ArgAction::Set
    )]
    publisher_confirm_delivery: bool,

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
    /// False if nobody has asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    confirmed: Option<bool>,
    /// How many lines were sent.
    #[serde(skip)]
    sent: u64,
    /// Lines by their number, which were sent and are not settled.
    #[serde(skip)]
    under_way: VecDeque<(u64, Sent)>,
    /// Why not all lines were read.
    #[serde(skip)]
    ended: Option<Failure>,
    /// The status for the first line that failed.
    #[serde(skip)]
    first_failed: Option<Status>,
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let is_delayed = arguments.delay.is_some() || arguments.at.is_some();
    if is_delayed && !arguments.publisher_confirm_delivery {
        return Err(Failure::wrong(
            "--publisher-confirm-delivery: what is delayed is always confirmed; leave out --in and --at, or this",
        ));
    }
    let body = (!arguments.lines).then(|| arguments.body.read()).transpose()?;
    let mut report = Report::default();
    if !arguments.publisher_confirm_delivery {
        report.confirmed = Some(false);
    }
    let command = async |client: &Client| {
        let mut senders = Vec::new();
        let channels = if arguments.lines { arguments.publisher_channel_pool_size } else { 1 };
        for _ in 0..channels {
            senders.push(Sender::new(client, &arguments).await?);
        }
        match body {
            Some(body) => {
                senders[0].send(&arguments, body).await?.done().await?;
                report.published = 1;
            }
            None => report.publish_lines(&senders, &arguments).await?,
        }
        Ok(())
    };
    let done = match arguments.lines {
        true => arguments.reach.with_client(command).await,
        false => arguments.reach.with_client_briefly(command).await,
    };
    report.end(done).await?;
    let done = if report.confirmed.is_none() { "published" } else { "sent, none confirmed" };
    unless_unread(match arguments.form.json {
        true => print_json(&report),
        false => print(&format!("{} {done}", counted(report.published, "message"))),
    })?;
    match (report.ended, report.failed) {
        (Some(failure), _) => Err(failure),
        (None, 0) => Ok(()),
        (None, failed) => {
            let text = format!("{} not published", counted(failed, "message"));
            // If none was, it is as with a single message.
            let status = report.first_failed.filter(|_| report.published == 0);
            Err(Failure::with(status.unwrap_or(Status::Failed), text))
        }
    }
}

/// What messages go out by.
enum Sender {
    Confirming(Publisher),
    Hoping(UnconfirmedPublisher),
}

/// A message that went out.
#[derive(Debug)]
enum Sent {
    Ticket(Ticket),
    /// There is no more to be known of it.
    Gone,
}

impl Sender {
    async fn new(client: &Client, arguments: &Arguments) -> Result<Sender, Failure> {
        let mut publisher =
            client.publisher(&arguments.exchange).window(WINDOW).timeout(arguments.reach.timeout());
        if arguments.allow_unroutable {
            publisher = publisher.allow_unroutable();
        }
        Ok(match arguments.publisher_confirm_delivery {
            true => Sender::Confirming(publisher.build().await?),
            false => Sender::Hoping(publisher.build_unconfirmed().await?),
        })
    }

    async fn send(&self, arguments: &Arguments, body: Vec<u8>) -> Result<Sent, Failure> {
        let (key, message) = (&arguments.key, arguments.message.message(body));
        let publisher = match self {
            Sender::Confirming(publisher) => publisher,
            Sender::Hoping(publisher) => {
                publisher.publish(key, message).await?;
                return Ok(Sent::Gone);
            }
        };
        let sent = match (arguments.delay, arguments.at) {
            (Some(delay), _) => publisher.send_in(key, message, delay).await,
            (None, Some(time)) => publisher.send_at(key, message, time).await,
            (None, None) => publisher.send(key, message).await,
        };
        Ok(Sent::Ticket(sent?))
    }
}

impl Sent {
    async fn done(&mut self) -> Result<(), leveret::Error> {
        match self {
            Sent::Ticket(ticket) => ticket.await,
            Sent::Gone => Ok(()),
        }
    }
}

impl Report {
    /// Lines that were published before a failure are told of, and those of which nothing is known.
    async fn end(&mut self, done: Result<(), Failure>) -> Result<(), Failure> {
        match done {
            Err(failure) if self.sent > 0 => {
                self.settle_known().await;
                let open = self.sent - self.published - self.failed;
                let unknown = format!("; {} sent and not confirmed", counted(open, "message"));
                self.ended = Some(if open > 0 { failure.and(&unknown) } else { failure });
                Ok(())
            }
            done => done,
        }
    }

    async fn publish_lines(
        &mut self,
        senders: &[Sender],
        arguments: &Arguments,
    ) -> Result<(), Failure> {
        let mut lines = Lines::of_stdin(arguments.max_line)?;
        let mut senders = (1..).zip(senders.iter().cycle());
        loop {
            let batch = tokio::select! {
                biased;
                batch = lines.next() => batch,
                // Where lines come slowly, one that fails is told of before the next one comes.
                () = self.settle_first(), if !self.under_way.is_empty() => continue,
            };
            let batch = match batch {
                Some(Ok(batch)) => batch,
                Some(Err(failure)) => {
                    self.ended = Some(failure);
                    break;
                }
                None => break,
            };
            for (line, (number, sender)) in batch.into_iter().zip(senders.by_ref()) {
                if self.under_way.len() >= WINDOW {
                    self.settle_first().await;
                }
                self.under_way.push_back((number, sender.send(arguments, line).await?));
                self.sent += 1;
            }
        }
        while !self.under_way.is_empty() {
            self.settle_first().await;
        }
        Ok(())
    }

    /// Awaits the outcome of the first line under way. If that is dropped meanwhile, the line stays under way.
    async fn settle_first(&mut self) {
        let Some((line, sent)) = self.under_way.front_mut() else { return };
        let (line, outcome) = (*line, sent.done().await);
        self.under_way.pop_front();
        self.settle(line, outcome);
    }

    /// Counts the lines under way whose outcome is known, once the client is closed.
    async fn settle_known(&mut self) {
        for (line, mut sent) in std::mem::take(&mut self.under_way) {
            let outcome = tokio::select! {
                biased;
                outcome = sent.done() => outcome,
                () = std::future::ready(()) => continue,
            };
            match outcome {
                // It was not confirmed by then.
                Err(error) if error.kind() == ErrorKind::Closed => {}
                outcome => self.settle(line, outcome),
            }
        }
    }

    fn settle(&mut self, line: u64, outcome: Result<(), leveret::Error>) {
        let Err(error) = outcome else {
            self.published += 1;
            return;
        };
        self.failed += 1;
        if self.failed <= TOLD {
            fault(&format!("line {line}: {error}"));
        }
        self.first_failed.get_or_insert_with(|| Failure::from(error).status());
    }
}
