//! What Leveret is held to.

use super::jobs::{Job, Peer, Run};
use crate::meter::Measured;
use crate::table::Target;

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

/// The target of a result of the toolkit, which took so many times what the engine took.
pub(crate) fn of_toolkit(times_engine: f64) -> Target {
    let percent = (times_engine - 1.0) * 100.0;
    let text = format!("{percent:+.0} %, ≤ +{TOOLKIT_PERCENT} %");
    Target { text, met: percent <= TOOLKIT_PERCENT }
}

/// The targets of a result of the engine: of CPU time, the same scaled to this machine, and of latency. To scale is to multiply
/// by `limit`, what sockets by hand take here, and to divide by what they took where the target was made.
pub(crate) fn of_engine(run: &Run, measured: &Measured, limit: Option<f64>) -> Vec<Target> {
    let known = || {
        let column = SIZES.iter().position(|known| *known == run.setting.size)?;
        let row = CPU_US.iter().find(|(job, at, _)| (*job, *at) == (run.job, run.setting.peer))?;
        Some((column, row.2[column]?))
    };
    let Some((column, most)) = known() else { return Vec::new() };
    let cpu_us = measured.cpu_us_per_message();
    let mut targets = vec![Target { text: format!("≤ {most}"), met: cpu_us <= most }];
    let there = LIMIT_CPU_US.iter().find(|(job, _)| *job == run.job);
    if let Some((here, there)) = limit.zip(there.and_then(|(_, sizes)| sizes[column])) {
        let most = most * here / there;
        targets.push(Target { text: format!("scaled ≤ {most:.2}"), met: cpu_us <= most });
    }
    if let Some(p50_ns) = measured.p50_ns {
        let text = format!("p50 ≤ {LATENCY_P50_US}");
        targets.push(Target { text, met: p50_ns as f64 / 1e3 <= LATENCY_P50_US });
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::jobs::{Client, Setting};

    #[test]
    fn a_slower_machine_is_asked_for_less_and_is_not_let_off_the_target_itself() {
        let (job, candidate) = (Job::Confirm, Client::Leveret);
        let setting = Setting { peer: Peer::Null, port: 0, size: 16, channels: 1 };
        let run = Run { job, candidate, messages: 1000, setting };
        let measured = Measured { messages: 1000, cpu_ns: 600_000, ..Measured::default() };
        let met = |limit| {
            let targets = of_engine(&run, &measured, limit);
            targets.into_iter().map(|target| (target.text, target.met)).collect::<Vec<_>>()
        };
        let target = |text: &str, met| (text.to_owned(), met);
        assert_eq!(met(Some(0.2)), [target("≤ 0.5", false), target("scaled ≤ 1.00", true)]);
        assert_eq!(met(Some(0.1)), [target("≤ 0.5", false), target("scaled ≤ 0.50", false)]);
        assert_eq!(met(None), [target("≤ 0.5", false)]);
    }
}
