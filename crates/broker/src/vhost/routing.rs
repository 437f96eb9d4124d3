//! Which queues a message reaches.

use leveret_wire::{ShortStr, Table};

use super::{Destination, ExchangeId, QueueId, Vhost};

/// Memory for routing, used again for every message.
#[derive(Debug, Default)]
pub(super) struct Routes {
    pub(super) queues: Vec<QueueId>,
    exchanges: Vec<ExchangeId>,
    found: Vec<Destination>,
}

impl Vhost {
    /// The queues that a message with these keys and headers reaches from an exchange, each once. They are in
    /// [`Routes::queues`], which the caller takes and gives back.
    pub(super) fn route(
        &self,
        routes: &mut Routes,
        exchange: ExchangeId,
        keys: &[ShortStr<'_>],
        headers: Option<&Table<'_>>,
    ) {
        let Routes { queues, exchanges, found } = routes;
        queues.clear();
        exchanges.clear();
        exchanges.push(exchange);
        let mut at = 0;
        while let Some(id) = exchanges.get(at).copied() {
            at += 1;
            let Some(exchange) = self.exchanges.get(id) else { continue };
            found.clear();
            for key in keys {
                if id == self.default_exchange {
                    let queue = self.queue_names.get(key.as_bytes());
                    found.extend(queue.map(|queue| Destination::Queue(*queue)));
                } else {
                    exchange.bindings.route(key.as_bytes(), headers, found);
                }
            }
            if found.is_empty()
                && let Some(alternate) = &exchange.alternate
                // From another exchange, the default one leads nowhere.
                && !alternate.is_empty()
                && let Some(alternate) = self.exchange_names.get(alternate.as_bytes())
            {
                found.push(Destination::Exchange(*alternate));
            }
            for destination in found.drain(..) {
                match destination {
                    Destination::Queue(queue) => queues.push(queue),
                    Destination::Exchange(next) if exchanges.contains(&next) => {}
                    Destination::Exchange(next) => exchanges.push(next),
                }
            }
        }
        if queues.len() > 1 {
            queues.sort_unstable();
            queues.dedup();
        }
    }
}
