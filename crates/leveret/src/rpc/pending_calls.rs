//! The pending calls of an RPC channel, by correlation id.
//!
//! ```text
//!           insert              last reply, or a failure             poll
//!  (none) ----------> pending ---------------------------> ended ----------> (none)
//!                        |                                   |
//!                        +-------------- remove -------------+-------------> (none)
//! ```
//!
//! A reply that matches no pending call is late, repeated or forged: it is counted as unmatched.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::task::{Context, Poll, Waker};

use super::correlation::CorrelationId;
use super::reply::{Reply, ReplyPart};
use super::request::{CallFailure, Request};
use crate::amqp::{self, ConfirmTracker};
use crate::error::{Error, ErrorKind};

/// Which replies a call expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyMode {
    /// The last one, which has to be a value.
    One,
    /// All replies of one service up to the last one. At most `buffer` of them wait to be taken.
    Stream { buffer: usize },
    /// Replies of any number of services, until the caller stops. At most `buffer` of them wait to be taken.
    Gather { buffer: usize },
}

/// A reply, or why there is none.
pub(crate) type ReplyResult = Result<Reply, CallFailure>;

/// The pending calls of an RPC channel, and what the broker has not confirmed of their requests.
#[derive(Debug)]
pub(crate) struct PendingCalls {
    calls: HashMap<CorrelationId, PendingCall, BuildHasherDefault<IdHasher>>,
    /// The requests that the present channel has sent and the broker has not confirmed.
    unconfirmed: ConfirmTracker<CorrelationId>,
    /// Identifies the present channel, if there is one: requests are sent on no other, and late answers on an earlier one are ignored.
    epoch: u64,
    /// The calls whose requests are still to be resent.
    lost: VecDeque<CorrelationId>,
    unmatched: u64,
}

#[derive(Debug)]
struct PendingCall {
    mode: ReplyMode,
    waker: Option<Waker>,
    /// The request, if it is resent after a loss.
    request: Option<Box<Request<'static>>>,
    /// The broker has confirmed the request.
    is_confirmed: bool,
    /// Replies that the caller has not taken yet, except for the last one, which needs no allocation.
    replies: VecDeque<ReplyResult>,
    last: Option<ReplyResult>,
    /// The highest number of a reply so far.
    highest: Option<u64>,
    has_ended: bool,
}

/// What a caller gets when it polls.
#[derive(Debug)]
pub(crate) struct CallUpdate {
    /// The next reply; `None` after the last one.
    pub(crate) reply: Option<ReplyResult>,
    /// No reply follows, and the call is removed.
    pub(crate) is_last: bool,
}

impl PendingCalls {
    pub(crate) fn new() -> Self {
        PendingCalls {
            calls: HashMap::default(),
            unconfirmed: ConfirmTracker::new(),
            epoch: 0,
            lost: VecDeque::new(),
            unmatched: 0,
        }
    }

    /// Ends the epoch of the channel before, and gives that of the next one.
    pub(super) fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.unconfirmed = ConfirmTracker::new();
        self.epoch
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Adds a call whose request was just sent. `request` is kept if it is resent after a loss.
    pub(super) fn insert(
        &mut self,
        id: CorrelationId,
        mode: ReplyMode,
        request: Option<Box<Request<'static>>>,
    ) {
        self.unconfirmed.add(id);
        let call = PendingCall {
            mode,
            waker: None,
            request,
            is_confirmed: false,
            replies: VecDeque::new(),
            last: None,
            highest: None,
            has_ended: false,
        };
        self.calls.insert(id, call);
    }

    /// The request of a call was resent. The call may have been removed meanwhile.
    pub(super) fn resent(&mut self, id: CorrelationId) {
        self.unconfirmed.add(id);
        if let Some(call) = self.calls.get_mut(&id) {
            call.is_confirmed = false;
        }
    }

    /// Removes a call. The caller drops what it held once nothing is locked.
    pub(super) fn remove(&mut self, id: CorrelationId) -> Option<impl Sized + use<>> {
        self.calls.remove(&id)
    }

    /// Replies that came before can still be taken; no others are added.
    pub(super) fn stop(&mut self, id: CorrelationId) -> Option<Waker> {
        self.calls.get_mut(&id)?.finish()
    }

    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    pub(super) fn unmatched(&self) -> u64 {
        self.unmatched
    }

    /// From the oldest unconfirmed delivery tag to the next one.
    pub(super) fn unconfirmed_tags(&self) -> Range<u64> {
        self.unconfirmed.tags()
    }

    /// Adds a reply to its call. `false` if no call expects it.
    pub(super) fn receive(
        &mut self,
        id: Option<CorrelationId>,
        reply: Reply,
        wakers: &mut Vec<Waker>,
    ) -> bool {
        let call = id.and_then(|id| self.calls.get_mut(&id)).filter(|call| !call.has_ended);
        match call {
            Some(call) => wakers.extend(call.receive(reply)),
            None => {
                self.unmatched += 1;
                return false;
            }
        }
        true
    }

    /// The next reply of a call. The second value is a waker that is no longer used, to be dropped once nothing is locked.
    #[inline]
    pub(super) fn poll(
        &mut self,
        id: CorrelationId,
        context: &mut Context<'_>,
    ) -> (Poll<CallUpdate>, Option<Waker>) {
        let Entry::Occupied(mut entry) = self.calls.entry(id) else {
            return (Poll::Ready(CallUpdate { reply: None, is_last: true }), None);
        };
        let call = entry.get_mut();
        let reply = call.replies.pop_front().or_else(|| call.last.take());
        if reply.is_none() && !call.has_ended {
            return (Poll::Pending, call.set_waker(context));
        }
        let is_last = call.has_ended && call.replies.is_empty() && call.last.is_none();
        if is_last {
            entry.remove();
        }
        (Poll::Ready(CallUpdate { reply, is_last }), None)
    }

    /// The broker has confirmed or rejected a request, or all up to it.
    pub(super) fn answered(
        &mut self,
        tag: u64,
        multiple: bool,
        acked: bool,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), amqp::Error> {
        let PendingCalls { calls, unconfirmed, .. } = self;
        unconfirmed.answered(tag, multiple, |id| match calls.get_mut(&id) {
            Some(call) if acked => call.is_confirmed = true,
            Some(call) => wakers.extend(call.fail(CallFailure::Nacked)),
            None => {}
        })
    }

    /// Fails one call.
    pub(super) fn fail(&mut self, id: CorrelationId, failure: CallFailure) -> Option<Waker> {
        self.calls.get_mut(&id)?.fail(failure)
    }

    /// Fails all calls.
    pub(super) fn fail_all(&mut self, error: &Error) -> Vec<Waker> {
        let calls = self.calls.values_mut();
        calls.filter_map(|call| call.fail(CallFailure::Lost(call.loss(error)))).collect()
    }

    /// The channel is gone: the broker answers nothing more on it.
    pub(super) fn forget_unconfirmed(&mut self) {
        drop(self.unconfirmed.drain());
    }

    /// The pending calls whose requests are resent after a loss.
    pub(super) fn resendable(&self) -> impl Iterator<Item = CorrelationId> {
        let is_kept = |call: &PendingCall| call.request.is_some() && !call.has_ended;
        self.calls.iter().filter(move |(_, call)| is_kept(call)).map(|(id, _)| *id)
    }

    /// All kept requests are to be resent.
    pub(super) fn mark_lost(&mut self) {
        self.lost = self.resendable().collect();
    }

    /// The next request to resend, with the id of its call, which is still pending.
    pub(super) fn take_lost(&mut self) -> Option<(CorrelationId, Request<'static>)> {
        while let Some(id) = self.lost.pop_front() {
            let call = self.calls.get(&id).filter(|call| !call.has_ended);
            if let Some(request) = call.and_then(|call| call.request.as_deref()) {
                return Some((id, request.clone()));
            }
        }
        None
    }
}

impl PendingCall {
    fn receive(&mut self, reply: Reply) -> Option<Waker> {
        match (self.mode, reply.part()) {
            (ReplyMode::Gather { buffer }, ReplyPart::Error) => {
                self.push(Err(CallFailure::Remote(reply.error())), buffer)
            }
            (_, ReplyPart::Error) => self.fail(CallFailure::Remote(reply.error())),
            (ReplyMode::Gather { .. }, ReplyPart::End) => None,
            (ReplyMode::Gather { buffer }, _) => self.push(Ok(reply), buffer),
            // Progress, which the caller did not ask for.
            (ReplyMode::One, ReplyPart::More(_)) => None,
            (ReplyMode::One, ReplyPart::End) => self.fail(CallFailure::NoValue),
            (_, ReplyPart::Last) => self.end(Ok(reply)),
            (ReplyMode::Stream { .. }, ReplyPart::End) => self.finish(),
            (ReplyMode::Stream { buffer }, ReplyPart::More(number)) => {
                // If the service dies, another instance repeats the replies from the first one on.
                let is_new = number.is_none() || number > self.highest;
                self.highest = self.highest.max(number);
                is_new.then(|| self.push(Ok(reply), buffer)).flatten()
            }
        }
    }

    fn push(&mut self, reply: ReplyResult, buffer: usize) -> Option<Waker> {
        if self.replies.len() >= buffer {
            return self.fail(CallFailure::TooMany(buffer));
        }
        self.replies.push_back(reply);
        self.waker.take()
    }

    fn fail(&mut self, failure: CallFailure) -> Option<Waker> {
        (!self.has_ended).then(|| self.end(Err(failure))).flatten()
    }

    fn end(&mut self, last: ReplyResult) -> Option<Waker> {
        self.last = Some(last);
        self.finish()
    }

    fn finish(&mut self) -> Option<Waker> {
        self.has_ended = true;
        self.request = None;
        self.waker.take()
    }

    /// What the loss of the channel means to this call. If the broker had confirmed its request, the channel was closed for another
    /// one, and a service may have handled this one.
    fn loss(&self, error: &Error) -> Error {
        if !self.is_confirmed || matches!(error.kind(), ErrorKind::Lost | ErrorKind::Closed) {
            return error.clone();
        }
        let text = "the broker had taken the request, and ended the channel for another one";
        Error::caused(ErrorKind::Lost, text, error.clone())
    }

    fn set_waker(&mut self, context: &mut Context<'_>) -> Option<Waker> {
        match &self.waker {
            Some(waker) if waker.will_wake(context.waker()) => None,
            _ => self.waker.replace(context.waker().clone()),
        }
    }
}

/// For keys that are random already.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
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
    use bytes::Bytes;

    use super::*;
    use crate::amqp::{Properties, RawProperties, ShortStr, Table, Value};
    use crate::rpc::reply::{END, ERROR, MORE, NUMBER, PART};

    fn reply_with(id: &[u8], body: &str, pairs: &[(&str, Value<'static>)]) -> Reply {
        let headers =
            (!pairs.is_empty()).then(|| Table::from_pairs(pairs.iter().cloned()).unwrap());
        let correlation_id = Some(ShortStr::from_bytes(id).unwrap());
        let properties = Properties { correlation_id, headers, ..Properties::default() };
        Reply::new(RawProperties::from(&properties), Bytes::copy_from_slice(body.as_bytes()))
    }

    fn reply(id: CorrelationId, body: &str, pairs: &[(&str, Value<'static>)]) -> Reply {
        reply_with(id.to_text().as_short_str().as_bytes(), body, pairs)
    }

    fn more(id: CorrelationId, number: i64) -> Reply {
        reply(id, &number.to_string(), &[(PART, MORE.into()), (NUMBER, number.into())])
    }

    fn end(id: CorrelationId) -> Reply {
        reply(id, "", &[(PART, END.into())])
    }

    fn error(id: CorrelationId) -> Reply {
        reply(id, "no", &[(ERROR, "declined".into())])
    }

    /// What became of a reply: whether it matched a call, and how many callers are woken.
    fn receive(pending: &mut PendingCalls, reply: Reply) -> (bool, usize) {
        let mut wakers = Vec::new();
        let has_matched = pending.receive(reply.correlation_id(), reply, &mut wakers);
        (has_matched, wakers.len())
    }

    const UNMATCHED: (bool, usize) = (false, 0);

    fn insert(pending: &mut PendingCalls, mode: ReplyMode) -> CorrelationId {
        let id = CorrelationId::fresh();
        pending.insert(id, mode, None);
        id
    }

    fn one_call(mode: ReplyMode) -> (PendingCalls, CorrelationId) {
        let mut pending = PendingCalls::new();
        let id = insert(&mut pending, mode);
        (pending, id)
    }

    /// All replies that can be taken now, as text.
    fn taken(pending: &mut PendingCalls, id: CorrelationId) -> Vec<String> {
        let mut context = Context::from_waker(Waker::noop());
        let mut all = Vec::new();
        loop {
            let (Poll::Ready(update), _) = pending.poll(id, &mut context) else { return all };
            assert_eq!(update.is_last, !pending.calls.contains_key(&id));
            all.push(match update.reply {
                None => "end".to_owned(),
                Some(Ok(reply)) => String::from_utf8_lossy(reply.body()).into_owned(),
                Some(Err(failure)) => format!("{:?}", failure.into_error("it").kind()),
            });
            if all.last().is_some_and(|last| last == "end") {
                return all;
            }
        }
    }

    #[test]
    fn a_reply_comes_to_the_call_whose_id_it_has_and_once() {
        let (mut pending, first) = one_call(ReplyMode::One);
        let second = insert(&mut pending, ReplyMode::One);
        assert!(taken(&mut pending, first).is_empty());
        // Only a caller that has polled is woken.
        assert_eq!(receive(&mut pending, reply(second, "2", &[])), (true, 0));
        assert_eq!(receive(&mut pending, reply(first, "1", &[])), (true, 1));
        assert_eq!(receive(&mut pending, reply(first, "1 again", &[])), UNMATCHED);
        assert_eq!(taken(&mut pending, second), ["2", "end"]);
        assert_eq!(taken(&mut pending, first), ["1", "end"]);
        assert_eq!((pending.len(), pending.unmatched()), (0, 1));
    }

    #[test]
    fn late_and_forged_replies_are_unmatched() {
        let (mut pending, id) = one_call(ReplyMode::One);
        let other = CorrelationId(id.0 ^ 1);
        let upper = id.to_text().as_short_str().to_string().to_uppercase();
        for forged in [
            reply(other, "", &[]),
            reply_with(upper.as_bytes(), "", &[]),
            reply_with(b"\xff", "", &[]),
            reply_with(b"", "", &[]),
            Reply::new(RawProperties::default(), Bytes::new()),
        ] {
            assert_eq!(receive(&mut pending, forged), UNMATCHED);
        }
        assert!(taken(&mut pending, id).is_empty());
        pending.remove(id);
        assert_eq!(receive(&mut pending, reply(id, "late", &[])), UNMATCHED);
        assert_eq!((pending.len(), pending.unmatched()), (0, 6));
    }

    /// The replies to a call, and what its caller gets.
    #[test]
    fn a_call_gets_the_replies_of_its_mode() {
        let stream = ReplyMode::Stream { buffer: 10 };
        type Make = fn(CorrelationId) -> Vec<Reply>;
        let cases: &[(ReplyMode, Make, &[&str])] = &[
            // Progress is not what the caller waits for.
            (ReplyMode::One, |id| vec![more(id, 1), end(id)], &["Payload", "end"]),
            (ReplyMode::One, |id| vec![error(id)], &["Remote", "end"]),
            (
                stream,
                // The service died after the second reply, and another instance began again.
                |id| {
                    let numbers = [1, 2, 1, 2, 3].map(|number| more(id, number));
                    numbers.into_iter().chain([reply(id, "last", &[]), more(id, 4)]).collect()
                },
                &["1", "2", "3", "last", "end"],
            ),
            (stream, |id| vec![more(id, 1), end(id)], &["1", "end"]),
            (stream, |id| vec![more(id, 1), error(id)], &["1", "Remote", "end"]),
            (
                stream,
                // Other services may count from 0.
                |id| [0, 1, 0, 1, -1, -1, 7, 2].map(|number| more(id, number)).into(),
                &["0", "1", "-1", "-1", "7"],
            ),
            (
                ReplyMode::Stream { buffer: 2 },
                |id| [1, 2, 3, 4].map(|number| more(id, number)).into(),
                &["1", "2", "Lost", "end"],
            ),
            (
                ReplyMode::Gather { buffer: 10 },
                |id| vec![reply(id, "a", &[]), error(id), end(id), reply(id, "b", &[])],
                &["a", "Remote", "b"],
            ),
        ];
        for (mode, make, expected) in cases {
            let (mut pending, id) = one_call(*mode);
            for reply in make(id) {
                receive(&mut pending, reply);
            }
            assert_eq!(taken(&mut pending, id), *expected, "{mode:?}");
        }
    }

    #[test]
    fn a_call_that_stops_keeps_what_came_before() {
        let (mut pending, id) = one_call(ReplyMode::Gather { buffer: 10 });
        receive(&mut pending, reply(id, "a", &[]));
        pending.stop(id);
        assert_eq!(receive(&mut pending, reply(id, "too late", &[])), UNMATCHED);
        assert_eq!(taken(&mut pending, id), ["a", "end"]);
    }

    #[test]
    fn a_loss_fails_calls_without_a_reply() {
        let (mut pending, waits) = one_call(ReplyMode::One);
        let has_reply = insert(&mut pending, ReplyMode::One);
        receive(&mut pending, reply(has_reply, "came", &[]));
        pending.fail_all(&Error::new(ErrorKind::Lost, "gone"));
        assert_eq!(taken(&mut pending, waits), ["Lost", "end"]);
        assert_eq!(taken(&mut pending, has_reply), ["came", "end"]);
    }

    #[test]
    fn a_request_that_was_confirmed_is_not_the_one_that_closed_the_channel() {
        let (mut pending, confirmed) = one_call(ReplyMode::One);
        let [rejected, unconfirmed] = [(); 2].map(|()| insert(&mut pending, ReplyMode::One));
        let mut wakers = Vec::new();
        pending.answered(1, false, true, &mut wakers).unwrap();
        pending.answered(2, false, false, &mut wakers).unwrap();
        pending.fail_all(&Error::new(ErrorKind::Refused, "closed"));
        assert_eq!(taken(&mut pending, confirmed), ["Lost", "end"]);
        assert_eq!(taken(&mut pending, rejected), ["Nacked", "end"]);
        assert_eq!(taken(&mut pending, unconfirmed), ["Refused", "end"]);
    }

    #[test]
    fn only_pending_requests_are_resent() {
        let mut pending = PendingCalls::new();
        let request = Request {
            exchange: "".into(),
            routing_key: "k".into(),
            properties: Properties::default(),
            body: Bytes::new(),
        };
        let [waits, answered] = [CorrelationId::fresh(), CorrelationId::fresh()];
        for id in [waits, answered] {
            pending.insert(id, ReplyMode::One, Some(Box::new(request.clone())));
        }
        receive(&mut pending, reply(answered, "1", &[]));
        pending.mark_lost();
        assert_eq!(pending.take_lost().map(|(id, _)| id), Some(waits));
        assert!(pending.take_lost().is_none());
        pending.mark_lost();
        pending.remove(waits);
        assert!(pending.take_lost().is_none());
    }
}
