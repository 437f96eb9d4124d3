//! A channel and a consumer, as the virtual host knows them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use foldhash::fast::RandomState;
use leveret_wire::ShortStr;

use super::publishing::Published;
use super::unsettled::Deliveries;
pub(super) use super::unsettled::Unsettled;
use super::{ConnectionId, ConsumerId, ExchangeId, QueueId};
use crate::outlet::Outlet;
use crate::time::Moment;

/// A channel: what was delivered on it, and how it publishes.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(super) connection: ConnectionId,
    pub(super) number: u16,
    pub(super) outlet: Arc<Outlet>,
    /// It is about to go, and its client gets nothing more on it.
    pub(super) silent: bool,
    pub(super) mode: Mode,
    pub(super) consumers: HashMap<ShortStr<'static>, ConsumerId, RandomState>,
    /// The delivery tag of the last delivery.
    pub(super) last_tag: u64,
    unsettled: Deliveries,
    /// The tags of what was taken away from its consumers, which kept it for too long, and may still be settled.
    overdue: BTreeMap<u64, ConsumerId>,
    /// The limit for the next consumer; 0 is none.
    pub(super) prefetch: u16,
    pub(super) prefetch_for_all: PrefetchForAll,
    /// Consumers that were cancelled and have not settled all they had.
    pub(super) lingering: HashMap<ShortStr<'static>, ConsumerId, RandomState>,
    /// The queue that was declared last: it is meant by an empty name.
    pub(super) last_queue: Option<ShortStr<'static>>,
    /// The exchange that was published to last.
    pub(super) last_exchange: Option<ExchangeId>,
    /// The consumer of direct replies, and the secret part of its address.
    pub(super) replies: Option<Replies>,
}

/// What 3.10 counts for a limit on all consumers of a channel together. It counts as it goes along, and not always what it
/// should: deliveries that were there when the limit was set, whether consumed or got, and then what its classic queues
/// deliver; but as settled whatever was consumed.
#[derive(Debug, Default)]
pub(super) struct PrefetchForAll {
    /// 0 is none.
    limit: u16,
    counted: i64,
    /// The queue that took the last of the room when there was some again.
    pub(super) last_filled: QueueId,
}

impl PrefetchForAll {
    #[inline]
    pub(super) fn is_set(&self) -> bool {
        self.limit > 0
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.is_set() && self.counted >= i64::from(self.limit)
    }

    fn set(&mut self, limit: u16, unsettled: usize) -> bool {
        let was_full = self.is_full();
        if !self.is_set() || limit == 0 {
            self.counted = if limit == 0 { 0 } else { unsettled as i64 };
        }
        self.limit = limit;
        was_full && !self.is_full()
    }

    /// A classic queue delivered something to be settled.
    #[inline]
    pub(super) fn delivered(&mut self) {
        self.counted += i64::from(self.is_set());
    }

    /// So many that were consumed are settled. Says whether there is room again.
    pub(super) fn settled(&mut self, count: usize) -> bool {
        let was_full = self.is_full();
        if self.is_set() && self.counted != 0 {
            self.counted -= count as i64;
        }
        was_full && !self.is_full()
    }
}

/// How a channel publishes.
#[derive(Debug)]
pub(super) enum Mode {
    Plain,
    Confirm(Confirms),
    Transaction(Transaction),
}

/// Which publishes were answered.
#[derive(Debug, Default)]
pub(super) struct Confirms {
    /// How many were published; all of them are done.
    pub(super) published: u64,
    /// Up to which the client was told.
    pub(super) told: u64,
}

/// What waits for a commit.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    pub(super) published: Vec<Published>,
    pub(super) settled: Vec<(Vec<Unsettled>, Settlement)>,
}

impl Transaction {
    /// How much memory its messages take, about.
    pub(super) fn size(&self) -> usize {
        self.published.iter().map(Published::size).sum()
    }
}

/// How a delivery is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Settlement {
    Ack,
    /// Not done: put back, or let die. `reject` and `nack` are told apart: not all count both.
    Refuse {
        requeue: bool,
        by_reject: bool,
    },
}

/// Who gets the direct replies of a channel.
#[derive(Debug)]
pub(super) struct Replies {
    pub(super) tag: ShortStr<'static>,
    pub(super) address: ShortStr<'static>,
}

impl Channel {
    pub(super) fn new(connection: ConnectionId, number: u16, outlet: Arc<Outlet>) -> Self {
        Channel {
            connection,
            number,
            outlet,
            silent: false,
            mode: Mode::Plain,
            consumers: HashMap::default(),
            last_tag: 0,
            unsettled: Deliveries::default(),
            overdue: BTreeMap::new(),
            prefetch: 0,
            prefetch_for_all: PrefetchForAll::default(),
            lingering: HashMap::default(),
            last_queue: None,
            last_exchange: None,
            replies: None,
        }
    }

    #[inline]
    pub(super) fn next_tag(&mut self) -> u64 {
        self.last_tag += 1;
        self.last_tag
    }

    /// Keeps a delivery until it is settled.
    #[inline]
    pub(super) fn keep(&mut self, delivery: Unsettled) {
        self.unsettled.push(delivery);
    }

    pub(super) fn unsettled_count(&self) -> usize {
        self.unsettled.len()
    }

    /// Whether its client alone can free what it holds: deliveries to settle, or a transaction to commit.
    pub(super) fn holds_messages(&self) -> bool {
        let waits_for_commit = match &self.mode {
            Mode::Transaction(Transaction { published, settled }) => {
                !published.is_empty() || !settled.is_empty()
            }
            Mode::Plain | Mode::Confirm(_) => false,
        };
        waits_for_commit || self.unsettled.len() > 0
    }

    /// Sets a limit for all consumers together; 0 is none. Says whether they may have more than before.
    pub(super) fn limit_all(&mut self, limit: u16) -> bool {
        let unsettled = self.unsettled.len();
        self.prefetch_for_all.set(limit, unsettled)
    }

    /// Takes out the delivery with this tag, or with `multiple` all up to it; all there are if it is 0. `None` if the tag
    /// is unknown.
    pub(super) fn take_unsettled(&mut self, tag: u64, multiple: bool) -> Option<Vec<Unsettled>> {
        match (multiple, tag) {
            (true, 0) => Some(self.unsettled.take_all()),
            (true, tag) => self.unsettled.take_through(tag),
            (false, tag) => self.unsettled.take(tag).map(|delivery| vec![delivery]),
        }
    }

    /// Takes out what is due, in the order of the tags.
    pub(super) fn take_due(&mut self, now: Moment) -> Vec<Unsettled> {
        self.unsettled.take_if(0, |one| one.due <= now)
    }

    /// When the next delivery is due.
    pub(super) fn next_due(&self) -> Moment {
        self.unsettled.iter().map(|one| one.due).min().unwrap_or(Moment::NEVER)
    }

    pub(super) fn remember_overdue(&mut self, tag: u64, consumer: ConsumerId) {
        self.overdue.insert(tag, consumer);
    }

    /// The same as [`Channel::take_unsettled`] of what was taken away before: whose it was. And all others that are settled with
    /// it, if the tag is one of those.
    pub(super) fn take_overdue(
        &mut self,
        tag: u64,
        multiple: bool,
    ) -> (Vec<ConsumerId>, Option<Vec<Unsettled>>) {
        if self.overdue.is_empty() {
            return (Vec::new(), None);
        }
        let is_overdue = self.overdue.contains_key(&tag);
        let tags = match (multiple, tag) {
            (true, 0) => 0..=u64::MAX,
            (true, tag) => 0..=tag,
            (false, tag) => tag..=tag,
        };
        let overdue = self.overdue.extract_if(tags, |_, _| true).map(|(_, consumer)| consumer);
        let overdue = overdue.collect();
        let before = |unsettled: &mut Deliveries| match multiple {
            true => unsettled.take_before(tag),
            false => Vec::new(),
        };
        (overdue, is_overdue.then(|| before(&mut self.unsettled)))
    }

    /// Takes out all that came from such queues after the one with this tag.
    pub(super) fn take_unsettled_of(
        &mut self,
        after: u64,
        is_of: impl Fn(QueueId) -> bool,
    ) -> Vec<Unsettled> {
        self.unsettled.take_if(after, |one| is_of(one.queue))
    }

    /// What was settled in a transaction is not: it will not be committed.
    pub(super) fn forget_settlements(&mut self) {
        if let Mode::Transaction(transaction) = &mut self.mode {
            let settled = std::mem::take(&mut transaction.settled);
            self.take_back(settled);
        }
    }

    /// Deliveries whose settling was rolled back.
    pub(super) fn take_back(&mut self, settled: Vec<(Vec<Unsettled>, Settlement)>) {
        self.unsettled.put_back(settled.into_iter().flat_map(|(deliveries, _)| deliveries));
    }
}

/// A consumer. One that was cancelled is kept for as long as it has something to settle.
#[derive(Debug)]
pub(crate) struct Consumer {
    pub(super) channel: super::ChannelId,
    pub(super) queue: QueueId,
    pub(super) tag: ShortStr<'static>,
    pub(super) auto_ack: bool,
    /// How many deliveries it may have; 0 is no limit.
    pub(super) prefetch: u16,
    /// How many deliveries count for that. Below 0 if it was cancelled and is there again: then what it settles of before counts
    /// for what it gets.
    pub(super) counted: i64,
    /// How many deliveries it has not settled.
    pub(super) unsettled: usize,
    /// How long it may keep a delivery, in milliseconds.
    pub(super) patience: u64,
    /// How many deliveries were taken away from it that it has not settled since.
    pub(super) overdue: usize,
    /// It could take no more when it was its turn, and is not in line until it can.
    pub(super) suspended: bool,
    pub(super) cancelled: bool,
    /// Of a quorum queue.
    pub(super) quorum: bool,
    /// In which order consumers came.
    pub(super) number: u64,
}

impl Consumer {
    /// Whether it may have one more, as far as its own limit goes: none while it has not settled what was taken away from it.
    /// To a quorum queue, what needs no ack is acked a moment later.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        let limited = self.prefetch > 0 && (self.quorum || !self.auto_ack);
        self.overdue == 0 && (!limited || self.counted < i64::from(self.prefetch))
    }
}
