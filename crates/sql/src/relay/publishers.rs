//! The publishers of a relay: one for each exchange.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use leveret::{Client, Error, Publisher};

/// Each has a channel. Who publishes to more exchanges than this opens some again and again.
const MOST: usize = 100;

/// Exchange, and whether messages have to reach a queue there.
type Key = (String, bool);

#[derive(Debug)]
pub(super) struct Publishers {
    client: Client,
    window: usize,
    timeout: Duration,
    open: Mutex<HashMap<Key, Publisher>>,
}

impl Publishers {
    pub(super) fn new(client: Client, window: usize, timeout: Duration) -> Self {
        Publishers { client, window, timeout, open: Mutex::default() }
    }

    pub(super) async fn to(&self, exchange: &str, mandatory: bool) -> Result<Publisher, Error> {
        let key = (exchange.to_owned(), mandatory);
        if let Some(publisher) = self.known(&key) {
            return Ok(publisher);
        }
        let mut builder = self.client.publisher(exchange).window(self.window).timeout(self.timeout);
        if !mandatory {
            builder = builder.allow_unroutable();
        }
        let publisher = builder.build().await?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.len() >= MOST {
            // Whoever has one under way holds it.
            open.clear();
        }
        // If another worker was faster, theirs is used by all.
        Ok(open.entry(key).or_insert(publisher).clone())
    }

    fn known(&self, key: &Key) -> Option<Publisher> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }
}
