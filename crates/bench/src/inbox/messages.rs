//! The messages of a run: deposits of 100 senders in turn, with numbers of each sender. Each tenth message comes again, a little later.

use std::collections::VecDeque;

use leveret::inbox::Sequence;
use leveret::{Client, IntoMessage as _, Json, Message, Publisher};

use super::QUEUE;
use crate::meter::Failure;

pub(super) const SENDERS: u64 = 100;
pub(super) const ACCOUNTS: u64 = 1000;

/// How far behind a message its copy is, and how far apart copies are.
const BEHIND: u64 = 50;
const APART: u64 = 10;

/// How many are published at once.
const CHUNK: u64 = 1000;

/// How many of so many messages come twice. The last one never does, so that all is done when it is.
pub(super) fn copies(messages: u64) -> u64 {
    messages.saturating_sub(BEHIND).div_ceil(APART)
}

/// What is in all accounts after so many messages.
pub(super) fn total(messages: u64) -> u64 {
    (0..messages).map(cents).sum()
}

fn cents(number: u64) -> u64 {
    number % 9 + 1
}

pub(super) struct Messages {
    publisher: Publisher,
    senders: Vec<Sequence>,
    /// The last ones, oldest first.
    recent: VecDeque<Message>,
    next: u64,
    end: u64,
}

impl Messages {
    pub(super) async fn new(client: &Client, messages: u64) -> Result<Messages, Failure> {
        Ok(Messages {
            publisher: client.publisher("").build().await?,
            senders: (0..SENDERS).map(|_| Sequence::fresh("sender")).collect(),
            recent: VecDeque::new(),
            next: 0,
            end: messages,
        })
    }

    /// Publishes some more, with their copies. False if there are no more.
    pub(super) async fn publish_some(&mut self) -> Result<bool, Failure> {
        let mut chunk = Vec::new();
        for number in self.next..self.end.min(self.next + CHUNK) {
            if number >= BEHIND {
                let past = self.recent.pop_front().ok_or("there is no past message")?;
                chunk.extend((number % APART == 0).then_some((QUEUE, past)));
            }
            let body = Json(&(number % ACCOUNTS, cents(number))).into_message()?;
            let message = self.senders[(number % SENDERS) as usize].stamp(body).await?;
            self.recent.push_back(message.clone());
            chunk.push((QUEUE, message));
        }
        self.next = self.end.min(self.next + CHUNK);
        self.publisher.publish_batch(chunk).await?;
        Ok(self.next < self.end)
    }
}
