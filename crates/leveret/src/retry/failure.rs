//! What a handler's error means for its message.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use crate::amqp::next_cause;
use crate::error::{BoxError, Error, ErrorKind};

/// What should become of a message whose handler failed, as far as the handler knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// It may go well another time. What an error means that says nothing else.
    #[default]
    Retry,
    /// It may go well after this long: what a service says that limits its callers.
    RetryAfter(Duration),
    /// Back to its queue at once, and it does not count as an attempt.
    Requeue,
    /// It will never go well: it is parked at once.
    Permanent,
    /// There is nothing left to do: the message is done.
    Done,
}

/// An error of a handler together with what it means for the message.
///
/// Any error becomes one by `?`, and is then tried again. It says otherwise by how it is made:
///
/// ```
/// use leveret::{Failure, Json};
///
/// async fn charge(Json(cents): Json<u64>) -> Result<(), Failure> {
///     if cents > 1_000_000 {
///         return Err(Failure::permanent("too much").kind("limit"));
///     }
///     let rate: f64 = "1.5".parse()?; // an error here is tried again
///     # let _ = rate;
///     Ok(())
/// }
/// ```
///
/// What the errors of a program's own types mean is said once for a consumer or a service:
/// [`ConsumerBuilder::classify`](crate::ConsumerBuilder::classify).
pub struct Failure(Box<Classified>);

impl Failure {
    fn new(verdict: Verdict, error: impl Into<BoxError>) -> Self {
        Failure(Box::new(Classified { verdict: Some(verdict), kind: None, error: error.into() }))
    }

    /// It may go well another time.
    pub fn retry(error: impl Into<BoxError>) -> Self {
        Failure::new(Verdict::Retry, error)
    }

    /// It may go well after this long. It counts as an attempt like any other. Of the designs only
    /// [`Retry::new`](super::Retry::new) has a queue for any wait; the others have waits of their own.
    pub fn retry_after(delay: Duration, error: impl Into<BoxError>) -> Self {
        Failure::new(Verdict::RetryAfter(delay), error)
    }

    /// Back to its queue at once, without counting: another consumer may be luckier. Where the broker may count, to drop the
    /// message in the end, it goes to the end of its queue as a new one: see [`Retry`](super::Retry#delivery-limits).
    ///
    /// Elsewhere it goes to the head, and the same consumer may get it again before all others: with a
    /// [prefetch](crate::ConsumerBuilder::prefetch) of 1, which is the default, they wait until it is handled.
    pub fn requeue(error: impl Into<BoxError>) -> Self {
        Failure::new(Verdict::Requeue, error)
    }

    /// It will never go well: the message is parked at once.
    pub fn permanent(error: impl Into<BoxError>) -> Self {
        Failure::new(Verdict::Permanent, error)
    }

    /// What was to be done is done already, or need no longer be: the message is acked.
    pub fn done(error: impl Into<BoxError>) -> Self {
        Failure::new(Verdict::Done, error)
    }

    /// The kind of the error, by which parked messages are told apart: a word, such as `timeout`.
    #[must_use]
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.0.kind = Some(kind.into());
        self
    }

    /// What it means for the message.
    pub fn verdict(&self) -> Verdict {
        self.0.verdict()
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({})", self.0.verdict(), self.0.error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.error.fmt(f)
    }
}

// `Failure` is no `std::error::Error` itself, or this conversion could not be.
impl<E: StdError + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        let error: BoxError = Box::new(error);
        let seen = Diagnosis::of_plain(&error, String::new());
        let kind = if seen.kind == UNNAMED { short_name::<E>() } else { Some(seen.kind) };
        Failure(Box::new(Classified { verdict: None, kind, error }))
    }
}

impl From<Failure> for BoxError {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

/// The form in which a [`Failure`] goes through the layers around a handler.
pub(crate) struct Classified {
    /// `None` if only the error itself tells.
    verdict: Option<Verdict>,
    kind: Option<String>,
    error: BoxError,
}

impl Classified {
    /// By a function of the consumer. Without a word of its own the error keeps the one it has, or else the name of the type that
    /// the function is for.
    pub(super) fn by(
        verdict: Verdict,
        kind: Option<Cow<'static, str>>,
        type_name: Option<String>,
        error: BoxError,
    ) -> Self {
        let known = || Some(Diagnosis::of(&error).kind).filter(|kind| kind != UNNAMED);
        let kind = kind.map(Cow::into_owned).or_else(known).or(type_name);
        Classified { verdict: Some(verdict), kind, error }
    }

    /// The error that is classified.
    pub(super) fn cause(&self) -> &(dyn StdError + 'static) {
        &*self.error
    }

    /// Whether the verdict was chosen, and does not follow from the error alone.
    pub(super) fn is_explicit(&self) -> bool {
        self.verdict.is_some()
    }

    fn verdict(&self) -> Verdict {
        let of_error = || Diagnosis::of_plain(&self.error, String::new()).verdict;
        self.verdict.unwrap_or_else(of_error)
    }
}

impl fmt::Debug for Classified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl fmt::Display for Classified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl StdError for Classified {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.error.source()
    }
}

/// The kind of an error of which nothing is known but its text.
const UNNAMED: &str = "error";

/// What is known of an error that came out of the layers around a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Diagnosis {
    pub(crate) verdict: Verdict,
    pub(crate) kind: String,
    pub(crate) text: String,
}

impl Diagnosis {
    pub(crate) fn of(error: &BoxError) -> Self {
        let text = chain(&**error);
        if let Some(classified) = error.downcast_ref::<Classified>() {
            let within = Diagnosis::of_plain(&classified.error, String::new());
            let kind = classified.kind.clone().unwrap_or(within.kind);
            return Diagnosis { verdict: classified.verdict(), kind, text };
        }
        Diagnosis::of_plain(error, text)
    }

    fn of_plain(error: &BoxError, text: String) -> Self {
        match error.downcast_ref::<Error>().map(Error::kind) {
            // What cannot be decoded now cannot be decoded later.
            Some(ErrorKind::Payload) => {
                Diagnosis { verdict: Verdict::Permanent, kind: "undecodable".to_owned(), text }
            }
            Some(ErrorKind::Panicked) => {
                Diagnosis { verdict: Verdict::Retry, kind: "panic".to_owned(), text }
            }
            _ => Diagnosis { verdict: Verdict::Retry, kind: UNNAMED.to_owned(), text },
        }
    }
}

/// An error with its causes, as far as it does not name them itself.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source.and_then(|source| next_cause(&text, source)) {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// The name of a type without its path: `ParseIntError`. None if it is only a box around something.
pub(crate) fn short_name<T>() -> Option<String> {
    let name = std::any::type_name::<T>();
    let plain = name.split('<').next().unwrap_or(name);
    let short = plain.rsplit("::").next().unwrap_or(plain);
    let is_name = !short.is_empty() && short.chars().all(|c| c.is_alphanumeric() || c == '_');
    (is_name && short != "Box" && short != "str" && short != "String").then(|| short.to_owned())
}

/// An error with the name of its type as its kind, unless it says what it is.
pub(crate) fn named<E: Into<BoxError>>(error: E) -> BoxError {
    let name = short_name::<E>();
    let error: BoxError = error.into();
    if name.is_none() || error.is::<Classified>() || error.is::<Error>() {
        return error;
    }
    Box::new(Classified { verdict: None, kind: name, error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_by_question_mark_is_tried_again_and_keeps_the_name_of_its_type() {
        fn fails() -> Result<(), Failure> {
            "x".parse::<u32>()?;
            Ok(())
        }
        let error: BoxError = fails().unwrap_err().into();
        let seen = Diagnosis::of(&error);
        assert_eq!((seen.verdict, seen.kind.as_str()), (Verdict::Retry, "ParseIntError"));
        assert_eq!(seen.text, "invalid digit found in string");
    }

    #[test]
    fn what_a_failure_says_of_itself_counts() {
        let error: BoxError = Failure::permanent("no").kind("declined").into();
        let seen = Diagnosis::of(&error);
        assert_eq!((seen.verdict, seen.kind.as_str()), (Verdict::Permanent, "declined"));
    }

    #[test]
    fn what_cannot_be_decoded_is_permanent_also_by_question_mark() {
        let undecodable = || Error::new(ErrorKind::Payload, "not JSON");
        let plain: BoxError = undecodable().into();
        assert_eq!(Diagnosis::of(&plain).verdict, Verdict::Permanent);
        assert_eq!(Diagnosis::of(&named(undecodable())).kind, "undecodable");
        let failure = Failure::from(undecodable());
        assert_eq!(failure.verdict(), Verdict::Permanent);
        assert_eq!(Diagnosis::of(&failure.into()).kind, "undecodable");
    }

    #[test]
    fn text_alone_is_an_error_of_no_kind() {
        let seen = Diagnosis::of(&named("it failed"));
        assert_eq!((seen.kind.as_str(), seen.text.as_str()), ("error", "it failed"));
    }

    #[test]
    fn causes_are_told_once() {
        let inner = std::io::Error::other("disk full");
        let error: BoxError = Error::caused(ErrorKind::Invalid, "cannot write", inner).into();
        assert_eq!(chain(&*error), "cannot write: disk full");
    }
}
