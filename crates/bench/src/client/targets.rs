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

/// The same of sockets by hand, on the machine for which these targets were made. On another one, what is possible
/// is another time, and so is what can be asked for.
const LIMIT_CPU_US: [(Job, [Option<f64>; 3]); 4] = [
    (Job::Publish, [Some(0.06), Some(0.31), Some(6.5)]),
    (Job::Confirm, [Some(0.10), Some(0.43), Some(5.6)]),
    (Job::Consume, [Some(0.06), Some(0.27), Some(2.4)]),
    (Job::AutoAck, [Some(0.02), None, None]),
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
    /// The same for this machine.
    pub(crate) scaled: Option<Scaled>,
}

/// A target, times what the limit takes here, through what it took where the target was made.
pub(crate) struct Scaled {
    pub(crate) cpu_us: f64,
    pub(crate) met: bool,
}

/// The target of a result of the toolkit, which took so many times what the engine took, if it has one.
pub(crate) fn of_toolkit(job: Job, times_engine: f64) -> Option<Target> {
    if !matches!(job, Job::Confirm | Job::Mandatory | Job::Consume) {
        return None;
    }
    let percent = (times_engine - 1.0) * 100.0;
    let text = format!("{percent:+.0} %, ≤ +{TOOLKIT_PERCENT} %");
    Some(Target { text, met: percent <= TOOLKIT_PERCENT, scaled: None })
}

/// The target of a result of the engine, if it has one. `limit` is what sockets by hand take for the job here.
pub(crate) fn of_engine(
    job: Job,
    peer: Peer,
    size: usize,
    measured: &Measured,
    limit: Option<f64>,
) -> Option<Target> {
    if job == Job::Returns {
        let (text, met) = ("0 wrong".to_owned(), measured.mislabelled == Some(0));
        return Some(Target { text, met, scaled: None });
    }
    let column = SIZES.iter().position(|known| *known == size)?;
    let row = CPU_US.iter().find(|(for_job, at, _)| (*for_job, *at) == (job, peer))?;
    let most = row.2[column]?;
    let cpu_us = measured.cpu_us_per_message();
    let there = LIMIT_CPU_US.iter().find(|(for_job, _)| *for_job == job);
    let there = there.and_then(|(_, sizes)| sizes[column]);
    let scaled = limit.zip(there).map(|(here, there)| {
        let most = most * here / there;
        Scaled { cpu_us: most, met: cpu_us <= most }
    });
    let mut target = Target { text: format!("≤ {most}"), met: cpu_us <= most, scaled };
    if let Some(latency) = measured.latency {
        target.met &= latency.p50.as_secs_f64() * 1e6 <= LATENCY_P50_US;
        target.text.push_str(&format!(", p50 ≤ {LATENCY_P50_US}"));
    }
    Some(target)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_slower_machine_is_asked_for_less_and_is_not_let_off_the_target_itself() {
        let cpu = Duration::from_micros(600);
        let measured = Measured { messages: 1000, cpu, ..Measured::default() };
        let target = |limit| of_engine(Job::Confirm, Peer::Null, 16, &measured, limit).unwrap();
        let twice = target(Some(0.2));
        let scaled = twice.scaled.unwrap();
        assert!(!twice.met && scaled.met);
        assert!((scaled.cpu_us - 1.0).abs() < 1e-9, "{}", scaled.cpu_us);
        assert!(!target(Some(0.1)).scaled.unwrap().met);
        assert!(target(None).scaled.is_none());
    }
}
