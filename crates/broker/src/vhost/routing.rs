//! Which queues a message reaches.

use std::collections::HashSet;

use foldhash::fast::RandomState;
use leveret_wire::{ShortStr, Table};

use super::{Destination, ExchangeId, QueueId, Vhost};
use crate::exchange::Kind;

/// For how many destinations memory is kept from one message to the next.
const KEPT: usize = 4096;

/// Memory for routing, used again for every message.
#[derive(Debug, Default)]
pub(super) struct Routes {
    pub(super) queues: Vec<QueueId>,
    exchanges: Vec<ExchangeId>,
    /// The same exchanges, if there is more than one.
    seen: HashSet<ExchangeId, RandomState>,
    found: Vec<Destination>,
}

impl Routes {
    /// For how many destinations there is memory.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.found.capacity().max(self.queues.capacity())
    }

    /// Gives back memory that one message took beyond what most need.
    #[cold]
    fn shrink(&mut self) {
        self.queues.shrink_to(KEPT);
        self.exchanges.shrink_to(KEPT);
        self.seen.shrink_to(KEPT);
        self.found.shrink_to(KEPT);
    }

    fn begin(&mut self, exchange: ExchangeId) {
        self.queues.clear();
        self.exchanges.clear();
        self.seen.clear();
        self.exchanges.push(exchange);
    }

    fn add(&mut self, destination: Destination) {
        match destination {
            Destination::Queue(queue) => self.queues.push(queue),
            Destination::Exchange(next) => {
                if self.seen.is_empty() {
                    self.seen.extend(&self.exchanges);
                }
                if self.seen.insert(next) {
                    self.exchanges.push(next);
                }
            }
        }
    }
}

impl Vhost {
    /// The queues that a message with these keys and headers reaches from an exchange, each once. They are in
    /// [`Routes::queues`], which the caller takes and gives back. Only a headers exchange asks for the headers.
    pub(super) fn route<'h>(
        &self,
        routes: &mut Routes,
        exchange: ExchangeId,
        keys: &[ShortStr<'_>],
        headers: &dyn Fn() -> Option<&'h Table<'h>>,
    ) {
        routes.begin(exchange);
        let several = if keys.len() > 1 { distinct(keys) } else { Vec::new() };
        let mut at = 0;
        while let Some(id) = routes.exchanges.get(at).copied() {
            at += 1;
            let Some(exchange) = self.exchanges.get(id) else { continue };
            let headers = if exchange.kind == Kind::Headers { headers() } else { None };
            let mut found = std::mem::take(&mut routes.found);
            if id == self.default_exchange {
                let queues = keys.iter().filter_map(|key| self.queue_names.get(key.as_bytes()));
                found.extend(queues.map(|queue| Destination::Queue(*queue)));
            } else if let [key] = keys {
                exchange.bindings.route(key.as_bytes(), headers, &mut found);
            } else {
                exchange.bindings.route_all(&several, headers, &mut found);
            }
            if found.is_empty()
                && let Some(alternate) = &exchange.alternate
                // From another exchange, the default one leads nowhere.
                && !alternate.is_empty()
                && let Some(alternate) = self.exchange_names.get(alternate.as_bytes())
            {
                found.push(Destination::Exchange(*alternate));
            }
            found.drain(..).for_each(|destination| routes.add(destination));
            routes.found = found;
        }
        let queues = &mut routes.queues;
        if queues.len() > 1 {
            queues.sort_unstable();
            queues.dedup();
        }
        if routes.capacity() > KEPT {
            routes.shrink();
        }
    }
}

/// Each key once.
fn distinct<'k>(keys: &'k [ShortStr<'_>]) -> Vec<&'k [u8]> {
    let mut keys: Vec<_> = keys.iter().map(ShortStr::as_bytes).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}
