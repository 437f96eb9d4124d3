//! What Leveret is held to.

use super::jobs::{Job, Peer};
use super::meter::Measured;

/// CPU time per message in microseconds at 16 B, 1 KiB and 16 KiB, on any number of channels.
const CPU_US: [(Job, Peer, [Option<f64>; 3]); 8] = [
    (Job::Publish, Peer::Null, [Some(0.35), Some(0.6), Some(8.0)]),
    (Job::Confirm, Peer::Null, [Some(0.5), Some(0.9), Some(9.0)]),
    (Job::Consume, Peer::Null, [Some(0.45), Some(0.6), Some(4.7)]),
    (Job::AutoAck, Peer::Null, [Some(0.35), None, None]),
    (Job::Publish, Peer::Rabbitmq, [Some(0.3), None, None]),
    (Job::Confirm, Peer::Rabbitmq, [Some(4.0), None, None]),
    (Job::Latency, Peer::Rabbitmq, [Some(45.0), None, None]),
    (Job::Consume, Peer::Rabbitmq, [Some(2.4), None, None]),
];

/// The sizes that have targets.
pub(crate) const SIZES: [usize; 3] = [16, 1024, 16 * 1024];

/// The median time from a publish to its confirm, RabbitMQ, 16 B.
const LATENCY_P50_US: f64 = 200.0;

/// How much more CPU time the toolkit may take than the bare engine.
const TOOLKIT_PERCENT: f64 = 30.0;

/// What a result is held to.
pub(crate) struct Target {
    /// In words.
    pub(crate) text: String,
    pub(crate) met: bool,
}

/// The target of a result of the toolkit, which took so many times what the engine took, if it has one.
pub(crate) fn of_toolkit(job: Job, times_engine: f64) -> Option<Target> {
    if !matches!(job, Job::Confirm | Job::Mandatory | Job::Consume) {
        return None;
    }
    let percent = (times_engine - 1.0) * 100.0;
    let text = format!("{percent:+.0} %, ≤ +{TOOLKIT_PERCENT} %");
    Some(Target { text, met: percent <= TOOLKIT_PERCENT })
}

/// The target of a result of the engine, if it has one.
pub(crate) fn of_engine(job: Job, peer: Peer, size: usize, measured: &Measured) -> Option<Target> {
    if job == Job::Returns {
        return Some(Target { text: "0 wrong".to_owned(), met: measured.mislabelled == Some(0) });
    }
    let column = SIZES.iter().position(|known| *known == size)?;
    let row = CPU_US.iter().find(|(for_job, at, _)| (*for_job, *at) == (job, peer))?;
    let limit = row.2[column]?;
    let mut target =
        Target { text: format!("≤ {limit}"), met: measured.cpu_us_per_message() <= limit };
    if let Some(latency) = measured.latency {
        target.met &= latency.p50.as_secs_f64() * 1e6 <= LATENCY_P50_US;
        target.text.push_str(&format!(", p50 ≤ {LATENCY_P50_US}"));
    }
    Some(target)
}
