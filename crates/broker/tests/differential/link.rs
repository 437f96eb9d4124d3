//! One connection of a run: what it sent, what came, and what its channels hold.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use bytes::{Buf, Bytes};
use leveret_testkit::peer::{Peer, Received};
use leveret_wire::method::{CarriesContent, Encode, channel, connection};
use leveret_wire::{Content, FrameMax, Method, Outbound, Properties};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::show::{bare, show_body, show_properties};

/// How long a broker may take for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Channels from here on are the harness's own, and not the program's.
pub(super) const HIDDEN: u16 = 100;

pub(super) struct Link {
    peer: Peer,
    outbound: Outbound,
    pub(super) open: bool,
    /// The program's channels that are open.
    pub(super) channels: BTreeMap<u16, Channel>,
    /// The harness's channels that are open, or being opened.
    pub(super) hidden: BTreeSet<u16>,
    /// Answers that are due, by channel.
    due: BTreeMap<u16, usize>,
    /// What came and was not looked at yet.
    pub(super) events: Vec<(u16, Event)>,
    /// Where the newest delivery wants its answer.
    pub(super) reply_to: Option<String>,
}

/// What a program's channel knows.
#[derive(Default)]
pub(super) struct Channel {
    pub(super) mode: Mode,
    published: u64,
    unconfirmed: BTreeSet<u64>,
    /// Deliveries to be settled, by tag.
    pub(super) held: BTreeMap<u64, Origin>,
    /// Settled in a transaction that is not committed.
    pub(super) uncommitted: BTreeMap<u64, Origin>,
    pub(super) settled: Vec<u64>,
    consumers: HashMap<String, Consumer>,
    /// Whether what was asked for last needs no ack.
    asked_no_ack: bool,
}

/// Where a delivery came from. Deliveries are chosen in this order, since the order of their tags is not always the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Origin {
    pub(super) step: usize,
    /// The number of the consumer on the channel; 0 = a get.
    consumer: usize,
}

struct Consumer {
    /// From 1, in the order of consuming.
    number: usize,
    no_ack: bool,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Mode {
    #[default]
    Plain,
    Confirm,
    Tx,
}

/// What came on a channel.
pub(super) enum Event {
    Reply(Method<'static>),
    /// A message that was asked for or came back.
    Content(String),
    Delivery {
        consumer: String,
        tag: u64,
        text: String,
    },
    Confirm {
        tag: u64,
        outcome: &'static str,
    },
    /// Something that no broker should do.
    Odd(String),
}

impl Event {
    /// Whether a channel or connection ended.
    pub(super) fn is_close(&self) -> bool {
        let Event::Reply(method) = self else { return false };
        matches!(method, Method::ChannelClose(_) | Method::ConnectionClose(_))
    }
}

impl Link {
    pub(super) async fn open(address: &str, vhost: &str, user: &str) -> Link {
        let stream = TcpStream::connect(address)
            .await
            .unwrap_or_else(|error| panic!("no broker at {address}: {error}"));
        stream.set_nodelay(true).expect("a socket that takes options");
        let mut peer = Peer::over(stream);
        // Their names are their passwords.
        peer.open_connection(vhost, user, user).await;
        Link {
            peer,
            outbound: Outbound::new(),
            open: true,
            channels: BTreeMap::new(),
            hidden: BTreeSet::new(),
            due: BTreeMap::new(),
            events: Vec::new(),
            reply_to: None,
        }
    }

    /// Puts a method to what is sent next.
    pub(super) fn put(&mut self, channel: u16, method: &impl Encode) {
        self.outbound.method(channel, method, FrameMax::DEFAULT).expect("a small method");
    }

    pub(super) fn put_content(
        &mut self,
        channel: u16,
        method: &impl CarriesContent,
        properties: &Properties<'_>,
        body: String,
    ) {
        let body = Bytes::from(body);
        let put = self.outbound.content(channel, method, properties, &body, FrameMax::DEFAULT);
        put.expect("a small message");
        if let Some(channel) = self.channels.get_mut(&channel)
            && channel.mode == Mode::Confirm
        {
            channel.published += 1;
            channel.unconfirmed.insert(channel.published);
        }
    }

    /// Puts a method to which an answer is due.
    pub(super) fn ask(&mut self, channel: u16, method: &impl Encode) {
        self.put(channel, method);
        *self.due.entry(channel).or_default() += 1;
    }

    /// Opens one of the program's channels, unless it is open.
    pub(super) async fn open_channel(&mut self, number: u16, step: usize) {
        if let Entry::Vacant(free) = self.channels.entry(number) {
            free.insert(Channel::default());
            self.ask(number, &channel::Open {});
            self.exchange(step).await;
        }
    }

    /// Asks the program's channels for a sign of life, which comes after all that the broker had to say on them.
    pub(super) fn ping(&mut self) {
        let channels: Vec<u16> = self.channels.keys().copied().collect();
        for number in channels {
            self.ask(number, &channel::Flow { active: true });
        }
    }

    pub(super) async fn send(&mut self) {
        let bytes = self.outbound.copy_to_bytes(self.outbound.remaining());
        if self.open && !bytes.is_empty() {
            self.peer.send_bytes(&bytes).await;
        }
    }

    /// Sends what was put, and reads until every answer that is due has come. What came is in `events`.
    pub(super) async fn exchange(&mut self, step: usize) {
        self.send().await;
        while self.open && self.due.values().any(|due| *due > 0) {
            self.read(step).await;
        }
    }

    /// Reads until every publish on confirm channels has its outcome.
    pub(super) async fn await_confirms(&mut self, step: usize) {
        self.send().await;
        while self.open && self.channels.values().any(|channel| !channel.unconfirmed.is_empty()) {
            self.read(step).await;
        }
    }

    /// Ends without a word.
    pub(super) fn cut(self) {
        self.peer.reset();
    }

    async fn read(&mut self, step: usize) {
        let received = match timeout(PATIENCE, self.peer.receive()).await {
            Ok(received) => received,
            Err(_) => {
                let due: Vec<_> = self.due.iter().filter(|(_, due)| **due > 0).collect();
                self.events.push((0, Event::Odd(format!("no answer for {PATIENCE:?}: {due:?}"))));
                self.open = false;
                return;
            }
        };
        match received {
            Received::Heartbeat => {}
            Received::End => {
                self.events
                    .push((0, Event::Odd("the connection ended without a close".to_owned())));
                self.open = false;
            }
            Received::Method(number, method) => self.take_method(number, method).await,
            Received::Content(number, content) => self.take_content(number, *content, step),
        }
    }

    async fn take_method(&mut self, number: u16, method: Method<'static>) {
        match &method {
            Method::ConnectionClose(_) => {
                self.put(0, &connection::CloseOk {});
                self.send().await;
                self.open = false;
                // The broker has done what the end of a connection brings when it hangs up.
                let _ = timeout(PATIENCE, self.peer.expect_end()).await;
            }
            Method::ConnectionCloseOk(_) => self.open = false,
            Method::ChannelClose(_) => {
                self.put(number, &channel::CloseOk {});
                self.send().await;
                self.forget(number);
            }
            Method::ChannelCloseOk(_) => self.forget(number),
            Method::ChannelOpenOk(_) => return self.answered(number),
            Method::ChannelFlowOk(_) => return self.answered(number),
            Method::TxCommitOk(_) => self.answered(number),
            _ if number >= HIDDEN => self.answered(number),
            _ => {}
        }
        if let Some(channel) = self.channels.get_mut(&number)
            && let Some(confirms) = channel.take(&method)
        {
            self.events.extend(confirms.into_iter().map(|event| (number, event)));
            return;
        }
        self.events.push((number, Event::Reply(method)));
    }

    fn take_content(&mut self, number: u16, content: Content<Method<'static>>, step: usize) {
        let Content { method, properties, body } = content;
        let properties = properties.get();
        if let Some(reply_to) = &properties.reply_to {
            self.reply_to = Some(reply_to.to_string());
        }
        let message = format!("{} {}", show_properties(&properties), show_body(&body));
        if number >= HIDDEN {
            self.answered(number);
            self.events.push((number, Event::Content(format!("{} {message}", bare(&method)))));
            return;
        }
        let channel = self.channels.entry(number).or_default();
        let event = match method {
            Method::BasicDeliver(deliver) => {
                let consumer = deliver.consumer_tag.to_string();
                let odd = match channel.consumers.get(&consumer) {
                    Some(Consumer { no_ack: true, .. }) => "",
                    Some(Consumer { number, .. }) => {
                        let origin = Origin { step, consumer: *number };
                        channel.held.insert(deliver.delivery_tag, origin);
                        ""
                    }
                    None => " to a consumer that is not there",
                };
                let (key, exchange) = (&deliver.routing_key, &deliver.exchange);
                let text = format!(
                    "{}delivery{odd} from {exchange:?} with {key:?} {message}",
                    if deliver.redelivered { "re" } else { "" }
                );
                Event::Delivery { consumer, tag: deliver.delivery_tag, text }
            }
            method => {
                if let Method::BasicGetOk(got) = &method
                    && !channel.asked_no_ack
                {
                    channel.held.insert(got.delivery_tag, Origin { step, consumer: 0 });
                }
                Event::Content(format!("{} {message}", bare(&method)))
            }
        };
        self.events.push((number, event));
    }

    fn answered(&mut self, number: u16) {
        if let Some(due) = self.due.get_mut(&number) {
            *due = due.saturating_sub(1);
        }
    }

    fn forget(&mut self, number: u16) {
        self.channels.remove(&number);
        self.hidden.remove(&number);
        self.due.remove(&number);
    }
}

impl Channel {
    /// Notes what is about to be sent.
    pub(super) fn note(&mut self, method: &Method<'_>) {
        match method {
            Method::BasicConsume(consume) => {
                self.asked_no_ack = consume.no_ack;
                if consume.nowait {
                    self.add_consumer(consume.consumer_tag.to_string());
                }
            }
            Method::BasicGet(get) => self.asked_no_ack = get.no_ack,
            Method::BasicRecover(_) | Method::BasicRecoverAsync(_) => self.held.clear(),
            Method::ConfirmSelect(select) if select.nowait && self.mode == Mode::Plain => {
                self.mode = Mode::Confirm;
            }
            _ => {}
        }
    }

    /// Notes what came. Confirms are the only methods that are events of another kind than replies.
    fn take(&mut self, method: &Method<'_>) -> Option<Vec<Event>> {
        match method {
            Method::BasicConsumeOk(ok) => {
                self.add_consumer(ok.consumer_tag.to_string());
            }
            Method::ConfirmSelectOk(_) => self.mode = Mode::Confirm,
            Method::TxSelectOk(_) => self.mode = Mode::Tx,
            Method::TxCommitOk(_) => {
                self.settled.extend(std::mem::take(&mut self.uncommitted).into_keys());
            }
            Method::TxRollbackOk(_) => {
                let mut back = std::mem::take(&mut self.uncommitted);
                self.held.append(&mut back);
            }
            Method::BasicAck(ack) => {
                return Some(self.confirm(ack.delivery_tag, ack.multiple, "ack"));
            }
            Method::BasicNack(nack) => {
                return Some(self.confirm(nack.delivery_tag, nack.multiple, "nack"));
            }
            _ => {}
        }
        None
    }

    fn add_consumer(&mut self, tag: String) {
        let number = self.consumers.len() + 1;
        self.consumers.insert(tag, Consumer { number, no_ack: self.asked_no_ack });
    }

    /// The tag of one of the deliveries that the channel holds. A multiple settlement goes up to the end of the step that
    /// brought it: within a step, queues may have delivered in any order.
    pub(super) fn held_tag(&self, n: usize, multiple: bool) -> Option<u64> {
        let mut held: Vec<(Origin, u64)> =
            self.held.iter().map(|(tag, origin)| (*origin, *tag)).collect();
        held.sort();
        let (origin, tag) = *held.get(n % held.len().max(1))?;
        if !multiple {
            return Some(tag);
        }
        held.iter().filter(|(of, _)| of.step == origin.step).map(|(_, tag)| *tag).max()
    }

    fn confirm(&mut self, tag: u64, multiple: bool, outcome: &'static str) -> Vec<Event> {
        let first = if multiple { 0 } else { tag };
        let tags: Vec<u64> = self.unconfirmed.range(first..=tag).copied().collect();
        if tags.is_empty() {
            return vec![Event::Odd(format!("{outcome} for {tag}, which nobody awaits"))];
        }
        self.unconfirmed.retain(|unconfirmed| !tags.contains(unconfirmed));
        tags.into_iter().map(|tag| Event::Confirm { tag, outcome }).collect()
    }
}
