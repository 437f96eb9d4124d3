//! Messages that die in a queue, and where they go.

use std::sync::Arc;

use leveret_wire::ShortStr;

use super::deadlines::Deadline;
use super::{QueueId, Vhost};
use crate::death::{self, Death, Reason};
use crate::message::{Aside, Message, Name, Parts};
use crate::queue::Entry;

/// How many dead letters are sent on by one call of the virtual host. A millisecond's work or two: others wait for the
/// lock, and a 3.10 passes some messages round for ever.
const BURIALS: usize = 512;

/// When those beyond that go on, in milliseconds.
const TICK: u64 = 1;

/// How many dead letters this call may still send on.
#[derive(Debug)]
pub(super) struct Burials {
    left: usize,
    /// There is a deadline at which it goes on.
    go_on: bool,
}

impl Burials {
    pub(super) fn new() -> Self {
        Burials { left: BURIALS, go_on: false }
    }

    /// Another call.
    pub(super) fn renew(&mut self) {
        self.left = BURIALS;
    }
}

/// A message that died, and what its queue said should become of it.
#[derive(Debug)]
pub(super) struct Dying {
    message: Message,
    queue: Name,
    exchange: ShortStr<'static>,
    routing_key: Option<ShortStr<'static>>,
    reason: Reason,
    failures: u32,
}

impl Vhost {
    /// A message dies in a queue. It is sent on by [`Vhost::bury`], which is called when nothing else is under way.
    pub(super) fn die(&mut self, queue: QueueId, entry: Entry, reason: Reason) {
        self.memory -= entry.message.size();
        let count = match reason {
            Reason::Rejected => &mut self.tally.rejected,
            Reason::Expired => &mut self.tally.expired,
            Reason::MaxLen => &mut self.tally.over_length,
            Reason::DeliveryLimit => &mut self.tally.over_delivery_limit,
        };
        *count += 1;
        let queue = self.queues.get(queue);
        let exchange = queue.and_then(|one| one.arguments.dead_letter_exchange.as_ref());
        let (Some(queue), Some(exchange)) = (queue, exchange) else {
            self.tally.gone += 1;
            return;
        };
        self.dying.push_back(Dying {
            message: entry.message,
            queue: Arc::clone(&queue.name),
            exchange: exchange.clone(),
            routing_key: queue.arguments.dead_letter_routing_key.clone(),
            reason,
            failures: entry.failures,
        });
    }

    /// Sends on the messages that died, and those that die elsewhere of that. In 3.10 that need not end: what is beyond
    /// [`BURIALS`] waits for the next tick.
    pub(super) fn bury(&mut self) {
        while self.burials.left > 0
            && let Some(dying) = self.dying.pop_front()
        {
            self.burials.left -= 1;
            match self.dead_letter(&dying) {
                0 => self.tally.gone += 1,
                _ => self.tally.dead_lettered += 1,
            }
        }
        if !self.dying.is_empty() && !std::mem::replace(&mut self.burials.go_on, true) {
            self.set_deadline(self.now.after_millis(TICK), Deadline::Burial);
        }
    }

    /// The next tick has come.
    pub(super) fn go_on_burying(&mut self) {
        self.burials.go_on = false;
        self.bury();
    }

    /// Says how many queues it reached.
    fn dead_letter(&mut self, dying: &Dying) -> usize {
        let Some(exchange) = self.exchange_names.get(dying.exchange.as_bytes()).copied() else {
            return 0;
        };
        let message = &dying.message;
        let none = Aside::default();
        let aside = message.aside().unwrap_or(&none);
        let keys: Vec<ShortStr<'_>> = std::iter::once(message.routing_key())
            .chain(aside.copies.iter().map(ShortStr::borrowed))
            .collect();
        let bcc: Vec<ShortStr<'_>> = aside.blind.iter().map(ShortStr::borrowed).collect();
        let properties = message.raw_properties();
        let routing_key = dying.routing_key.as_ref().map(ShortStr::borrowed);
        let death = Death {
            queue: dying.queue.borrowed(),
            reason: dying.reason,
            time: self.clock.unix_seconds(self.now),
            routing_key: routing_key.as_ref(),
        };
        let end = death::Dying {
            properties: &properties,
            deaths: &aside.deaths,
            exchange: message.exchange().borrowed(),
            routing_keys: &keys,
            bcc: &bcc,
            failures: dying.failures,
        };
        let letter = death::dead_letter(self.profile, &end, &death);
        let headers = letter.routing_headers();
        let mut routes = std::mem::take(&mut self.routes);
        self.route(&mut routes, exchange, letter.routing_keys, Some(&headers));
        let Some((key, copies)) = letter.routing_keys.split_first() else { return 0 };
        let mut reached = 0;
        let dead = Message::new(
            &mut self.scratch,
            Parts {
                exchange: &self.exchanges[exchange].name,
                routing_key: key,
                properties: &letter.properties,
                // Its own time to live went with its death.
                ttl: None,
                aside: Aside {
                    copies: copies.iter().map(|key| key.borrowed().into_owned()).collect(),
                    blind: aside.blind.clone(),
                    deaths: letter.deaths.clone(),
                    headers: None,
                },
                body: message.body_bytes(),
            },
        );
        for queue in &routes.queues {
            let name = self.queues.get(*queue).map(|found| Arc::clone(&found.name));
            if name.is_some_and(|name| !letter.is_cycle(&name)) {
                reached += usize::from(self.enqueue(*queue, &dead, letter.failures, None));
            }
        }
        self.routes = routes;
        reached
    }
}
