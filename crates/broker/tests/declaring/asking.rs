//! Asks a broker, over TCP, and writes down what it answers.

use std::collections::HashMap;
use std::time::Duration;

use leveret::amqp::{Auth, Options};
use leveret_testkit::peer::{Peer, Received};
use leveret_wire::method::{basic, channel, connection, exchange, queue};
use leveret_wire::{Method, Properties, ReplyCode, Scope, ShortStr};

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::requests::{Asker, Step, steps};
use super::table::{Answer, recorded};
/// How long a broker may take to let go of what a closed connection had.
const SOON: Duration = Duration::from_secs(60);

/// A broker, and the connections to it.
pub(crate) struct Broker {
    options: Options,
    first: Option<Peer>,
    other: Option<Peer>,
}

impl Broker {
    /// The broker at a URL. Nothing else should use the virtual host.
    pub(crate) fn at(url: &str) -> Broker {
        let options = Options::from_uri(url).unwrap_or_else(|error| panic!("{url:?}: {error}"));
        Broker { options, first: None, other: None }
    }

    /// Asks all cases, and says where the answers differ from those that RabbitMQ of this version (`3.10` or `4.3`) gives.
    ///
    /// # Panics
    /// If RabbitMQ was not asked.
    pub(crate) async fn differences(&mut self, version: &str, cases: Vec<String>) -> Vec<String> {
        let recorded: HashMap<_, _> = recorded(version).into_iter().collect();
        let mut differences = Vec::new();
        for case in cases {
            let expected = recorded.get(&*case).unwrap_or_else(|| panic!("{case}: not recorded"));
            let expected = expected.clone().in_virtual_host(&self.options.virtual_host);
            let mut answer = self.answer(&case).await;
            if answer != expected && case.contains("x-expires=") {
                // RabbitMQ may stumble over a queue that expires while it is being made.
                answer = self.answer(&case).await;
            }
            if answer != expected {
                let both = format!("    RabbitMQ: {expected}\n    answer:   {answer}");
                differences.push(format!("{case}\n{both}"));
            }
        }
        differences
    }

    /// What a case is answered: the first refusal, or else what the last step was answered. Nothing of the case is left
    /// behind.
    pub(crate) async fn answer(&mut self, case: &str) -> Answer {
        let steps = steps(case);
        let mut open = Vec::new();
        let mut answer = Answer::Ok(None);
        for step in &steps {
            answer = self.ask(step, &mut open).await;
            if matches!(answer, Answer::Refused { .. }) {
                break;
            }
        }
        self.clean_up(&steps, &open).await;
        answer
    }

    async fn ask(&mut self, step: &Step, open: &mut Vec<Asker>) -> Answer {
        let channel = if step.asker == Asker::SecondChannel { 2 } else { 1 };
        let side = match step.asker {
            Asker::OtherConnection => &mut self.other,
            Asker::First | Asker::SecondChannel => &mut self.first,
        };
        let mut peer = match side.take() {
            Some(peer) => peer,
            None => connect(&self.options).await,
        };
        if !open.contains(&step.asker) {
            open.push(step.asker);
            peer.send(channel, &channel::Open {}).await;
            peer.expect::<channel::OpenOk>(channel).await;
        }
        send(&mut peer, channel, &step.method).await;
        let answer = answer(&mut peer, channel, &step.method).await;
        match answer {
            Answer::Refused { scope: Scope::Connection, .. } => return answer,
            Answer::Refused { scope: Scope::Channel, .. } => open.retain(|one| *one != step.asker),
            Answer::Ok(_) => {}
        }
        *side = Some(peer);
        answer
    }

    /// Closes the channels, and deletes what was declared.
    async fn clean_up(&mut self, steps: &[Step], open: &[Asker]) {
        self.other = None;
        if let Some(peer) = &mut self.first {
            for asker in open.iter().filter(|asker| **asker != Asker::OtherConnection) {
                close_channel(peer, if *asker == Asker::First { 1 } else { 2 }).await;
            }
        }
        for Step { method, .. } in steps {
            let delete = match method {
                Method::QueueDeclare(declare) if !declare.queue.is_empty() => {
                    let queue = declare.queue.clone();
                    Method::QueueDelete(queue::Delete { queue, ..Default::default() })
                }
                Method::ExchangeDeclare(declare) => {
                    let exchange = declare.exchange.clone();
                    Method::ExchangeDelete(exchange::Delete { exchange, ..Default::default() })
                }
                _ => continue,
            };
            let step = Step { asker: Asker::First, method: delete };
            timeout(SOON, self.delete(&step)).await.expect("what a case declared can be deleted");
        }
    }

    /// Deletes what can be deleted. An exclusive queue goes some time after its connection, not with it.
    async fn delete(&mut self, step: &Step) {
        loop {
            let mut open = Vec::new();
            let answer = self.ask(step, &mut open).await;
            if let ([Asker::First], Some(peer)) = (&*open, &mut self.first) {
                close_channel(peer, 1).await;
            }
            if !matches!(answer, Answer::Refused { code: ReplyCode::RESOURCE_LOCKED, .. }) {
                return;
            }
        }
    }
}

async fn connect(options: &Options) -> Peer {
    let Auth::Plain { user, password } = &options.auth else { panic!("a user and a password") };
    let stream = TcpStream::connect(options.address()).await.expect("a broker listens there");
    // Small writes follow each other; held together they would take 40 ms each.
    stream.set_nodelay(true).expect("a socket takes options");
    let mut peer = Peer::over(stream);
    peer.open_connection(&options.virtual_host, user, password.expose()).await;
    peer
}

async fn close_channel(peer: &mut Peer, channel: u16) {
    peer.send(channel, &channel::Close::default()).await;
    loop {
        match peer.receive().await {
            Received::Method(on, Method::ChannelCloseOk(_)) if on == channel => return,
            Received::End => panic!("the connection ended"),
            _ => {}
        }
    }
}

async fn send(peer: &mut Peer, channel: u16, method: &Method<'static>) {
    match method {
        Method::BasicPublish(publish) => {
            peer.send_content(channel, publish, &Properties::default(), "hello").await;
            // Nothing answers a publish; what follows it is answered, unless it was refused.
            peer.send(channel, &basic::Qos::default()).await;
        }
        method => peer.send(channel, method).await,
    }
}

async fn answer(peer: &mut Peer, channel: u16, asked: &Method<'static>) -> Answer {
    loop {
        match peer.receive().await {
            Received::Method(on, Method::ChannelClose(close)) if on == channel => {
                peer.send(channel, &channel::CloseOk {}).await;
                let text = close.reply_text.as_bytes();
                return Answer::refused(Scope::Channel, close.reply_code, text);
            }
            Received::Method(0, Method::ConnectionClose(close)) => {
                peer.send(0, &connection::CloseOk {}).await;
                let text = close.reply_text.as_bytes();
                return Answer::refused(Scope::Connection, close.reply_code, text);
            }
            Received::Method(on, Method::QueueDeclareOk(declared)) if on == channel => {
                return Answer::Ok(other_name(asked, &declared.queue));
            }
            // A consumer is told that its queue is gone; the answer is still to come.
            Received::Method(_, Method::BasicCancel(_)) => {}
            Received::Method(on, _) if on == channel => return Answer::Ok(None),
            Received::Content(_, content) if matches!(content.method, Method::BasicGetOk(_)) => {
                return Answer::Ok(None);
            }
            Received::End => panic!("the connection ended without a word, after {}", asked.name()),
            _ => {}
        }
    }
}

/// The name of a queue, if it is not the one that was asked for; of one that the broker chose, as much as is known.
fn other_name(asked: &Method<'_>, name: &ShortStr<'_>) -> Option<String> {
    const CHOSEN: &str = "amq.gen-";
    match asked {
        Method::QueueDeclare(declare) if declare.queue != *name => {
            let name = name.to_string();
            Some(if name.starts_with(CHOSEN) { CHOSEN.to_owned() } else { name })
        }
        _ => None,
    }
}
