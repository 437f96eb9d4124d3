//! Messages that die in a queue, and where they go.
//!
//! A quorum queue that dead-letters at least once keeps a dead message until all queues it is routed to have taken it, each
//! once. It counts towards the queue's limits and is not seen otherwise.

use std::cell::{Cell, LazyCell};
use std::sync::Arc;

use bytes::Bytes;
use foldhash::{HashSet, HashSetExt};
use leveret_wire::{RawProperties, ShortStr};

use super::deadlines::Deadline;
use super::{QueueId, Vhost};
use crate::death::{self, Death, Reason};
use crate::events::What;
use crate::message::{Aside, Message, Name, Parts};
use crate::queue::{Entry, Kept, Publisher};

/// How many dead letters are sent on by one call of the virtual host. A millisecond's work or two: others wait for the
/// lock, and a 3.10 passes some messages round for ever.
const BURIALS: usize = 512;

/// How many earlier deaths of a message are looked through in the time that it takes to send one on.
const DEATHS_AT_ONCE: usize = 128;

/// How many routing keys of a message are copied in that time.
const KEYS_AT_ONCE: usize = 16;

/// How many bytes of headers are decoded and encoded in that time.
const HEADERS_AT_ONCE: usize = 512;

/// How many queues a message is put into in that time.
const QUEUES_AT_ONCE: usize = 8;

/// When those beyond that go on, in milliseconds.
const TICK: u64 = 1;

/// When it is tried again to send on what is kept, in milliseconds. RabbitMQ's own setting.
const RETRY: u64 = 180_000;

/// How many dead letters this call may still send on.
#[derive(Debug)]
pub(super) struct Burials {
    left: usize,
    /// There is a deadline at which it goes on.
    go_on: bool,
    /// There is a deadline at which what is kept is sent on again.
    retry: bool,
}

impl Burials {
    pub(super) fn new() -> Self {
        Burials { left: BURIALS, go_on: false, retry: false }
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
    /// When it died, in seconds since 1970.
    time: u64,
    /// Who keeps it until it has arrived, if anybody does.
    keeper: Option<Keeper>,
}

impl Dying {
    /// The work of routing it, in units of a message that dies for the first time: encoding its headers, searching its deaths
    /// and copying its keys.
    fn work(&self) -> usize {
        let work = 1 + self.message.published_properties().len() / HEADERS_AT_ONCE;
        let Some(aside) = self.message.aside() else { return work };
        work + aside.deaths.len() / DEATHS_AT_ONCE + aside.copies.len() / KEYS_AT_ONCE
    }
}

/// A queue that keeps a dead message, and the queues that have taken it.
#[derive(Debug)]
struct Keeper {
    queue: QueueId,
    reached: HashSet<QueueId>,
}

/// How many queues a dead letter was for.
#[derive(Debug, Default)]
struct Reached {
    took: usize,
    refused: usize,
    /// The size of its deaths, if a headers exchange wanted to see them.
    deaths: usize,
}

impl Vhost {
    /// A message dies in a queue. It is sent on by [`Vhost::bury`], which is called when nothing else is under way.
    pub(super) fn die(&mut self, queue: QueueId, entry: Entry, reason: Reason) {
        let count = match reason {
            Reason::Rejected => &mut self.tally.rejected,
            Reason::Expired => &mut self.tally.expired,
            Reason::MaxLen => &mut self.tally.over_length,
            Reason::DeliveryLimit => &mut self.tally.over_delivery_limit,
        };
        *count += 1;
        self.note(&entry.message, |vhost| What::Died {
            queue: vhost.queue_name(queue),
            why: reason.into(),
        });
        let found = self.queues.get_mut(queue);
        let Some((found, exchange)) = found.and_then(|found| {
            let exchange = found.arguments.dead_letter_exchange.clone()?;
            Some((found, exchange))
        }) else {
            self.memory -= entry.message.size();
            self.tally.gone += 1;
            return;
        };
        let keeps = found.arguments.dead_letters_at_least_once();
        if keeps {
            found.kept.add(&entry.message, &found.ready);
            found.tell_publishers();
        }
        self.dying.push_back(Dying {
            message: entry.message,
            queue: Arc::clone(&found.name),
            exchange,
            routing_key: found.arguments.dead_letter_routing_key.clone(),
            reason,
            failures: entry.failures,
            time: self.clock.unix_seconds(self.now),
            keeper: keeps.then(|| Keeper { queue, reached: HashSet::new() }),
        });
    }

    /// Sends on the messages that died, and those that die elsewhere of that. In 3.10 that need not end: what is beyond
    /// [`BURIALS`] waits for the next tick.
    pub(super) fn bury(&mut self) {
        while self.burials.left > 0
            && let Some(dying) = self.dying.pop_front()
        {
            let work = dying.work() + self.send_on(dying);
            self.burials.left = self.burials.left.saturating_sub(work);
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

    /// Says how much work it was beyond [`Dying::work`].
    fn send_on(&mut self, mut dying: Dying) -> usize {
        let mut keeper = dying.keeper.take();
        let Reached { took, refused, deaths } = self.dead_letter(&dying, keeper.as_mut());
        let unfinished = took == 0 || (keeper.is_some() && refused > 0);
        if unfinished {
            let (queue, kept) = (dying.queue.to_string(), keeper.is_some());
            self.note(&dying.message, |_| match kept {
                true => What::Kept { queue },
                false => What::Gone { queue },
            });
        }
        match keeper {
            Some(keeper) if unfinished => {
                dying.keeper = Some(keeper);
                self.keep(dying);
            }
            Some(keeper) => {
                self.tally.dead_lettered += 1;
                self.let_go(keeper.queue, &dying.message);
            }
            None => {
                self.memory -= dying.message.size();
                match unfinished {
                    true => self.tally.gone += 1,
                    false => self.tally.dead_lettered += 1,
                }
            }
        }
        (took + refused) / QUEUES_AT_ONCE + deaths / HEADERS_AT_ONCE
    }

    /// Keeps a message that did not get everywhere, and tries again later.
    fn keep(&mut self, dying: Dying) {
        self.kept.push(dying);
        if !std::mem::replace(&mut self.burials.retry, true) {
            self.set_deadline(self.now.after_millis(RETRY), Deadline::Retry);
        }
    }

    /// A queue keeps a message no longer.
    fn let_go(&mut self, queue: QueueId, message: &Message) {
        self.memory -= message.size();
        if let Some(queue) = self.queues.get_mut(queue) {
            queue.kept.remove(message, &queue.ready);
            queue.tell_publishers();
        }
    }

    /// It is time to try again with all that is kept.
    pub(super) fn retry_burials(&mut self) {
        self.burials.retry = false;
        self.dying.extend(self.kept.drain(..));
        self.bury();
    }

    /// A queue is gone, and with it what it keeps.
    pub(super) fn forget_kept(&mut self, queue: QueueId, kept: &Kept) {
        if kept.count == 0 {
            return;
        }
        let (memory, discarded) = (&mut self.memory, &mut self.tally.discarded);
        let mut stays = |dying: &Dying| {
            let is_its = dying.keeper.as_ref().is_some_and(|keeper| keeper.queue == queue);
            if is_its {
                *memory -= dying.message.size();
                *discarded += 1;
            }
            !is_its
        };
        self.kept.retain(&mut stays);
        self.dying.retain(&mut stays);
    }

    /// Sends a message to its dead-letter exchange, but not again to queues that its keeper knows it has reached before. Those
    /// that it reaches now are added to them.
    fn dead_letter(&mut self, dying: &Dying, keeper: Option<&mut Keeper>) -> Reached {
        let from = keeper.as_ref().map(|keeper| Publisher::DeadLetters(keeper.queue));
        let mut none = HashSet::new();
        let before = keeper.map_or(&mut none, |keeper| &mut keeper.reached);
        let mut reached = Reached::default();
        let Some(exchange) = self.exchange_names.get(dying.exchange.as_bytes()).copied() else {
            return reached;
        };
        let message = &dying.message;
        let none = Aside::default();
        let aside = message.aside().unwrap_or(&none);
        let keys: Vec<ShortStr<'_>> = std::iter::once(message.routing_key())
            .chain(aside.copies.iter().map(ShortStr::borrowed))
            .collect();
        let bcc: Vec<ShortStr<'_>> = aside.blind.iter().map(ShortStr::borrowed).collect();
        let properties = Bytes::copy_from_slice(message.published_properties());
        let properties = RawProperties::new(properties);
        let routing_key = dying.routing_key.as_ref().map(ShortStr::borrowed);
        let death = Death {
            queue: dying.queue.borrowed(),
            reason: dying.reason,
            time: dying.time,
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
        let deaths = Cell::new(0);
        let headers = LazyCell::new(|| {
            deaths.set(letter.deaths.size());
            letter.routing_headers()
        });
        let mut routes = std::mem::take(&mut self.routes);
        self.route(&mut routes, exchange, letter.routing_keys, &|| Some(&*headers));
        reached.deaths = deaths.get();
        let Some((key, copies)) = letter.routing_keys.split_first() else {
            self.routes = routes;
            return reached;
        };
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
        routes.queues.retain(|queue| {
            let name = self.queues.get(*queue).map(|found| Arc::clone(&found.name));
            name.is_some_and(|name| !letter.is_cycle(&name))
        });
        reached.took = routes.queues.extract_if(.., |queue| before.contains(queue)).count();
        if !routes.queues.is_empty() {
            self.note(&dead, |vhost| What::DeadLettered {
                from: dying.queue.to_string(),
                to: vhost.queue_names_of(&routes.queues),
            });
        }
        for queue in &routes.queues {
            if self.enqueue(*queue, &dead, letter.failures, from) {
                reached.took += 1;
                before.insert(*queue);
            } else {
                reached.refused += 1;
                let full = |vhost: &Vhost| What::Refused { queue: Some(vhost.queue_name(*queue)) };
                self.note(&dead, full);
            }
        }
        self.routes = routes;
        reached
    }
}
