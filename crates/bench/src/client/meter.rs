//! What a run took: from after the set-up until the last message is known to be done.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt as _;
use futures_util::stream::FuturesUnordered;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::measure::cpu_time;

/// A failure of any of the libraries.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The readings at the start of a run.
pub(crate) struct Meter {
    wall: Instant,
    cpu: Duration,
    parks: u64,
    allocations: Option<u64>,
}

/// What one run took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    pub(crate) messages: u64,
    /// User and system time of the whole process.
    pub(crate) cpu: Duration,
    pub(crate) wall: Duration,
    /// How often a thread of the runtime went to sleep.
    pub(crate) parks: u64,
    /// How often the tasks that do the job were woken.
    pub(crate) polls: u64,
    /// The most memory that the process held, in KiB.
    pub(crate) memory_kib: u64,
    /// Known only with the feature `count-allocations`.
    pub(crate) allocations: Option<u64>,
    /// Of [`Job::Latency`](super::jobs::Job::Latency).
    pub(crate) latency: Option<Latency>,
    /// Of [`Job::Returns`](super::jobs::Job::Returns).
    pub(crate) mislabelled: Option<u64>,
}

/// From a publish to its confirm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latency {
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
}

impl Latency {
    pub(crate) fn of(mut samples: Vec<Duration>) -> Option<Latency> {
        samples.sort();
        let at = |percent: usize| samples.get(samples.len() * percent / 100).copied();
        Some(Latency { p50: at(50)?, p99: at(99)? })
    }
}

static POLLS: AtomicU64 = AtomicU64::new(0);

impl Meter {
    pub(crate) fn start() -> Meter {
        POLLS.store(0, Ordering::Relaxed);
        let (parks, allocations) = (parks(), allocations());
        Meter { parks, allocations, cpu: cpu_time(), wall: Instant::now() }
    }

    pub(crate) fn stop(self, messages: u64) -> Measured {
        let (wall, cpu) = (self.wall.elapsed(), cpu_time() - self.cpu);
        Measured {
            messages,
            cpu,
            wall,
            parks: parks() - self.parks,
            polls: POLLS.load(Ordering::Relaxed),
            memory_kib: peak_memory_kib(),
            allocations: allocations().zip(self.allocations).map(|(now, then)| now - then),
            ..Measured::default()
        }
    }
}

fn parks() -> u64 {
    let metrics = Handle::current().metrics();
    (0..metrics.num_workers()).map(|worker| metrics.worker_park_count(worker)).sum()
}

/// As Linux counts it.
fn peak_memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0)
}

#[cfg(feature = "count-allocations")]
fn allocations() -> Option<u64> {
    Some(dhat::HeapStats::get().total_blocks)
}

#[cfg(not(feature = "count-allocations"))]
fn allocations() -> Option<u64> {
    None
}

/// Runs each future as a task of its own, all at once, and gives back what they gave. The first failure ends it.
pub(crate) async fn all<T: Send + 'static>(
    jobs: impl IntoIterator<Item = impl Future<Output = Result<T, Failure>> + Send + 'static>,
) -> Result<Vec<T>, Failure> {
    let mut tasks: JoinSet<_> = jobs.into_iter().map(|job| Counted(Box::pin(job))).collect();
    let mut done = Vec::new();
    while let Some(result) = tasks.join_next().await {
        done.push(result??);
    }
    Ok(done)
}

/// The same in one task.
pub(crate) async fn all_in_one_task<T: Send + 'static>(
    jobs: impl IntoIterator<Item = impl Future<Output = Result<T, Failure>> + Send + 'static>,
) -> Result<Vec<T>, Failure> {
    let jobs: FuturesUnordered<_> = jobs.into_iter().map(|job| Counted(Box::pin(job))).collect();
    tokio::spawn(jobs.try_collect()).await?
}

/// Counts how often it is polled.
struct Counted<F>(Pin<Box<F>>);

impl<F: Future> Future for Counted<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        POLLS.fetch_add(1, Ordering::Relaxed);
        self.0.as_mut().poll(context)
    }
}

/// Fails unless exactly so many messages are accounted for.
pub(crate) fn expect(what: &str, expected: u64, found: u64) -> Result<(), Failure> {
    match expected == found {
        true => Ok(()),
        false => Err(format!("{found} messages {what}, not {expected}").into()),
    }
}

impl Measured {
    /// For the process that started this one.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "messages": self.messages,
            "cpu_ns": self.cpu.as_nanos() as u64,
            "wall_ns": self.wall.as_nanos() as u64,
            "parks": self.parks,
            "polls": self.polls,
            "memory_kib": self.memory_kib,
            "allocations": self.allocations,
            "p50_ns": self.latency.map(|latency| latency.p50.as_nanos() as u64),
            "p99_ns": self.latency.map(|latency| latency.p99.as_nanos() as u64),
            "mislabelled": self.mislabelled,
        })
    }

    /// The reverse; `None` if it is something else.
    pub(crate) fn from_json(value: &Value) -> Option<Measured> {
        let number = |name: &str| value[name].as_u64();
        let time = |name: &str| number(name).map(Duration::from_nanos);
        Some(Measured {
            messages: number("messages")?,
            cpu: time("cpu_ns")?,
            wall: time("wall_ns")?,
            parks: number("parks")?,
            polls: number("polls")?,
            memory_kib: number("memory_kib")?,
            allocations: number("allocations"),
            latency: time("p50_ns").zip(time("p99_ns")).map(|(p50, p99)| Latency { p50, p99 }),
            mislabelled: number("mislabelled"),
        })
    }

    pub(crate) fn cpu_us_per_message(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.messages as f64
    }

    pub(crate) fn messages_per_second(&self) -> f64 {
        self.messages as f64 / self.wall.as_secs_f64()
    }
}
