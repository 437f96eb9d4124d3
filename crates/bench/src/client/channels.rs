//! How all clients do a job: each channel does its share in a task of its own, and the library's own part comes as closures.

use std::collections::VecDeque;
use std::future::ready;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt as _, TryStreamExt as _};

use super::jobs::Run;
use crate::meter::{Failure, Measured, Meter, all};

/// What came of a channel's share.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) latencies: Vec<Duration>,
    pub(crate) mislabelled: Option<u64>,
}

/// Has each channel do its share, and measures that. `work` gets a channel, its index and the run.
pub(crate) async fn measure<C, F>(
    run: Run,
    channels: Vec<C>,
    work: impl Fn(C, u64, Run) -> F,
) -> Result<Measured, Failure>
where
    F: Future<Output = Result<Tally, Failure>> + Send + 'static,
{
    let meter = Meter::start();
    let shares = (0..).zip(channels).map(|(index, channel)| work(channel, index, run));
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

/// Publishes messages 0, 1, 2…, at most so many of them unconfirmed, and counts those whose outcome is meant.
pub(crate) async fn pipelined<P, E, T: Future>(
    messages: u64,
    window: usize,
    mut publish: impl FnMut(u64) -> P,
    mut is_meant: impl FnMut(u64, T::Output) -> Result<bool, Failure>,
) -> Result<u64, Failure>
where
    P: Future<Output = Result<T, E>>,
    Failure: From<E>,
{
    let mut unconfirmed = VecDeque::with_capacity(window);
    let mut count = 0;
    for number in 0..messages {
        if unconfirmed.len() == window
            && let Some((number, oldest)) = unconfirmed.pop_front()
        {
            count += u64::from(is_meant(number, oldest.await)?);
        }
        unconfirmed.push_back((number, publish(number).await?));
    }
    for (number, outcome) in unconfirmed {
        count += u64::from(is_meant(number, outcome.await)?);
    }
    Ok(count)
}

/// Works on all items of a stream, so many of them at once, and counts those whose outcome is true.
pub(crate) async fn concurrent<S: Stream, F, E>(
    items: S,
    window: usize,
    work: impl FnMut(S::Item) -> F,
) -> Result<u64, E>
where
    F: Future<Output = Result<bool, E>>,
{
    let count = |count: u64, is_meant: bool| ready(Ok(count + u64::from(is_meant)));
    items.map(work).buffer_unordered(window).try_fold(0, count).await
}
