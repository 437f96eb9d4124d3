//! How all clients do a job: each channel does its share in a task of its own, and the library's own part comes as closures.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::jobs::Run;
use crate::meter::{Failure, Measured, Meter, all};

/// What came of a channel's share.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) latencies: Vec<Duration>,
    pub(crate) mislabelled: Option<u64>,
}

/// Has each channel do its share, and measures that. `work` gets a channel, its place and the run.
pub(crate) async fn measure<C, F>(
    run: Run,
    channels: Vec<C>,
    work: impl Fn(C, u64, Run) -> F,
) -> Result<Measured, Failure>
where
    F: Future<Output = Result<Tally, Failure>> + Send + 'static,
{
    let meter = Meter::start();
    let shares = (0..).zip(channels).map(|(place, channel)| work(channel, place, run));
    let tallies = all(shares).await?;
    let measured = meter.stop(run.messages);
    let mislabelled = tallies.iter().filter_map(|tally| tally.mislabelled).reduce(|a, b| a + b);
    let latencies = tallies.into_iter().flat_map(|tally| tally.latencies).collect();
    Ok(Measured { mislabelled, ..measured.with_latencies(latencies) })
}

/// Has messages 1, 2, 3… published one at a time, each when the one before is confirmed.
pub(crate) async fn one_by_one<F>(
    run: Run,
    mut publish: impl FnMut(u64) -> F,
) -> Result<Tally, Failure>
where
    F: Future<Output = Result<bool, Failure>>,
{
    let mut latencies = Vec::with_capacity(run.messages as usize);
    for number in 1..=run.messages {
        let start = Instant::now();
        if !publish(number).await? {
            return Err("a publish was not confirmed".into());
        }
        latencies.push(start.elapsed());
    }
    Ok(Tally { latencies, mislabelled: None })
}

/// Has messages 0, 1, 2… published, at most so many of them unconfirmed, and hands out their outcomes in order.
pub(crate) async fn pipelined<P, E, T: Future>(
    messages: u64,
    window: usize,
    mut publish: impl FnMut(u64) -> P,
    mut take: impl FnMut(u64, T::Output) -> Result<(), Failure>,
) -> Result<(), Failure>
where
    P: Future<Output = Result<T, E>>,
    Failure: From<E>,
{
    let mut unconfirmed = VecDeque::with_capacity(window);
    for number in 0..messages {
        if unconfirmed.len() == window
            && let Some((number, oldest)) = unconfirmed.pop_front()
        {
            take(number, oldest.await)?;
        }
        unconfirmed.push_back((number, publish(number).await?));
    }
    for (number, outcome) in unconfirmed {
        take(number, outcome.await)?;
    }
    Ok(())
}
