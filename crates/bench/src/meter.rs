//! What a run took: from after the set-up until the last message is known to be done.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt as _;
use futures_util::stream::FuturesUnordered;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

/// A failure of any of the libraries.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The readings at the start of a run.
pub(crate) struct Meter {
    wall: Instant,
    cpu: Duration,
    parks: u64,
    allocations: Option<u64>,
}

/// What one run took. The process that does the run writes it, and the one that started it reads it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) messages: u64,
    /// User and system time of the whole process.
    pub(crate) cpu_ns: u64,
    pub(crate) wall_ns: u64,
    /// How often a thread of the runtime went to sleep.
    pub(crate) parks: u64,
    /// How often the tasks that do the job were woken.
    pub(crate) polls: u64,
    /// The most memory that the process held.
    pub(crate) memory_kib: u64,
    /// Known only with the feature `count-allocations`.
    pub(crate) allocations: Option<u64>,
    /// From a publish to its confirm, or from a call to its reply.
    pub(crate) p50_ns: Option<u64>,
    pub(crate) p99_ns: Option<u64>,
    /// Outcomes that are wrong.
    pub(crate) mislabelled: Option<u64>,
    /// CPU time of the process at the other end: a broker, or the server of calls.
    pub(crate) server_cpu_ns: Option<u64>,
    /// Memory that a broker in a process of its own holds for the messages, or connections.
    pub(crate) held_bytes: Option<u64>,
    /// What is left in a table of a database, with its indexes.
    pub(crate) rows: Option<u64>,
    pub(crate) bytes_on_disk: Option<u64>,
}

impl Measured {
    pub(crate) fn cpu_us_per_message(&self) -> f64 {
        self.cpu_ns as f64 / 1e3 / self.messages as f64
    }

    pub(crate) fn server_us_per_message(&self) -> Option<f64> {
        let spent = self.server_cpu_ns.filter(|spent| *spent > 0)?;
        Some(spent as f64 / 1e3 / self.messages as f64)
    }

    pub(crate) fn held_bytes_per_message(&self) -> Option<f64> {
        Some(self.held_bytes? as f64 / self.messages as f64)
    }

    pub(crate) fn messages_per_second(&self) -> Option<f64> {
        (self.wall_ns > 0).then(|| self.messages as f64 * 1e9 / self.wall_ns as f64)
    }

    /// Adds the percentiles of these times, if there are any.
    pub(crate) fn with_latencies(mut self, mut latencies: Vec<Duration>) -> Measured {
        latencies.sort();
        let percentile = |percent: usize| latencies.get(latencies.len() * percent / 100);
        self.p50_ns = percentile(50).map(|time| time.as_nanos() as u64);
        self.p99_ns = percentile(99).map(|time| time.as_nanos() as u64);
        self
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
            cpu_ns: cpu.as_nanos() as u64,
            wall_ns: wall.as_nanos() as u64,
            parks: parks() - self.parks,
            polls: POLLS.load(Ordering::Relaxed),
            memory_kib: memory_kib("self", "VmHWM:").unwrap_or(0),
            allocations: allocations().zip(self.allocations).map(|(now, then)| now - then),
            ..Measured::default()
        }
    }
}

/// User and system time of this process so far.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn parks() -> u64 {
    let metrics = Handle::current().metrics();
    (0..metrics.num_workers()).map(|worker| metrics.worker_park_count(worker)).sum()
}

/// What Linux says of a process's memory.
pub(crate) fn memory_kib(process: &str, what: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let memory = status.lines().find_map(|line| line.strip_prefix(what))?;
    memory.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(feature = "count-allocations")]
fn allocations() -> Option<u64> {
    Some(dhat::HeapStats::get().total_blocks)
}

#[cfg(not(feature = "count-allocations"))]
fn allocations() -> Option<u64> {
    None
}

/// Runs each future as a task of its own, all at once, and gives their values. The first failure ends it.
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
