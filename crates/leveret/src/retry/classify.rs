//! What errors of a program's own types mean for their messages, where a handler does not say it itself.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use super::failure::{Classified, Verdict, short_name};
use crate::amqp;
use crate::error::{BoxError, Error};

/// What an error means for its message: a [`Verdict`], and the word by which parked messages are grouped. See
/// [`ConsumerBuilder::classify`](crate::ConsumerBuilder::classify).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classification {
    verdict: Verdict,
    kind: Option<Cow<'static, str>>,
}

impl Verdict {
    /// With a word for the kind of error, such as `declined`.
    pub fn kind(self, kind: impl Into<Cow<'static, str>>) -> Classification {
        Classification { verdict: self, kind: Some(kind.into()) }
    }
}

impl From<Verdict> for Classification {
    fn from(verdict: Verdict) -> Self {
        Classification { verdict, kind: None }
    }
}

/// The functions that classify errors, each for one type of error.
#[derive(Clone, Default)]
pub(crate) struct Classifiers(Vec<Arc<Classifier>>);

/// With the name of the type of error that it is for.
type Classifier =
    dyn Fn(&(dyn StdError + 'static)) -> Option<(Classification, Option<String>)> + Send + Sync;

impl Classifiers {
    pub(crate) fn add<E, C>(&mut self, classify: impl Fn(&E) -> C + Send + Sync + 'static)
    where
        E: StdError + 'static,
        C: Into<Classification>,
    {
        self.0.push(Arc::new(move |error| {
            let error = error.downcast_ref()?;
            Some((classify(error).into(), short_name::<E>()))
        }));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The error with its classification. An error that a handler has made a [`Failure`](super::Failure) of by name, as with
    /// `Failure::permanent`, keeps what that says.
    pub(crate) fn apply(&self, error: BoxError) -> BoxError {
        if error.downcast_ref::<Classified>().is_some_and(Classified::is_explicit) {
            return error;
        }
        match self.find(&*error) {
            Some((Classification { verdict, kind }, type_name)) => {
                Classified::by(verdict, kind, type_name, error).into()
            }
            None => error,
        }
    }

    /// The first classification of an error of the chain, from the outermost error on.
    fn find(&self, error: &(dyn StdError + 'static)) -> Option<(Classification, Option<String>)> {
        std::iter::successors(Some(error), |&error| cause_of(error))
            .find_map(|error| self.0.iter().find_map(|classify| classify(error)))
    }
}

/// The error right behind one, also where `source()` passes it over because the text includes it.
fn cause_of<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e (dyn StdError + 'static)> {
    if let Some(error) = error.downcast_ref::<Classified>() {
        return Some(error.cause());
    }
    if let Some(error) = error.downcast_ref::<Error>() {
        return error.get_ref().map(|cause| cause as _);
    }
    if let Some(error) = error.downcast_ref::<amqp::Error>() {
        return error.get_ref().map(|cause| cause as _);
    }
    if let Some(behind) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        return Some(behind);
    }
    let behind = CAUSE_ELSEWHERE.get().and_then(|cause_of| cause_of(error));
    behind.or_else(|| error.source())
}

/// Finds the cause of an error of `leveret-sql`, of which this crate knows nothing.
static CAUSE_ELSEWHERE: OnceLock<CauseOf> = OnceLock::new();

type CauseOf = for<'e> fn(&'e (dyn StdError + 'static)) -> Option<&'e (dyn StdError + 'static)>;

/// Has classifiers look behind errors of another crate: the function gives the error right behind one that is of its crate, and whose
/// `source()` may pass it over.
#[doc(hidden)]
pub fn look_behind_errors(
    cause_of: for<'e> fn(&'e (dyn StdError + 'static)) -> Option<&'e (dyn StdError + 'static)>,
) {
    CAUSE_ELSEWHERE.get_or_init(|| cause_of);
}

impl fmt::Debug for Classifiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Classifiers({})", self.0.len())
    }
}
