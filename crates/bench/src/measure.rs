//! Running candidates in turns and taking medians: machines are noisy, and noise comes in stretches.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// One way of doing a job. Each call does it once for a batch of messages, and gives back the CPU time it
/// took.
pub(crate) struct Candidate<'a> {
    name: &'static str,
    run: Box<dyn FnMut() -> Duration + 'a>,
}

impl<'a> Candidate<'a> {
    pub(crate) fn new(name: &'static str, mut run: impl FnMut() + 'a) -> Self {
        Candidate { name, run: Box::new(move || timed(&mut run)) }
    }

    /// A candidate whose input has to be made anew for each call, which does not count.
    pub(crate) fn with_input<T>(
        name: &'static str,
        mut make: impl FnMut() -> T + 'a,
        mut run: impl FnMut(T) + 'a,
    ) -> Self {
        let run = move || {
            let input = make();
            timed(|| run(input))
        };
        Candidate { name, run: Box::new(run) }
    }
}

fn timed(run: impl FnOnce()) -> Duration {
    let start = cpu_time();
    run();
    cpu_time() - start
}

/// What one candidate took for one job.
pub(crate) struct Measured {
    pub(crate) job: String,
    pub(crate) candidate: &'static str,
    /// CPU time of the process per message: the median over all rounds, and the least.
    pub(crate) median_ns: f64,
    pub(crate) least_ns: f64,
}

/// How long one candidate runs in one round.
const SLICE: Duration = Duration::from_millis(200);

/// Runs the candidates in turns, `rounds` times each.
pub(crate) fn compare(
    job: &str,
    messages: usize,
    rounds: u32,
    mut candidates: Vec<Candidate<'_>>,
) -> Vec<Measured> {
    let mut samples = vec![Vec::new(); candidates.len()];
    for candidate in &mut candidates {
        (candidate.run)();
    }
    for _ in 0..rounds {
        for (candidate, samples) in candidates.iter_mut().zip(&mut samples) {
            let (mut calls, mut spent) = (0, Duration::ZERO);
            while spent < SLICE {
                spent += (candidate.run)();
                calls += 1;
            }
            samples.push(spent.as_nanos() as f64 / (calls * messages) as f64);
        }
    }
    candidates
        .iter()
        .zip(samples)
        .map(|(candidate, mut samples)| {
            samples.sort_by(f64::total_cmp);
            Measured {
                job: job.to_owned(),
                candidate: candidate.name,
                median_ns: samples[samples.len() / 2],
                least_ns: samples[0],
            }
        })
        .collect()
}

/// User and system time of this process so far.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
