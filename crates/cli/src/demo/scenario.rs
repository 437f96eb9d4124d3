//! What all scenarios have in common: where they are played, and how they end.

use std::collections::VecDeque;
use std::num::ParseIntError;
use std::pin::Pin;
use std::sync::Arc;

use leveret::{Client, Error, Publisher, Retry, State, Summary, Ticket};
use tokio::sync::watch;

use super::ledger::{Fate, Ledger};

/// One of the systems of the demo.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) title: &'static str,
    pub(super) about: &'static str,
    /// How many messages its books are about, if it is of this size.
    pub(super) total: fn(u64) -> u64,
    /// Declares what it needs.
    pub(super) open: fn(Stage) -> Doing<Play>,
}

pub(super) type Doing<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

/// A scenario that is ready: its queues are there, and it sends and handles messages until its books are complete.
pub(super) type Play = Doing<()>;

/// How many messages a scenario has under way before it waits for the confirm of the first.
const WINDOW: usize = 500;

/// Where a scenario is played.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) client: Client,
    pub(super) ledger: Arc<Ledger>,
    /// Of which size it is to be.
    pub(super) messages: u64,
    is_over: watch::Sender<bool>,
}

impl Stage {
    pub(super) fn new(client: &Client, ledger: &Arc<Ledger>, messages: u64) -> Self {
        let (client, ledger) = (client.clone(), Arc::clone(ledger));
        Stage { client, ledger, messages, is_over: watch::Sender::new(false) }
    }

    /// Is done when the scenario is over: what consumers run until.
    pub(super) fn over(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut is_over = self.is_over.subscribe();
        async move { drop(is_over.wait_for(|is_over| *is_over).await) }
    }

    /// Waits for all that is under way, and has the consumers end.
    pub(super) async fn end(&self) {
        self.ledger.until_settled().await;
        self.is_over.send_replace(true);
    }

    /// Sends numbers as messages, each with its routing key and what should become of it.
    pub(super) async fn send(
        &self,
        publisher: &Publisher,
        letters: impl IntoIterator<Item = (u64, &'static str, Fate)>,
    ) {
        let mut tickets = VecDeque::new();
        for (number, key, fate) in letters {
            self.ledger.sent(number, fate);
            match publisher.send(key, number.to_string()).await {
                Ok(ticket) => tickets.push_back((number, ticket)),
                Err(error) => self.ledger.fault(error.to_string()),
            }
            if tickets.len() >= WINDOW {
                self.confirm(tickets.pop_front()).await;
            }
        }
        while !tickets.is_empty() {
            self.confirm(tickets.pop_front()).await;
        }
    }

    async fn confirm(&self, sent: Option<(u64, Ticket)>) {
        let Some((number, ticket)) = sent else { return };
        match ticket.await {
            Ok(()) => self.ledger.confirmed(number),
            Err(error) => self.ledger.fault(error.to_string()),
        }
    }

    /// Looks at what comes into a parking lot, until the scenario is over.
    pub(super) async fn watch_lot(&self, lot: &str) -> Result<Summary, Error> {
        let lot = self.client.consumer(lot).retry(Retry::discard()).state(Arc::clone(&self.ledger));
        lot.handle(note_parked).run_until(self.over()).await
    }
}

async fn note_parked(body: String, State(ledger): State<Arc<Ledger>>) -> Result<(), ParseIntError> {
    ledger.parked(body.parse()?);
    Ok(())
}
