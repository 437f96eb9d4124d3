//! Running candidates in turns, each run in a process of its own: machines are noisy, and noise comes in stretches.

use clap::ValueEnum;

use crate::client::Failure;

/// What is asked for or, if nothing is, all there is.
pub(crate) fn chosen<T: ValueEnum + Clone>(asked_for: &[T]) -> Vec<T> {
    if asked_for.is_empty() { T::value_variants().to_vec() } else { asked_for.to_vec() }
}

/// Has each candidate run `rounds` times. Gives each one's runs or, if one of them failed, why.
///
/// `run` says how a run went or why it failed; an error of its own ends everything.
pub(crate) async fn in_turns<C: Copy, R>(
    candidates: Vec<C>,
    rounds: u32,
    mut run: impl AsyncFnMut(C) -> Result<Result<R, String>, Failure>,
) -> Result<Vec<(C, Result<Vec<R>, String>)>, Failure> {
    let begin = |candidate| (candidate, Ok(Vec::new()));
    let mut results: Vec<(C, Result<Vec<R>, String>)> = candidates.into_iter().map(begin).collect();
    for _ in 0..rounds {
        for (candidate, result) in &mut results {
            // One failure is enough to say so.
            let Ok(runs) = result else { continue };
            match run(*candidate).await? {
                Ok(measured) => runs.push(measured),
                Err(reason) => *result = Err(reason),
            }
        }
    }
    Ok(results)
}
