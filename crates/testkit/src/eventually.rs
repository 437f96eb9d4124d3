//! Polling and waiting with a deadline.

use std::fmt::Display;
use std::panic::Location;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};

/// Longer than anything takes that a test awaits, also where others use the cores as well.
pub const SOON: Duration = Duration::from_secs(60);

const FIRST_PAUSE: Duration = Duration::from_millis(2);
/// Long enough not to keep a core busy that the server needs, short enough not to be noticed in a
/// test.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Polls `check` until it answers yes, and panics with `what` was awaited once `deadline` has
/// passed.
///
/// The check may answer with a `bool`, an `Option` or a `Result`; what is inside `Some` or `Ok` is
/// returned, and the last `Err` is part of the panic. (Any `Ok` is a yes, even `Ok(false)`.) A
/// check that hangs is given up at the deadline too. Time is tokio's: where a test has paused it,
/// waiting takes no time.
///
/// ```
/// # use std::time::Duration;
/// # use leveret_testkit::eventually;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let mut polls = 0;
/// let third = eventually(Duration::from_secs(5), "the third poll", || {
///     polls += 1;
///     async move { (polls == 3).then_some("here") }
/// })
/// .await;
/// assert_eq!(third, "here");
/// # }
/// ```
#[track_caller]
pub fn eventually<F, A>(
    deadline: Duration,
    what: impl Display,
    mut check: impl FnMut() -> F,
) -> impl Future<Output = A::Value>
where
    F: Future<Output = A>,
    A: Answer,
{
    let asked_at = Location::caller();
    async move {
        let end = Instant::now() + deadline;
        let mut pause = FIRST_PAUSE;
        let mut reason = None;
        while let Ok(answer) = timeout_at(end, check()).await {
            match answer.into_result() {
                Ok(value) => return value,
                Err(no) => reason = no,
            }
            if Instant::now() >= end {
                break;
            }
            sleep(pause.min(end - Instant::now())).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        let last = reason.map_or(String::new(), |reason| format!("; at last: {reason}"));
        panic!("waited {deadline:?} for {what}, in vain (at {asked_at}){last}");
    }
}

/// Awaits a future, and panics with `what` was awaited once [`SOON`] has passed.
#[track_caller]
pub fn soon<F: IntoFuture>(what: impl Display, future: F) -> impl Future<Output = F::Output> {
    let asked_at = Location::caller();
    async move {
        match timeout(SOON, future).await {
            Ok(value) => value,
            Err(_) => panic!("{what} did not happen in {SOON:?} (at {asked_at})"),
        }
    }
}

/// What a check given to [`eventually`] may answer with.
pub trait Answer {
    /// What the caller gets once the answer is yes.
    type Value;

    /// The value, or why there is none yet, if the check knows.
    fn into_result(self) -> Result<Self::Value, Option<String>>;
}

impl Answer for bool {
    type Value = ();

    fn into_result(self) -> Result<(), Option<String>> {
        if self { Ok(()) } else { Err(None) }
    }
}

impl<T> Answer for Option<T> {
    type Value = T;

    fn into_result(self) -> Result<T, Option<String>> {
        self.ok_or(None)
    }
}

impl<T, E: Display> Answer for Result<T, E> {
    type Value = T;

    fn into_result(self) -> Result<T, Option<String>> {
        self.map_err(|error| Some(error.to_string()))
    }
}
