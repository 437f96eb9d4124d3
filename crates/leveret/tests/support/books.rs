//! Loss accounting: publishers and consumers at work while everything fails, and the books at the end.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::{
    Backoff, Client, ErrorKind, Incoming, Message, Publisher, Queue, State, Summary, Topology,
};
use leveret_testkit::eventually;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use super::rabbit::Dice;

/// Each has two publishers and two consumers.
const CLIENTS: usize = 4;
const EACH: usize = 2;

/// How many messages of a publisher are under way at once.
const WINDOW: usize = 500;

/// How long a publish may take as a whole: longer than any fault.
const PUBLISH: Duration = Duration::from_secs(120);

/// How long anything may take before it counts as hanging: a publish is given up before.
const HANGS: Duration = Duration::from_secs(180);

/// How long the search for what is missing waits for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a run of the accounts is about.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub messages: usize,
    pub faults: usize,
}

impl Size {
    /// `LEVERET_CHAOS_MESSAGES` messages and 24 faults, or a few.
    pub fn from_environment(few: Size) -> Size {
        match std::env::var("LEVERET_CHAOS_MESSAGES") {
            Ok(text) => Size {
                messages: text.parse().expect("LEVERET_CHAOS_MESSAGES is a number"),
                faults: 24,
            },
            Err(_) => few,
        }
    }
}

/// What became of each message.
#[derive(Debug)]
pub struct Books {
    size: Size,
    queue: Queue,
    /// 0 if it was not, or one more than there had been faults when it was.
    confirmed: Vec<AtomicUsize>,
    /// How often it was delivered.
    seen: Vec<AtomicU32>,
    /// How many faults there were so far.
    faults: AtomicUsize,
    /// Publishes that have their outcome.
    answered: AtomicUsize,
    failed: Mutex<BTreeMap<String, usize>>,
}

/// Publishers and consumers at work.
pub struct Business {
    pub books: Arc<Books>,
    pub clients: Vec<Client>,
    pub publishers: Vec<Publisher>,
    /// Where the first client finds its brokers.
    urls: Vec<String>,
    publishing: JoinSet<()>,
    consuming: Vec<JoinHandle<Result<Summary, leveret::Error>>>,
    stop: watch::Sender<bool>,
    began: Instant,
}

impl Books {
    fn id(incoming: &Incoming) -> usize {
        let properties = incoming.properties();
        let id = properties.message_id.as_ref().and_then(|id| id.to_str().ok());
        id.and_then(|id| id.parse().ok()).expect("a message with a number as its id")
    }

    async fn publish(&self, publisher: &Publisher, first: usize, step: usize) {
        let mut window = VecDeque::new();
        let mut ids = (first..self.size.messages).step_by(step);
        loop {
            let id = ids.next();
            if let Some(id) = id {
                let message = Message::new(vec![b'x'; 100]).message_id(id.to_string());
                let sent = timeout(HANGS, publisher.send(self.queue.name(), message)).await;
                match sent.expect("a publish that hangs") {
                    Ok(ticket) => window.push_back((id, ticket)),
                    Err(error) => self.fail(error.kind()),
                }
            }
            while window.len() > WINDOW || (id.is_none() && !window.is_empty()) {
                let Some((id, ticket)) = window.pop_front() else { break };
                match timeout(HANGS, ticket).await.expect("a ticket that hangs") {
                    Ok(()) => {
                        let faults = self.faults.load(Ordering::SeqCst);
                        self.confirmed[id].store(faults + 1, Ordering::SeqCst);
                        self.answered.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(error) => self.fail(error.kind()),
                }
            }
            if id.is_none() {
                return;
            }
        }
    }

    fn fail(&self, kind: ErrorKind) {
        *self.failed.lock().unwrap().entry(format!("{kind:?}")).or_default() += 1;
        self.answered.fetch_add(1, Ordering::SeqCst);
    }

    /// The messages that are confirmed and were never delivered.
    fn missing(&self) -> Vec<usize> {
        let is_missing =
            |id: &usize| self.is_confirmed(*id) && self.seen[*id].load(Ordering::SeqCst) == 0;
        (0..self.size.messages).filter(is_missing).collect()
    }

    fn is_confirmed(&self, id: usize) -> bool {
        self.confirmed[id].load(Ordering::SeqCst) > 0
    }

    /// How many of these there are of each publisher, and after how many faults they were confirmed.
    fn sorted(&self, missing: &[usize]) -> String {
        let mut publishers = BTreeMap::<usize, usize>::new();
        let mut faults = BTreeMap::<usize, usize>::new();
        for id in missing {
            *publishers.entry(id % (CLIENTS * EACH)).or_default() += 1;
            let before = self.confirmed[*id].load(Ordering::SeqCst) - 1;
            *faults.entry(before).or_default() += 1;
        }
        format!(
            "{} are missing, by publishers {publishers:?}, by the faults before their confirm {faults:?}",
            missing.len()
        )
    }

    /// Consumes until it is told to stop.
    pub async fn consume(
        self: Arc<Books>,
        client: Client,
        mut stop: watch::Receiver<bool>,
    ) -> Result<Summary, leveret::Error> {
        let handler = |incoming: Incoming, State(books): State<Arc<Books>>| async move {
            books.seen[Books::id(&incoming)].fetch_add(1, Ordering::SeqCst);
        };
        let runner = client.consumer(self.queue.name()).subscribers(EACH).workers(4);
        let stopped = async move { stop.wait_for(|stop| *stop).await.map(drop) };
        runner.state(self).handle(handler).run_until(stopped).await
    }
}

impl Business {
    /// Opens, each client with its own list of endpoints.
    pub async fn open(size: Size, queue: Queue, urls: impl Fn(usize) -> Vec<String>) -> Business {
        let books = Arc::new(Books {
            size,
            queue: queue.clone(),
            confirmed: (0..size.messages).map(|_| AtomicUsize::new(0)).collect(),
            seen: (0..size.messages).map(|_| AtomicU32::new(0)).collect(),
            faults: AtomicUsize::new(0),
            answered: AtomicUsize::new(0),
            failed: Mutex::default(),
        });
        let mut business = Business {
            books,
            clients: Vec::new(),
            publishers: Vec::new(),
            urls: urls(0),
            publishing: JoinSet::new(),
            consuming: Vec::new(),
            stop: watch::Sender::new(false),
            began: Instant::now(),
        };
        for number in 0..CLIENTS {
            let client = connect(urls(number)).await;
            client.apply(&Topology::new().queue(queue.clone())).await.unwrap();
            business.hire(client).await;
        }
        business
    }

    async fn hire(&mut self, client: Client) {
        for _ in 0..EACH {
            let publisher = client.publisher("").timeout(PUBLISH).build().await.unwrap();
            let (books, first) = (Arc::clone(&self.books), self.publishers.len());
            self.publishers.push(publisher.clone());
            let publishing = async move { books.publish(&publisher, first, CLIENTS * EACH).await };
            self.publishing.spawn(publishing);
        }
        let consuming = Arc::clone(&self.books).consume(client.clone(), self.stop.subscribe());
        self.consuming.push(tokio::spawn(consuming));
        self.clients.push(client);
    }

    /// Waits until it is time for this fault: they are spread over the messages.
    pub async fn time_for_fault(&self, number: usize) {
        self.time_for(number, self.books.size.faults).await;
    }

    /// Waits until it is time for this event of so many.
    pub async fn time_for(&self, number: usize, events: usize) {
        let due = self.books.size.messages * (number + 1) / (events + 2);
        eventually(HANGS, format!("{due} outcomes"), async || {
            let answered = self.books.answered.load(Ordering::SeqCst);
            if answered >= due { Ok(()) } else { Err(format!("there are {answered}")) }
        })
        .await;
        self.books.faults.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until every publish has its outcome.
    pub async fn all_published(&mut self) {
        while let Some(done) = self.publishing.join_next().await {
            done.unwrap();
        }
        assert_eq!(self.books.answered.load(Ordering::SeqCst), self.books.size.messages);
    }

    /// Where what is missing may be: in the queue, with a consumer that does nothing and gives it back when it is closed, or gone.
    async fn search(&self) -> String {
        let failed = self.books.failed.lock().unwrap().clone();
        let mut found = format!("failed: {failed:?}");
        for (number, client) in self.clients.iter().enumerate() {
            let missing = self.books.sorted(&self.books.missing());
            let queue = timeout(PATIENCE, client.inspect_queue(self.books.queue.name())).await;
            let health = client.health();
            found += &format!(
                "\nwith client {number} and those after it: {missing}; {queue:?}; has its consumer ended: {}; {health:?}",
                self.consuming[number].is_finished(),
            );
            let closed = timeout(PATIENCE, client.close()).await;
            found += &format!("\nclient {number} closed: {closed:?}");
            sleep(Duration::from_secs(2)).await;
        }
        let nobody = connect(self.urls.clone()).await;
        let queue = timeout(PATIENCE, nobody.inspect_queue(self.books.queue.name())).await;
        found + &format!("\nwith no client: {queue:?}")
    }

    /// Waits until everything that was confirmed was consumed, and for health; closes, and prints the books. If something is
    /// missing, `confessions` are what the brokers have to say.
    pub async fn close(mut self, what: &str, faults: &str, confessions: impl Fn() -> String) {
        self.all_published().await;
        let balanced = async {
            while !self.books.missing().is_empty() {
                sleep(Duration::from_millis(50)).await;
            }
        };
        if timeout(HANGS, balanced).await.is_err() {
            let found = self.search().await;
            let said = confessions();
            panic!("not all that was confirmed is consumed; {faults}; {found}\n{said}");
        }
        for client in &self.clients {
            super::client::until_healthy(client).await;
        }
        self.stop.send_replace(true);
        for consumer in self.consuming {
            let summary = timeout(HANGS, consumer).await.expect("a consumer that hangs");
            summary.unwrap().unwrap();
        }
        for client in &self.clients {
            timeout(HANGS, client.close()).await.expect("a client that hangs");
        }
        let count = |list: &[AtomicU32], more_than: u32| {
            list.iter().filter(|seen| seen.load(Ordering::SeqCst) > more_than).count()
        };
        let deliveries: u32 = self.books.seen.iter().map(|seen| seen.load(Ordering::SeqCst)).sum();
        let consumed = count(&self.books.seen, 0);
        let confirmed =
            (0..self.books.size.messages).filter(|id| self.books.is_confirmed(*id)).count();
        println!(
            "{what}: {} published, {confirmed} confirmed, failed {:?}, {consumed} consumed, {} duplicates (of {} \
             messages), {} lost, in {:.0?}; {faults}",
            self.books.size.messages,
            self.books.failed.lock().unwrap(),
            deliveries as usize - consumed,
            count(&self.books.seen, 1),
            self.books.missing().len(),
            self.began.elapsed(),
        );
        assert!(confirmed > 0);
    }
}

async fn connect(urls: Vec<String>) -> Client {
    let backoff = Backoff { max: Duration::from_secs(1), ..Backoff::default() };
    let builder = Client::builder().endpoint(urls).unwrap().backoff(backoff);
    builder.connect().await.unwrap()
}

/// The kinds of faults that there are, each once and then at random.
pub fn dealt<F: Copy>(kinds: &[F], count: usize, dice: &mut Dice) -> Vec<F> {
    let mut dealt: Vec<F> = (0..count)
        .map(|number| match kinds.get(number) {
            Some(kind) => *kind,
            None => kinds[dice.below(kinds.len())],
        })
        .collect();
    for last in (1..dealt.len()).rev() {
        dealt.swap(last, dice.below(last + 1));
    }
    dealt
}
