//! What errors of a program's own types mean for their messages, where a handler does not say it itself.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use super::failure::{Classified, Verdict};
use crate::consumer::BoxError;
use crate::error::Error;

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

type Classifier = dyn Fn(&(dyn StdError + 'static)) -> Option<Classification> + Send + Sync;

impl Classifiers {
    pub(crate) fn add<E, C>(&mut self, classify: impl Fn(&E) -> C + Send + Sync + 'static)
    where
        E: StdError + 'static,
        C: Into<Classification>,
    {
        self.0
            .push(Arc::new(move |error| error.downcast_ref().map(|error| classify(error).into())));
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
            Some(Classification { verdict, kind }) => Classified::by(verdict, kind, error).into(),
            None => error,
        }
    }

    /// The first classification of an error of the chain, from the outermost error on.
    fn find(&self, error: &(dyn StdError + 'static)) -> Option<Classification> {
        std::iter::successors(Some(error), |&error| cause_of(error))
            .find_map(|error| self.0.iter().find_map(|classify| classify(error)))
    }
}

/// The error right behind one, also where `source()` passes it over because the text includes it.
fn cause_of<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e (dyn StdError + 'static)> {
    if let Some(error) = error.downcast_ref::<Classified>() {
        return Some(error.cause());
    }
    match error.downcast_ref::<Error>() {
        Some(error) => error.get_ref().map(|cause| cause as _),
        None => error.source(),
    }
}

impl fmt::Debug for Classifiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Classifiers({})", self.0.len())
    }
}
