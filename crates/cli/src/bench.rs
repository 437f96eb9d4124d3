//! `leveret bench`: how fast a broker is with this client, and whether it loses anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use leveret::{Client, Incoming, Publisher, Queue, Topology};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tokio::sync::{Mutex, Notify};
use tokio::task::JoinSet;

use crate::failure::Failure;
use crate::output::{Form, counted, fault, print, print_json, size, unless_unread};
use crate::progress::bar;
use crate::reach::Reach;

/// Publishes messages with confirms and consumes them with acks at the same time, and tells how fast that was.
///
/// It makes a queue of its own and deletes it. The exit status is 0 only if every message came.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// How many messages.
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 100_000)]
    messages: u64,

    /// How large they are, in bytes; at least 16.
    #[arg(long, value_name = "BYTES", default_value_t = 100, value_parser = clap::value_parser!(u32).range(16..=16_000_000))]
    size: u32,

    /// How many publishers share the work.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    publishers: u64,

    /// How many of its messages a publisher has unconfirmed at a time.
    #[arg(long, value_name = "COUNT", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    window: u32,

    /// How many subscriptions consume.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    subscribers: u64,

    /// The type of the queue.
    #[arg(long, value_enum, default_value_t)]
    queue: QueueKind,

    /// Run on a broker in this process, instead of the one at --url.
    #[arg(long)]
    embedded: bool,

    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum QueueKind {
    Classic,
    #[default]
    Quorum,
}

/// How long nothing may come before it is given up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Of how many messages the way is timed: one in so many.
const TIMED: u64 = 16;

#[derive(Debug, Serialize)]
struct Report {
    messages: u64,
    bytes_each: u32,
    came: u64,
    came_twice: u64,
    failed: u64,
    seconds: f64,
    messages_per_second: f64,
    cpu_microseconds_per_message: f64,
    latency_ms_p50: f64,
    latency_ms_p99: f64,
}

/// What has come.
#[derive(Debug)]
struct Tally {
    seen: Vec<AtomicU64>,
    came: AtomicU64,
    came_twice: AtomicU64,
    failed: AtomicU64,
    latencies: Mutex<Vec<Duration>>,
    progress: Notify,
}

impl Tally {
    fn new(messages: u64) -> Self {
        Tally {
            seen: (0..messages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            came: AtomicU64::new(0),
            came_twice: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            latencies: Mutex::new(Vec::new()),
            progress: Notify::new(),
        }
    }

    async fn note(&self, number: u64, sent: SystemTime) {
        let Some(word) = self.seen.get((number / 64) as usize) else { return };
        let bit = 1 << (number % 64);
        match word.fetch_or(bit, Ordering::Relaxed) & bit {
            0 => self.came.fetch_add(1, Ordering::Relaxed),
            _ => self.came_twice.fetch_add(1, Ordering::Relaxed),
        };
        if number.is_multiple_of(TIMED) {
            self.latencies.lock().await.push(sent.elapsed().unwrap_or_default());
        }
        self.progress.notify_one();
    }

    /// Waits until so many have come; no longer than a while after the last one.
    async fn until(&self, messages: u64, bar: &ProgressBar) {
        loop {
            let came = self.came.load(Ordering::Relaxed);
            bar.set_position(came);
            let expected = messages - self.failed.load(Ordering::Relaxed).min(messages);
            if came >= expected
                || tokio::time::timeout(PATIENCE, self.progress.notified()).await.is_err()
            {
                return;
            }
        }
    }
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let bench = async |client: &Client| measure(client, &arguments).await;
    let report = match arguments.embedded {
        true => {
            let client = Client::embedded().await?;
            let report = bench(&client).await;
            client.close().await;
            report?
        }
        false => arguments.reach.with_client(bench).await?,
    };
    unless_unread(match arguments.form.json {
        true => print_json(&report),
        false => report.print(),
    })?;
    match report.came == report.messages {
        true => Ok(()),
        false => Err(Failure::new(format_args!(
            "{} did not come",
            counted(report.messages - report.came, "message")
        ))),
    }
}

async fn measure(client: &Client, arguments: &Arguments) -> Result<Report, Failure> {
    let nanos =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let name = format!("leveret-bench-{}-{nanos}", std::process::id());
    let queue = match arguments.queue {
        QueueKind::Classic => Queue::classic(&name),
        QueueKind::Quorum => Queue::quorum(&name),
    };
    // If nobody comes to delete it.
    let queue = queue.expires(Duration::from_secs(3600));
    client.apply(&Topology::new().queue(queue)).await?;
    let report = through(client, arguments, &name).await;
    let deleted = client.delete_queue(&name, Default::default()).await;
    let report = report?;
    deleted?;
    Ok(report)
}

async fn through(client: &Client, arguments: &Arguments, queue: &str) -> Result<Report, Failure> {
    let tally = Arc::new(Tally::new(arguments.messages));
    let bar = bar(arguments.messages, "came");
    let noted = Arc::clone(&tally);
    let handler = move |message: Incoming| {
        let tally = Arc::clone(&noted);
        async move {
            if let Some((number, sent)) = read(message.body()) {
                tally.note(number, sent).await;
            }
        }
    };
    let builder = client.consumer(queue).prefetch(1000).workers(64).in_one_task();
    let consumer = builder.subscribers(arguments.subscribers as usize).handle(handler);
    let (cpu, began) = (cpu(), Instant::now());
    let mut publishing = JoinSet::new();
    for first in 0..arguments.publishers {
        let publisher = client.publisher("").window(arguments.window as usize).build().await?;
        let numbers = (first..arguments.messages).step_by(arguments.publishers as usize);
        let (queue, size) = (queue.to_owned(), arguments.size as usize);
        publishing.spawn(publish(publisher, queue, numbers, size, Arc::clone(&tally)));
    }
    let all = async {
        tally.until(arguments.messages, &bar).await;
        while publishing.join_next().await.is_some() {}
    };
    consumer.run_until(all).await?;
    bar.finish_and_clear();
    let (took, cpu) = (began.elapsed(), self::cpu() - cpu);
    let mut latencies = std::mem::take(&mut *tally.latencies.lock().await);
    latencies.sort();
    let part = |part: f64| {
        let index =
            ((latencies.len() as f64 * part) as usize).min(latencies.len().saturating_sub(1));
        latencies.get(index).map_or(0.0, |time| time.as_secs_f64() * 1000.0)
    };
    let came = tally.came.load(Ordering::Relaxed);
    Ok(Report {
        messages: arguments.messages,
        bytes_each: arguments.size,
        came,
        came_twice: tally.came_twice.load(Ordering::Relaxed),
        failed: tally.failed.load(Ordering::Relaxed),
        seconds: took.as_secs_f64(),
        messages_per_second: came as f64 / took.as_secs_f64(),
        cpu_microseconds_per_message: cpu.as_secs_f64() * 1e6 / came.max(1) as f64,
        latency_ms_p50: part(0.5),
        latency_ms_p99: part(0.99),
    })
}

/// Publishes some of the messages, as many at a time as the window allows.
async fn publish(
    publisher: Publisher,
    queue: String,
    numbers: impl Iterator<Item = u64>,
    size: usize,
    tally: Arc<Tally>,
) {
    let mut tickets = std::collections::VecDeque::new();
    for number in numbers {
        match publisher.send(&queue, written(number, size)).await {
            Ok(ticket) => tickets.push_back(ticket),
            Err(error) => tally.fail(&error),
        }
        if tickets.len() >= 1000 {
            settle(&mut tickets, &tally).await;
        }
    }
    while !tickets.is_empty() {
        settle(&mut tickets, &tally).await;
    }
}

async fn settle(tickets: &mut std::collections::VecDeque<leveret::Ticket>, tally: &Tally) {
    let Some(ticket) = tickets.pop_front() else { return };
    if let Err(error) = ticket.await {
        tally.fail(&error);
    }
}

impl Tally {
    fn fail(&self, error: &leveret::Error) {
        if self.failed.fetch_add(1, Ordering::Relaxed) == 0 {
            fault(&error.to_string());
        }
        self.progress.notify_one();
    }
}

/// The number of the message, and when it was sent.
fn written(number: u64, size: usize) -> Vec<u8> {
    let nanos =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let mut body = vec![0; size.max(16)];
    body[..8].copy_from_slice(&number.to_be_bytes());
    body[8..16].copy_from_slice(&(nanos as u64).to_be_bytes());
    body
}

fn read(body: &[u8]) -> Option<(u64, SystemTime)> {
    let number = u64::from_be_bytes(body.get(..8)?.try_into().ok()?);
    let nanos = u64::from_be_bytes(body.get(8..16)?.try_into().ok()?);
    Some((number, SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos)))
}

/// How long this process has been computing.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32)
}

impl Report {
    fn print(&self) -> Result<(), Failure> {
        let twice = match self.came_twice {
            0 => String::new(),
            twice => format!(", {twice} of them twice"),
        };
        print(&format!(
            "{} of {} each in {:.1} s, published with confirms and consumed with acks: {} came{twice}\n\
             {:>12.0} messages/s\n{:>12.2} µs of CPU per message, in this process\n{:>12.2} ms from publish to handler (median), \
             {:.2} ms (99 %)",
            counted(self.messages, "message"),
            size(self.bytes_each as usize),
            self.seconds,
            self.came,
            self.messages_per_second,
            self.cpu_microseconds_per_message,
            self.latency_ms_p50,
            self.latency_ms_p99,
        ))
    }
}
