//! A task's hold on the messages that it has taken, which is not let go of before they are back.
//!
//! The broker may drop what it is given back because a channel closes. So none may be forgotten, even if whoever looks is dropped: each
//! step is a task of the runtime's, which comes to its end though nobody waits for it, and what is held then is put back by one more.
//! That has the client's timeout. A client that is closed waits for it, and empties the hands of those who go on. A step that goes over
//! many pages ends after the present one if nobody waits for it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::Handle;
use tokio::sync::Mutex;

use super::held::{Held, Outcome};
use super::mark::Mark;
use super::staying::At;
use super::walk::{Taken, Walk};
use crate::connection::Client;
use crate::connection::registry::Members;
use crate::error::Error;
use crate::forwarder::Parcel;

type Work<'h, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'h>>;

/// What is held, and whether somebody still wants it.
#[derive(Debug)]
struct Grip {
    held: Mutex<Held>,
    wanted: Arc<Wanted>,
}

impl Grip {
    /// Lets go of everything, as soon as the present step is done.
    async fn open(&self) {
        self.wanted.end();
        self.held.lock().await.give_up().await;
    }
}

/// Whether somebody waits for what is done. Known to who does it, in the middle of a step.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    is_over: AtomicBool,
}

impl Wanted {
    fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }

    /// An error if nobody does.
    pub(super) fn check(&self) -> Result<(), Error> {
        match self.is_over.load(Ordering::SeqCst) {
            true => Err(Error::closed("the client, or the look,")),
            false => Ok(()),
        }
    }
}

/// A task's hold on what it has taken. What is held goes back when it is dropped.
pub(super) struct Hand {
    grip: Arc<Grip>,
    renews: bool,
    runtime: Handle,
}

impl Hand {
    /// One that holds nothing yet, and how many messages there are. So many of them were put in anew under this mark.
    pub(super) async fn reach_into(
        client: &Client,
        queue: &str,
        (mark, renewed): (Mark, u64),
    ) -> Result<(Hand, u64), Error> {
        let (walk, depth) = Walk::begin(client, queue, mark).await?;
        let renews = walk.renews();
        let wanted = Arc::new(Wanted::default());
        let held = Held::new(client, queue, walk, renewed, Arc::clone(&wanted));
        let grip = Arc::new(Grip { held: Mutex::new(held), wanted });
        client.core().hands.add(&grip)?;
        Ok((Hand { grip, renews, runtime: Handle::current() }, depth))
    }

    /// Whether what stays is put in anew.
    pub(super) fn renews(&self) -> bool {
        self.renews
    }

    /// Does something with what is held. It is done to its end, whoever waits for it.
    async fn with<T: Send + 'static>(
        &self,
        work: impl for<'h> FnOnce(&'h mut Held) -> Work<'h, T> + Send + 'static,
    ) -> Result<T, Error> {
        let grip = Arc::clone(&self.grip);
        let work = async move {
            let mut held = grip.held.lock().await;
            match held.is_over {
                true => Err(Error::closed("the client")),
                false => work(&mut held).await,
            }
        };
        match tokio::spawn(work).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(Error::closed("the runtime")),
        }
    }

    /// The next messages, at most so many; none if there are no more.
    pub(super) async fn take(&self, most: u64) -> Result<Vec<Taken>, Error> {
        self.with(move |held| Box::pin(held.take(most))).await
    }

    pub(super) async fn stay(&self, taken: Taken) {
        self.grip.held.lock().await.stay(taken);
    }

    pub(super) async fn refuse(&self, taken: Taken, error: Error) {
        self.grip.held.lock().await.refuse(taken, error);
    }

    pub(super) async fn let_go(&self, taken: Taken) {
        self.grip.held.lock().await.let_go(taken);
    }

    pub(super) async fn send(&self, messages: Vec<(Taken, Parcel)>) -> Result<(), Error> {
        self.with(move |held| Box::pin(held.send(messages))).await
    }

    pub(super) async fn settle_all(&self) -> Result<(), Error> {
        self.with(|held| Box::pin(held.settle_all())).await
    }

    pub(super) async fn settle_for_long(&self) -> Result<(), Error> {
        self.with(|held| Box::pin(held.settle_for_long())).await
    }

    /// Puts back what stays of a page.
    pub(super) async fn turn_page(&self) -> Result<(), Error> {
        self.with(|held| Box::pin(held.put_back(At::Page))).await
    }

    pub(super) async fn pass_by(&self, messages: u64) -> Result<(), Error> {
        self.with(move |held| Box::pin(held.pass_by(messages))).await
    }

    pub(super) async fn end(&self, unseen: u64) -> Result<(), Error> {
        self.with(move |held| Box::pin(held.end(unseen))).await
    }

    pub(super) async fn check_renewing(&self) -> Result<(), Error> {
        self.with(|held| Box::pin(held.check_renewing())).await
    }

    pub(super) async fn begin_anew(&self, mark: Mark) {
        self.grip.held.lock().await.begin_anew(mark);
    }

    /// How many have the mark.
    pub(super) async fn renewed(&self) -> u64 {
        self.grip.held.lock().await.renewed()
    }

    /// How many were put in anew in all.
    pub(super) async fn put_in_anew(&self) -> u64 {
        self.grip.held.lock().await.put_in_anew()
    }

    /// All that is held goes back, as far as that is possible: something has failed.
    pub(super) async fn give_up(&self) {
        let emptied = self.with(|held| {
            Box::pin(async move {
                held.give_up().await;
                Ok(())
            })
        });
        // If it was over before, nothing was left to do.
        let _ = emptied.await;
    }

    /// What has become of messages that were sent, as far as it was not told before.
    pub(super) async fn outcomes(&self) -> VecDeque<Outcome> {
        std::mem::take(&mut self.grip.held.lock().await.outcomes)
    }

    /// Asks the walk something.
    pub(super) async fn walk<T>(&self, ask: impl FnOnce(&mut Walk) -> T) -> T {
        ask(&mut self.grip.held.lock().await.walk)
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        self.grip.wanted.end();
        let grip = Arc::clone(&self.grip);
        self.runtime.spawn(async move { grip.open().await });
    }
}

/// The hands of a client that may hold something.
#[derive(Debug, Default)]
pub(crate) struct Hands {
    hands: Members<Grip>,
    are_closed: AtomicBool,
}

impl Hands {
    fn add(&self, grip: &Arc<Grip>) -> Result<(), Error> {
        self.hands.add(grip);
        match self.are_closed.load(Ordering::SeqCst) {
            true => Err(Error::closed("the client")),
            false => Ok(()),
        }
    }

    /// Empties them all at once, and lets none take anything any longer.
    pub(crate) async fn close(&self) {
        self.are_closed.store(true, Ordering::SeqCst);
        let open = |grip: Arc<Grip>| tokio::spawn(async move { grip.open().await });
        let opening: Vec<_> = self.hands.all().into_iter().map(open).collect();
        for opened in opening {
            // One that has panicked has told so.
            let _ = opened.await;
        }
    }
}
