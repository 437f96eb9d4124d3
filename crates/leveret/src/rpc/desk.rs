//! The desk to which replies come: it knows who waits for which.
//!
//! ```text
//!            open          reply, error, refusal, loss, end of patience     taken by who waits
//!  (nobody) -----> waiting ------------------------------> done ------------------------------> (nobody)
//!                     |                                      |
//!                     +-------------- forget ----------------+-----> (nobody)
//! ```
//!
//! What comes for nobody is a stray: late, doubled, or forged.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::correlation::CorrelationId;
use super::reply::{Part, Reply};
use crate::amqp::{Confirmation, Outcome, Properties, Publish, Returned};
use crate::error::{Error, ErrorKind, RemoteError};

/// Which replies somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The last one, which has to be a value.
    One,
    /// All of them, up to the last one, of which so many may wait to be taken.
    Stream { buffer: usize },
    /// Whatever comes from whomever, until the caller has had enough; so many may wait to be taken.
    Gather { buffer: usize },
}

/// Everybody who waits.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    waiting: HashMap<CorrelationId, Waiting, BuildHasherDefault<Random>>,
    /// The calls whose requests are still to be resent.
    lost: VecDeque<CorrelationId>,
    strays: u64,
    /// When to look for who is overdue, and before when not again.
    alarm: Option<Instant>,
    rest: Option<Instant>,
}

/// Those who are overdue are looked for no more often than this; and than this for each who waits, so that where nobody is
/// answered the looking takes a small part of the time.
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);
const BETWEEN_LOOKS_EACH: Duration = Duration::from_micros(1);

/// How long somebody waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) time: Duration,
    pub(crate) end: Instant,
}

/// Somebody who waits.
#[derive(Debug)]
struct Waiting {
    wanted: Wanted,
    waker: Option<Waker>,
    patience: Option<Patience>,
    /// Of the request, if it was sent.
    confirmation: Option<Confirmation>,
    /// The request, if it is to be sent again when it may be lost.
    request: Option<Box<Request>>,
    /// What came and was not taken yet, but for the last.
    came: VecDeque<Answer>,
    last: Option<Answer>,
    /// The highest number of a reply so far.
    number: Option<u64>,
    /// Nothing more comes.
    ended: bool,
}

/// What came for somebody.
pub(crate) type Answer = Result<Reply, Failed>;

/// What somebody is told who waits.
#[derive(Debug)]
pub(crate) struct Told {
    /// The next reply, or `None` when nothing more comes.
    pub(crate) answer: Option<Answer>,
    /// Nothing follows, and the desk knows no more of it.
    pub(crate) is_last: bool,
}

/// Why there is no reply. Who waits knows what it was to be a reply to.
#[derive(Clone, Debug)]
pub(crate) enum Failed {
    /// The service says so.
    Remote(RemoteError),
    /// The broker could not take the request.
    Nacked,
    /// The request reached no queue.
    Returned(Box<Returned>),
    /// The reply was to be a value, and is only an end.
    NoValue,
    /// So many replies were not taken, and there was one more.
    TooMany(usize),
    /// It did not come within this time.
    Late(Duration),
    /// The replies can no longer come, for this reason.
    Lost(Error),
}

impl Failed {
    /// As an error of what was attempted.
    pub(crate) fn into_error(self, what: impl fmt::Display) -> Error {
        match self {
            Failed::Remote(error) => Error::remote_error(what, error),
            Failed::Nacked => {
                let text = format!("{what}: the broker could not take the request");
                Error::new(ErrorKind::Nacked, text)
            }
            Failed::Returned(returned) => unroutable(what, returned),
            Failed::NoValue => {
                Error::new(ErrorKind::Payload, format!("{what}: there is no reply but its end"))
            }
            Failed::TooMany(buffer) => {
                let text = format!("{what}: more than {buffer} replies wait to be taken");
                Error::new(ErrorKind::Lost, text)
            }
            Failed::Late(time) => Error::timed_out(what, time),
            Failed::Lost(error) => Error::caused(error.kind(), what.to_string(), error),
        }
    }
}

fn unroutable(what: impl fmt::Display, returned: Box<Returned>) -> Error {
    let key = &returned.routing_key;
    let text = match &*returned.exchange {
        "" => format!("{what}: there is no queue {key:?}"),
        exchange => format!("{what}: exchange {exchange:?} has no queue for the key {key:?}"),
    };
    Error::unroutable(text, returned)
}

/// A request as it was sent, or is to be; where it is kept, the address of its replies is that of a channel that is gone.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
    pub(crate) mandatory: bool,
    pub(crate) properties: Properties<'static>,
    pub(crate) body: Bytes,
}

impl Request {
    pub(super) fn to_publish(&self) -> Publish<'_> {
        Publish {
            exchange: &self.exchange,
            routing_key: &self.routing_key,
            mandatory: self.mandatory,
            properties: self.properties.clone(),
            body: self.body.clone(),
        }
    }
}

/// What was done with a reply.
#[derive(Debug)]
pub(crate) enum Received {
    /// Somebody has it, and is to be woken.
    Wake(Waker),
    /// Somebody has it, or did not want it and goes on waiting.
    Taken,
    /// Nobody waits for it.
    Stray,
}

impl Desk {
    /// Somebody begins to wait: with the confirmation of the request, if it was sent, and the request, if it is to be sent again
    /// when it may be lost.
    pub(crate) fn open(
        &mut self,
        id: CorrelationId,
        wanted: Wanted,
        confirmation: Option<Confirmation>,
        request: Option<Box<Request>>,
    ) {
        let waiting = Waiting {
            wanted,
            waker: None,
            patience: None,
            confirmation,
            request,
            came: VecDeque::new(),
            last: None,
            number: None,
            ended: false,
        };
        self.waiting.insert(id, waiting);
    }

    /// Who has just begun to wait does so for so long. Says whether the [alarm](Self::alarm) is now sooner than it was.
    #[must_use]
    pub(crate) fn wait_until(&mut self, id: CorrelationId, patience: Patience) -> bool {
        let Some(waiting) = self.waiting.get_mut(&id) else { return false };
        waiting.patience = Some(patience);
        let end = self.rest.map_or(patience.end, |rest| rest.max(patience.end));
        let is_sooner = self.alarm.is_none_or(|alarm| end < alarm);
        if is_sooner {
            self.alarm = Some(end);
        }
        is_sooner
    }

    /// When [`Desk::end_overdue`] has to be called next, as far as is known now.
    pub(crate) fn alarm(&self) -> Option<Instant> {
        self.alarm
    }

    /// Tells those who have waited long enough. The wakers are to be woken when nothing is locked.
    pub(crate) fn end_overdue(&mut self, now: Instant) -> Vec<Waker> {
        let (mut next, mut wakers) = (None, Vec::new());
        for waiting in self.waiting.values_mut().filter(|waiting| !waiting.ended) {
            match waiting.patience {
                Some(Patience { time, end }) if end <= now => {
                    wakers.extend(waiting.end(Err(Failed::Late(time))));
                }
                Some(Patience { end, .. }) => {
                    next = Some(next.map_or(end, |next: Instant| next.min(end)))
                }
                None => {}
            }
        }
        let each = BETWEEN_LOOKS_EACH.saturating_mul(u32::try_from(self.len()).unwrap_or(u32::MAX));
        let rest = now + each.max(BETWEEN_LOOKS);
        self.rest = Some(rest);
        self.alarm = next.map(|next| next.max(rest));
        wakers
    }

    /// The request was sent some time ago. It may have been sent again since.
    pub(crate) fn was_sent(&mut self, id: CorrelationId, confirmation: Confirmation) {
        if let Some(waiting) = self.waiting.get_mut(&id) {
            waiting.confirmation.get_or_insert(confirmation);
        }
    }

    /// Nobody waits for it any longer.
    pub(crate) fn forget(&mut self, id: CorrelationId) -> Option<impl Sized + use<>> {
        self.waiting.remove(&id)
    }

    /// What has come is still taken, and nothing else.
    pub(crate) fn stop(&mut self, id: CorrelationId) {
        if let Some(waiting) = self.waiting.get_mut(&id) {
            waiting.finish();
        }
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// How many replies came for nobody.
    pub(crate) fn strays(&self) -> u64 {
        self.strays
    }

    /// A reply came, to the question with this id.
    pub(crate) fn receive(&mut self, id: Option<CorrelationId>, reply: Reply) -> Received {
        let waiting = id.and_then(|id| self.waiting.get_mut(&id));
        match waiting.filter(|waiting| !waiting.ended) {
            Some(waiting) => waiting.receive(reply),
            None => {
                self.strays += 1;
                Received::Stray
            }
        }
    }

    /// What somebody waits for, as far as it has come. Who is told the last of it is forgotten with that.
    pub(crate) fn poll(&mut self, id: CorrelationId, context: &mut Context<'_>) -> Poll<Told> {
        let Entry::Occupied(mut waiting) = self.waiting.entry(id) else {
            return Poll::Ready(Told { answer: None, is_last: true });
        };
        let answer = ready!(waiting.get_mut().poll(context));
        let is_last = waiting.get().is_over();
        if is_last {
            waiting.remove();
        }
        Poll::Ready(Told { answer, is_last })
    }

    /// Nothing that is under way can be answered any more, and nothing is sent again. The wakers are to be woken when
    /// nothing is locked.
    pub(crate) fn fail_all(&mut self, why: &Error) -> Vec<Waker> {
        let waiting = self.waiting.values_mut().filter(|waiting| !waiting.ended);
        waiting.filter_map(|waiting| waiting.end(Err(Failed::Lost(waiting.why(why))))).collect()
    }

    /// The same for one.
    pub(crate) fn fail(&mut self, id: CorrelationId, why: Error) -> Option<Waker> {
        let waiting = self.waiting.get_mut(&id).filter(|waiting| !waiting.ended)?;
        waiting.end(Err(Failed::Lost(why)))
    }

    /// The pending calls whose requests are resent after a loss.
    pub(crate) fn resendable(&self) -> impl Iterator<Item = CorrelationId> {
        let is_kept = |waiting: &Waiting| waiting.request.is_some() && !waiting.ended;
        self.waiting.iter().filter(move |(_, waiting)| is_kept(waiting)).map(|(id, _)| *id)
    }

    /// The channel is lost: all kept requests are to be resent.
    pub(crate) fn mark_lost(&mut self) {
        self.lost = self.resendable().collect();
    }

    /// The next lost request of a call that is still pending.
    pub(crate) fn take_lost(&mut self) -> Option<(CorrelationId, Request)> {
        while let Some(id) = self.lost.pop_front() {
            let waiting = self.waiting.get(&id).filter(|waiting| !waiting.ended);
            if let Some(request) = waiting.and_then(|waiting| waiting.request.as_deref()) {
                return Some((id, request.clone()));
            }
        }
        None
    }

    /// A request was resent. The caller has to be woken to look at the new confirmation.
    pub(crate) fn resent(
        &mut self,
        id: CorrelationId,
        confirmation: Confirmation,
    ) -> Option<Waker> {
        let waiting = self.waiting.get_mut(&id).filter(|waiting| !waiting.ended)?;
        waiting.confirmation = Some(confirmation);
        waiting.waker.take()
    }
}

impl Waiting {
    fn receive(&mut self, reply: Reply) -> Received {
        let part = reply.part();
        let woken = match (self.wanted, part) {
            (_, Part::Error) => {
                let error = Failed::Remote(reply.error());
                match self.wanted {
                    Wanted::Gather { buffer } => self.push(Err(error), buffer),
                    _ => self.end(Err(error)),
                }
            }
            // Progress, which nobody asked for.
            (Wanted::One, Part::More(_)) => None,
            (Wanted::One, Part::Last) => self.end(Ok(reply)),
            (Wanted::One, Part::End) => self.end(Err(Failed::NoValue)),
            (Wanted::Stream { buffer }, Part::More(number)) => match self.is_new(number) {
                true => self.push(Ok(reply), buffer),
                false => None,
            },
            (Wanted::Stream { .. }, Part::Last) => self.end(Ok(reply)),
            (Wanted::Stream { .. }, Part::End) => self.finish(),
            (Wanted::Gather { .. }, Part::End) => None,
            (Wanted::Gather { buffer }, Part::More(_) | Part::Last) => self.push(Ok(reply), buffer),
        };
        woken.map_or(Received::Taken, Received::Wake)
    }

    /// A service that died in the midst of its replies is begun anew elsewhere, and what it said before is said again.
    fn is_new(&mut self, number: Option<u64>) -> bool {
        let is_new = number.is_none() || number > self.number;
        self.number = self.number.max(number);
        is_new
    }

    fn push(&mut self, answer: Answer, buffer: usize) -> Option<Waker> {
        if self.came.len() >= buffer {
            return self.end(Err(Failed::TooMany(buffer)));
        }
        self.came.push_back(answer);
        self.waker.take()
    }

    fn end(&mut self, last: Answer) -> Option<Waker> {
        self.last = Some(last);
        self.finish()
    }

    /// Why it can no longer be answered. What the broker had taken is not what it closed the channel for: somebody may have
    /// handled it, whatever the other one did.
    fn why(&self, why: &Error) -> Error {
        let outcome = self.confirmation.as_ref().and_then(Confirmation::outcome);
        match (why.kind(), outcome) {
            (ErrorKind::Lost | ErrorKind::Closed, _) => why.clone(),
            (_, Some(Outcome::Acked)) => {
                let text =
                    "the broker had taken the request, and ended the channel for another one";
                Error::caused(ErrorKind::Lost, text, why.clone())
            }
            _ => why.clone(),
        }
    }

    fn finish(&mut self) -> Option<Waker> {
        self.ended = true;
        self.request = None;
        self.confirmation = None;
        self.waker.take()
    }

    /// All that ever comes was taken.
    fn is_over(&self) -> bool {
        self.ended && self.came.is_empty() && self.last.is_none()
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Answer>> {
        if self.came.is_empty() && !self.ended {
            self.look_at_confirmation(context);
        }
        if let Some(came) = self.came.pop_front() {
            return Poll::Ready(Some(came));
        }
        if self.ended {
            return Poll::Ready(self.last.take());
        }
        match &mut self.waker {
            Some(waker) => waker.clone_from(context.waker()),
            None => self.waker = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// A request that the broker could not deliver is not answered.
    fn look_at_confirmation(&mut self, context: &mut Context<'_>) {
        let Some(confirmation) = &self.confirmation else { return };
        let Poll::Ready(outcome) = confirmation.poll_failure(context) else { return };
        self.confirmation = None;
        match outcome {
            // What becomes of it then is decided for all of them.
            Outcome::Acked | Outcome::Lost(_) => {}
            Outcome::Nacked => {
                self.end(Err(Failed::Nacked));
            }
            Outcome::Returned(returned) => {
                self.end(Err(Failed::Returned(returned)));
            }
        }
    }
}

/// For keys that are random already.
#[derive(Default)]
pub(crate) struct Random(u64);

impl Hasher for Random {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    #[inline]
    fn write_u128(&mut self, number: u128) {
        self.0 = (number >> 64) as u64 ^ number as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amqp::{RawProperties, Table, Value};
    use crate::rpc::reply::{END, ERROR, MORE, NUMBER, PART};

    fn reply_with(id: &[u8], body: &str, pairs: &[(&str, Value<'static>)]) -> Reply {
        let headers =
            (!pairs.is_empty()).then(|| Table::from_pairs(pairs.iter().cloned()).unwrap());
        let correlation_id = Some(crate::amqp::ShortStr::from_bytes(id).unwrap());
        let properties = Properties { correlation_id, headers, ..Properties::default() };
        Reply::new(RawProperties::from(&properties), Bytes::copy_from_slice(body.as_bytes()))
    }

    fn reply(id: CorrelationId, body: &str, pairs: &[(&str, Value<'static>)]) -> Reply {
        reply_with(id.to_text().as_short_str().as_bytes(), body, pairs)
    }

    /// To whom the reply says that it belongs.
    fn receive(desk: &mut Desk, reply: Reply) -> Received {
        desk.receive(reply.correlation_id(), reply)
    }

    fn more(id: CorrelationId, number: i64) -> Reply {
        reply(id, &number.to_string(), &[(PART, MORE.into()), (NUMBER, number.into())])
    }

    fn opened(wanted: Wanted) -> (Desk, CorrelationId) {
        let (mut desk, id) = (Desk::default(), CorrelationId::fresh());
        desk.open(id, wanted, None, None);
        (desk, id)
    }

    /// All that can be taken now, as text.
    fn taken(desk: &mut Desk, id: CorrelationId) -> Vec<String> {
        let mut context = Context::from_waker(Waker::noop());
        let mut all = Vec::new();
        loop {
            let Poll::Ready(told) = desk.poll(id, &mut context) else { return all };
            assert_eq!(told.is_last, !desk.waiting.contains_key(&id));
            all.push(match told.answer {
                None => "end".to_owned(),
                Some(Ok(reply)) => String::from_utf8_lossy(reply.body()).into_owned(),
                Some(Err(failed)) => format!("{:?}", failed.into_error("it").kind()),
            });
            if all.last().is_some_and(|last| last == "end") {
                return all;
            }
        }
    }

    #[test]
    fn a_reply_comes_to_the_call_whose_id_it_has_and_once() {
        let (mut desk, first) = opened(Wanted::One);
        let second = CorrelationId::fresh();
        desk.open(second, Wanted::One, None, None);
        assert!(taken(&mut desk, first).is_empty());
        // Whoever waits is woken.
        assert!(matches!(receive(&mut desk, reply(second, "2", &[])), Received::Taken));
        assert!(matches!(receive(&mut desk, reply(first, "1", &[])), Received::Wake(_)));
        assert!(matches!(receive(&mut desk, reply(first, "1 again", &[])), Received::Stray));
        assert_eq!(taken(&mut desk, second), ["2", "end"]);
        assert_eq!(taken(&mut desk, first), ["1", "end"]);
        assert_eq!(desk.strays(), 1);
    }

    #[test]
    fn late_and_forged_replies_are_strays() {
        let (mut desk, id) = opened(Wanted::One);
        let other = CorrelationId(id.0 ^ 1);
        let upper = id.to_text().as_short_str().to_string().to_uppercase();
        for forged in [
            reply(other, "", &[]),
            reply_with(upper.as_bytes(), "", &[]),
            reply_with(b"\xff", "", &[]),
            reply_with(b"", "", &[]),
            Reply::new(RawProperties::default(), Bytes::new()),
        ] {
            assert!(matches!(receive(&mut desk, forged), Received::Stray));
        }
        assert!(taken(&mut desk, id).is_empty());
        desk.forget(id);
        assert!(matches!(receive(&mut desk, reply(id, "late", &[])), Received::Stray));
        assert_eq!((desk.len(), desk.strays()), (0, 6));
    }

    #[test]
    fn one_call_passes_over_progress_and_wants_a_value() {
        let (mut desk, id) = opened(Wanted::One);
        assert!(matches!(receive(&mut desk, more(id, 1)), Received::Taken));
        assert!(taken(&mut desk, id).is_empty());
        receive(&mut desk, reply(id, "", &[(PART, END.into())]));
        assert_eq!(taken(&mut desk, id), ["Payload", "end"]);
        let (mut desk, id) = opened(Wanted::One);
        receive(&mut desk, reply(id, "no", &[(ERROR, "declined".into())]));
        assert_eq!(taken(&mut desk, id), ["Remote", "end"]);
    }

    #[test]
    fn a_stream_has_all_replies_each_once_up_to_the_last() {
        let (mut desk, id) = opened(Wanted::Stream { buffer: 10 });
        // The service died after the second, and another one began anew.
        for number in [1, 2, 1, 2, 3] {
            receive(&mut desk, more(id, number));
        }
        receive(&mut desk, reply(id, "last", &[]));
        assert!(matches!(receive(&mut desk, more(id, 4)), Received::Stray));
        assert_eq!(taken(&mut desk, id), ["1", "2", "3", "last", "end"]);

        let (mut desk, id) = opened(Wanted::Stream { buffer: 10 });
        receive(&mut desk, more(id, 1));
        receive(&mut desk, reply(id, "", &[(PART, END.into())]));
        assert_eq!(taken(&mut desk, id), ["1", "end"]);

        // Others may count from 0.
        let (mut desk, id) = opened(Wanted::Stream { buffer: 10 });
        for number in [0, 1, 0, 1, -1, -1, i64::MAX, 2] {
            receive(&mut desk, more(id, number));
        }
        let highest = i64::MAX.to_string();
        assert_eq!(taken(&mut desk, id), ["0", "1", "-1", "-1", &highest]);

        let (mut desk, id) = opened(Wanted::Stream { buffer: 10 });
        receive(&mut desk, more(id, 1));
        receive(&mut desk, reply(id, "no", &[(ERROR, "x".into())]));
        assert_eq!(taken(&mut desk, id), ["1", "Remote", "end"]);
    }

    #[test]
    fn a_stream_that_nobody_reads_ends_with_an_error() {
        let (mut desk, id) = opened(Wanted::Stream { buffer: 2 });
        for number in 1..=4 {
            receive(&mut desk, more(id, number));
        }
        assert_eq!(taken(&mut desk, id), ["1", "2", "Lost", "end"]);
        assert_eq!(desk.strays(), 1);
    }

    #[test]
    fn who_gathers_hears_everybody_errors_included() {
        let (mut desk, id) = opened(Wanted::Gather { buffer: 10 });
        receive(&mut desk, reply(id, "a", &[]));
        receive(&mut desk, reply(id, "no", &[(ERROR, "x".into())]));
        receive(&mut desk, reply(id, "", &[(PART, END.into())]));
        receive(&mut desk, reply(id, "b", &[]));
        assert_eq!(taken(&mut desk, id), ["a", "Remote", "b"]);
        receive(&mut desk, reply(id, "c", &[]));
        desk.stop(id);
        assert!(matches!(receive(&mut desk, reply(id, "too late", &[])), Received::Stray));
        assert_eq!(taken(&mut desk, id), ["c", "end"]);
    }

    #[test]
    fn a_loss_ends_what_waits_and_leaves_what_has_come() {
        let (mut desk, waits) = opened(Wanted::One);
        let has = CorrelationId::fresh();
        desk.open(has, Wanted::One, None, None);
        receive(&mut desk, reply(has, "came", &[]));
        desk.fail_all(&Error::new(ErrorKind::Lost, "gone"));
        assert_eq!(taken(&mut desk, waits), ["Lost", "end"]);
        assert_eq!(taken(&mut desk, has), ["came", "end"]);
    }

    #[test]
    fn who_waits_too_long_is_told_and_the_alarm_is_for_the_next() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut desk = Desk::default();
        let mut open = |seconds, is_sooner| {
            let (id, time) = (CorrelationId::fresh(), Duration::from_secs(seconds));
            desk.open(id, Wanted::One, None, None);
            assert_eq!(desk.wait_until(id, Patience { time, end: at(seconds) }), is_sooner);
            id
        };
        let [five, nine, three] = [open(5, true), open(9, false), open(3, true)];
        let [answered, patient] = [open(3, false), CorrelationId::fresh()];
        desk.open(patient, Wanted::One, None, None);
        assert!(taken(&mut desk, three).is_empty());
        receive(&mut desk, reply(answered, "in time", &[]));
        assert_eq!(desk.alarm(), Some(at(3)));
        // One of them has asked to be woken.
        assert_eq!(desk.end_overdue(at(3)).len(), 1);
        assert_eq!(taken(&mut desk, three), ["TimedOut", "end"]);
        assert_eq!(taken(&mut desk, answered), ["in time", "end"]);
        assert_eq!(desk.alarm(), Some(at(5)));
        // Who is answered or forgotten is not waited for.
        desk.forget(five);
        assert!(desk.end_overdue(at(5)).is_empty());
        assert_eq!(desk.alarm(), Some(at(9)));
        // Looked for late, and not again at once.
        let soon = open_one(&mut desk, Patience { time: Duration::ZERO, end: at(10) });
        desk.end_overdue(at(10) - Duration::from_micros(1));
        assert_eq!(taken(&mut desk, nine), ["TimedOut", "end"]);
        assert_eq!(desk.alarm(), Some(at(10) - Duration::from_micros(1) + BETWEEN_LOOKS));
        desk.end_overdue(at(11));
        assert_eq!(taken(&mut desk, soon), ["TimedOut", "end"]);
        assert!(desk.alarm().is_none() && taken(&mut desk, patient).is_empty());
        // Where many wait, one looks less often.
        for _ in 1..5_000 {
            open_one(&mut desk, Patience { time: Duration::ZERO, end: at(12) });
        }
        desk.end_overdue(at(12) - Duration::from_micros(1));
        let rest = at(12) + Duration::from_micros(4_999);
        assert_eq!(desk.alarm(), Some(rest));
        // Whoever comes.
        open_one(&mut desk, Patience { time: Duration::ZERO, end: at(12) });
        assert_eq!(desk.alarm(), Some(rest));
    }

    fn open_one(desk: &mut Desk, patience: Patience) -> CorrelationId {
        let id = CorrelationId::fresh();
        desk.open(id, Wanted::One, None, None);
        let _ = desk.wait_until(id, patience);
        id
    }

    #[test]
    fn what_is_sent_again_is_what_somebody_still_waits_for() {
        let mut desk = Desk::default();
        let request = Box::new(Request {
            exchange: String::new(),
            mandatory: true,
            routing_key: "k".to_owned(),
            properties: Properties::default(),
            body: Bytes::new(),
        });
        let [waits, answered] = [CorrelationId::fresh(), CorrelationId::fresh()];
        for id in [waits, answered] {
            desk.open(id, Wanted::One, None, Some(request.clone()));
        }
        receive(&mut desk, reply(answered, "1", &[]));
        desk.mark_lost();
        assert_eq!(desk.take_lost().map(|(id, _)| id), Some(waits));
        assert!(desk.take_lost().is_none());
        desk.mark_lost();
        desk.forget(waits);
        assert!(desk.take_lost().is_none());
    }
}
