//! The acks of a walk, and which of them the broker has taken.
//!
//! RabbitMQ tells a quorum queue of 32 acks at once. Further ones its channel holds back until the queue has caught up, and forgets them
//! if it is closed before: the messages come again, though they were acked. So acks wait here for others, to be told as one.
//!
//! ```text
//!  let go --> waiting --ack--> recent --answer--> taken for sure
//!                                 |
//!                                 +--answer, after many acks--> older --answer--> taken for sure
//! ```
//!
//! Whoever has an answer to a later call knows that the acks before it were taken; and after more acks than the queue is told of
//! at once, whoever has two.

use super::walk::{Place, Taken};

/// So many acks wait for others at most.
const TOGETHER: usize = 64;
/// So many acks a quorum queue is told of at once.
const AT_ONCE: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Acks {
    waiting: Vec<Waiting>,
    sent: u64,
    /// How many were at the last answer.
    sent_before: u64,
    for_sure: u64,
    /// How many acks were sent since the last answer, each for one or many messages.
    frames: usize,
    recent: Vec<Taken>,
    older: Vec<Taken>,
}

#[derive(Debug)]
struct Waiting {
    place: Place,
    /// What is out for good: if the ack does not arrive, it will be wanted to know which it was.
    taken: Option<Taken>,
}

impl Acks {
    /// This one is to be acked: it is in the queue as a new message.
    pub(super) fn add(&mut self, place: Place) {
        self.waiting.push(Waiting { place, taken: None });
    }

    /// The same, since it leaves the queue for good.
    pub(super) fn add_for_good(&mut self, taken: Taken) {
        self.waiting.push(Waiting { place: taken.place, taken: Some(taken) });
    }

    /// Whether so many wait that they should be sent.
    pub(super) fn are_many(&self) -> bool {
        self.waiting.len() >= TOGETHER
    }

    /// Those that wait, in order, to be sent now.
    pub(super) fn take(&mut self) -> Vec<Place> {
        self.waiting.sort_by_key(|waiting| waiting.place);
        self.sent += self.waiting.len() as u64;
        let (mut places, recent) = (Vec::new(), &mut self.recent);
        for Waiting { place, taken } in self.waiting.drain(..) {
            places.push(place);
            recent.extend(taken);
        }
        places
    }

    /// They went out as so many acks.
    pub(super) fn went_out_as(&mut self, frames: usize) {
        self.frames += frames;
    }

    /// The broker has answered to what came after them.
    pub(super) fn are_answered(&mut self) {
        let all = self.frames < AT_ONCE;
        self.for_sure = if all { self.sent } else { self.sent_before };
        self.sent_before = self.sent;
        self.frames = 0;
        let recent = std::mem::take(&mut self.recent);
        self.older = if all { Vec::new() } else { recent };
    }

    /// Which messages are out only if their acks arrive.
    pub(super) fn doubtful(&mut self) -> Vec<Taken> {
        let mut doubtful = std::mem::take(&mut self.older);
        doubtful.append(&mut self.recent);
        doubtful.extend(self.waiting.iter_mut().filter_map(|waiting| waiting.taken.take()));
        doubtful
    }

    /// Whether the broker has taken for sure all that were sent.
    pub(super) fn are_for_sure(&self) -> bool {
        self.for_sure == self.sent
    }

    /// How many there are, and how many of them the broker has taken for sure.
    pub(super) fn count(&self) -> (u64, u64) {
        (self.sent + self.waiting.len() as u64, self.for_sure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many more, sent as so many acks.
    fn send(acks: &mut Acks, messages: u64, frames: usize) {
        let (sent, _) = acks.count();
        for tag in (sent + 1..=sent + messages).rev() {
            acks.add(Place { page: 0, tag });
        }
        let places = acks.take();
        assert!(places.is_sorted());
        assert_eq!(places.len() as u64, messages);
        acks.went_out_as(frames);
    }

    #[test]
    fn an_answer_tells_of_acks_that_were_sent_and_not_of_those_that_wait() {
        let mut acks = Acks::default();
        acks.add(Place { page: 0, tag: 1 });
        acks.are_answered();
        assert_eq!(acks.count(), (1, 0));
        assert_eq!(acks.take().len(), 1);
        acks.went_out_as(1);
        acks.are_answered();
        assert_eq!(acks.count(), (1, 1));
    }

    #[test]
    fn after_more_acks_than_a_quorum_queue_is_told_of_at_once_it_takes_two_answers() {
        let mut acks = Acks::default();
        send(&mut acks, 1000, 1);
        acks.are_answered();
        assert_eq!(acks.count(), (1000, 1000), "they were one ack");
        send(&mut acks, 40, 40);
        acks.are_answered();
        assert_eq!(acks.count(), (1040, 1000));
        send(&mut acks, 50, 50);
        acks.are_answered();
        assert_eq!(acks.count(), (1090, 1040));
        acks.are_answered();
        assert_eq!(acks.count(), (1090, 1090));
    }

    #[test]
    fn many_wait_for_each_other_and_no_more() {
        let mut acks = Acks::default();
        for tag in 1..TOGETHER as u64 {
            acks.add(Place { page: 0, tag });
            assert!(!acks.are_many());
        }
        acks.add(Place { page: 0, tag: TOGETHER as u64 });
        assert!(acks.are_many());
        acks.take();
        assert!(!acks.are_many());
    }
}
