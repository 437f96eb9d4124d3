//! `topology migrate`: other arguments for a queue that is in use, and being killed at every step.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::{Binding, Client, ErrorKind, Exchange, Message, Queue, QueueType, Topology};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{self, Management};
use serde_json::Value;
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::support::{Killed, Place, Said};

const PATIENCE: Duration = Duration::from_secs(60);

/// A broker with its management API, and a file that wants the queue otherwise.
struct Site {
    place: Place,
    management: Management,
    folder: TempDir,
}

impl Site {
    async fn new(file: &str) -> Site {
        let management = rabbitmq::shared().await.management().clone();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("topology.toml"), file).unwrap();
        Site { place: Place::new().await, management, folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("topology.toml")
    }

    fn program(&self, options: &[&str]) -> Command {
        let file = self.file();
        let arguments = ["topology", "migrate", file.to_str().unwrap(), "billing"];
        let mut command = self.place.program(&[&arguments, options].concat());
        command.env("LEVERET_MANAGEMENT_URL", self.management.url());
        command
    }

    fn migrate(&self, options: &[&str]) -> Said {
        self.program(options).output().expect("the program runs").into()
    }

    fn vhost(&self) -> String {
        self.place.url().rsplit('/').next().unwrap().to_owned()
    }

    async fn ask(&self, path: &[&str]) -> Value {
        self.management.get(path).await.unwrap()
    }

    /// What leads to the queue, but for the default exchange.
    async fn bindings(&self) -> Vec<String> {
        let told = |bound: &Value| {
            format!("{} {} {}", bound["source"], bound["routing_key"], bound["arguments"])
        };
        let all = self.ask(&["queues", &self.vhost(), "billing", "bindings"]).await;
        let mut bindings: Vec<String> = all
            .as_array()
            .unwrap()
            .iter()
            .filter(|bound| bound["source"] != "")
            .map(told)
            .collect();
        bindings.sort();
        bindings
    }

    /// Nothing of the migration is left.
    async fn assert_clean(&self) {
        for kind in ["queues", "exchanges"] {
            let all = self.ask(&[kind, &self.vhost()]).await;
            let names: Vec<_> =
                all.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
            assert!(
                names.iter().all(|name| !name.contains("leveret-migrate")),
                "{kind}: {names:?}"
            );
        }
    }

    async fn queue_type(&self) -> String {
        let queue = self.ask(&["queues", &self.vhost(), "billing"]).await;
        queue["type"].as_str().unwrap().to_owned()
    }
}

const QUORUM: &str = "[[queue]]\nname = \"billing\"\ntype = \"quorum\"\n";
const CLASSIC: &str = "[[queue]]\nname = \"billing\"\ntype = \"classic\"\nmessage-ttl = \"4h\"\n";

/// The queue of this type, with bindings of every sort.
fn topology(queue_type: QueueType) -> Topology {
    let queue = Queue::new("billing")
        .of_type(queue_type)
        .bind("orders", "order.#")
        .bind("orders", "a b/c~%2F");
    let by_headers = Binding::to_queue("billing", "by-headers", "")
        .argument("x-match", "any")
        .argument("number", 5);
    Topology::new()
        .exchange(Exchange::topic("orders"))
        .exchange(Exchange::headers("by-headers"))
        .queue(queue)
        .binding(by_headers)
}

/// Who goes on publishing, numbered; gives how many were confirmed.
struct Publishing {
    stop: Arc<AtomicBool>,
    task: JoinHandle<u32>,
}

impl Publishing {
    async fn start(client: &Client) -> Publishing {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let publisher = client.publisher("orders").build().await.unwrap();
        let task = tokio::spawn(async move {
            let mut number = 0;
            while !stopped.load(Ordering::Relaxed) {
                let message = Message::new(number.to_string()).message_id(number.to_string());
                publisher.publish("order.new", message).await.unwrap();
                number += 1;
                // Steadily: it is to be in everybody's way, and not to keep the machine busy.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            number
        });
        Publishing { stop, task }
    }

    async fn stop(self) -> u32 {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

/// Who consumes meanwhile, and how often each message came.
type Seen = Arc<Mutex<BTreeMap<u32, u32>>>;

fn consume(client: &Client) -> (Seen, JoinHandle<()>) {
    let seen = Seen::default();
    let noted = Arc::clone(&seen);
    let handler = move |body: String| {
        *noted.lock().unwrap().entry(body.parse().unwrap()).or_default() += 1;
        async { Ok::<(), std::convert::Infallible>(()) }
    };
    let runner = client.consumer("billing").prefetch(20).workers(4).handle(handler);
    let task = tokio::spawn(async move { drop(runner.run().await) });
    (seen, task)
}

async fn until_seen(seen: &Seen, published: u32) -> u32 {
    eventually(PATIENCE, format!("all of {published} messages"), || async {
        seen.lock().unwrap().len() as u32 == published
    })
    .await;
    seen.lock().unwrap().values().map(|times| times - 1).sum()
}

async fn change_type(from: QueueType, file: &str, to: &str) {
    let site = Site::new(file).await;
    let client = site.place.client().await;
    client.apply(&topology(from)).await.unwrap();
    let bindings = site.bindings().await;
    assert_eq!(bindings.len(), 3);
    let publisher = client.publisher("orders").build().await.unwrap();
    for number in 0..300 {
        let message =
            Message::new(number.to_string()).header("number", number).content_type("text/plain");
        publisher.publish(&format!("order.{number}"), message).await.unwrap();
    }

    let steps = site.migrate(&["--dry-run"]).ok();
    assert!(steps.starts_with("prepare ") && steps.contains("\nreplace "), "{steps}");
    site.assert_clean().await;
    assert_eq!(site.bindings().await, bindings);

    let done = site.migrate(&[]).ok();
    assert!(
        done.ends_with("done        queue \"billing\": 300 messages moved out, 300 back\n"),
        "{done}"
    );
    assert_eq!(site.queue_type().await, to);
    assert_eq!(site.bindings().await, bindings);
    site.assert_clean().await;
    let mut came = client.consumer("billing").stream().await.unwrap();
    for number in 0..300i64 {
        let delivery = came.next().await.unwrap().unwrap();
        assert_eq!(delivery.body(), number.to_string().as_bytes());
        assert_eq!(delivery.routing_key().to_str_lossy(), format!("order.{number}"));
        let properties = delivery.properties();
        assert_eq!(properties.content_type.unwrap().to_str_lossy(), "text/plain");
        let headers = properties.headers.unwrap();
        assert_eq!(headers.get("number").and_then(|value| value.as_i64()), Some(number));
        assert_eq!(headers.get("x-leveret-exchange").unwrap().as_str(), Some("orders"));
        delivery.ack().unwrap();
    }
    let again = site.migrate(&[]).ok();
    assert!(again.contains("nothing to do"), "{again}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_changes_its_type_and_keeps_messages_order_and_bindings() {
    change_type(QueueType::Classic, QUORUM, "quorum").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_queue_becomes_a_classic_one_with_other_arguments() {
    change_type(QueueType::Quorum, CLASSIC, "classic").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn publishers_and_consumers_go_on_meanwhile() {
    let site = Site::new(QUORUM).await;
    let client = site.place.client().await;
    client.apply(&topology(QueueType::Classic)).await.unwrap();
    let publishing = Publishing::start(&client).await;
    let (seen, consuming) = consume(&client);
    eventually(PATIENCE, "messages that come", || async { seen.lock().unwrap().len() > 100 }).await;
    site.migrate(&[]).ok();
    let before = seen.lock().unwrap().len();
    eventually(PATIENCE, "more messages", || async { seen.lock().unwrap().len() > before + 100 })
        .await;
    let published = publishing.stop().await;
    until_seen(&seen, published).await;
    assert_eq!(site.queue_type().await, "quorum");
    site.assert_clean().await;
    consuming.abort();
    client.close().await;
}

/// The steps that the program says it takes.
const STEPS: [&str; 11] = [
    "prepare",
    "connect",
    "redirect",
    "divert",
    "replace",
    "return-old",
    "reopen",
    "restore",
    "remove-gate",
    "return-new",
    "clean",
];

/// Runs it until it says that it takes this step or a later one, and kills it at once, or some time later. Which it was.
fn killed_at(site: &Site, step: &str, later: Duration) -> Option<&'static str> {
    let mut command = site.program(&[]);
    let mut child = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
    let said = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let place = |step: &str| STEPS.iter().position(|known| *known == step);
    let wanted = place(step).unwrap();
    let steps = said.filter_map(|line| place(line.unwrap().split(' ').next().unwrap()));
    let reached = steps.into_iter().find(|place| *place >= wanted);
    // Wherever it is by then: any place is as good.
    std::thread::sleep(later);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    reached.map(|place| STEPS[place])
}

/// Kills it at one step after the other, while somebody publishes and somebody consumes, and has the last one finish it.
async fn kill_at_any_step(from: QueueType, file: &str, to: &str) {
    let site = Site::new(file).await;
    let client = site.place.client().await;
    client.apply(&topology(from)).await.unwrap();
    let publishing = Publishing::start(&client).await;
    let (seen, consuming) = consume(&client);
    eventually(PATIENCE, "messages that come", || async { seen.lock().unwrap().len() > 100 }).await;
    let mut killed = Vec::new();
    for (number, step) in STEPS.into_iter().enumerate() {
        let later = Duration::from_millis([0, 3, 17, 40][number % 4]);
        killed.extend(killed_at(&site, step, later));
    }
    eprintln!("killed at {killed:?}");
    // What was half done may have been done by then, so that one or the other was passed over.
    assert!(killed.len() >= 7, "{killed:?}");
    site.migrate(&[]).ok();
    let published = publishing.stop().await;
    let twice = until_seen(&seen, published).await;
    eprintln!("{published} messages, {twice} of them came again");
    assert_eq!(site.queue_type().await, to);
    assert_eq!(site.bindings().await.len(), 3);
    site.assert_clean().await;
    consuming.abort();
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_step_it_loses_nothing_and_the_next_one_goes_on() {
    kill_at_any_step(QueueType::Classic, QUORUM, "quorum").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_step_of_the_way_from_quorum_to_classic_it_loses_nothing() {
    kill_at_any_step(QueueType::Quorum, CLASSIC, "classic").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_was_deleted_and_not_yet_declared_is_declared_and_gets_its_messages_back() {
    let site = Site::new(QUORUM).await;
    let client = site.place.client().await;
    client.apply(&topology(QueueType::Classic)).await.unwrap();
    let publisher = client.publisher("orders").build().await.unwrap();
    for number in 0..50 {
        publisher.publish("order.new", number.to_string()).await.unwrap();
    }
    assert_eq!(killed_at(&site, "return-old", Duration::ZERO), Some("return-old"));
    // As if it had been killed between the two.
    client.delete_queue("billing", Default::default()).await.unwrap();
    let undone = site.migrate(&["--undo"]);
    assert!(undone.status == 1 && undone.err.contains("without --undo"), "{undone:?}");
    publisher.publish("order.late", "late").await.unwrap();
    let done = site.migrate(&[]).ok();
    assert!(done.starts_with("declare "), "{done}");
    assert_eq!(site.bindings().await.len(), 3);
    site.assert_clean().await;
    let messages = client.inspect_queue("billing").await.unwrap().messages;
    // Those that were back already when the queue was deleted went with it.
    assert!((1..=51).contains(&messages), "{messages}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_holds_messages_is_named_and_everything_can_be_undone() {
    let site = Site::new(QUORUM).await;
    let client = site.place.client().await;
    client.apply(&topology(QueueType::Classic)).await.unwrap();
    let bindings = site.bindings().await;
    let publisher = client.publisher("orders").build().await.unwrap();
    for number in 0..20 {
        publisher.publish("order.new", number.to_string()).await.unwrap();
    }
    let mut stream = client.consumer("billing").prefetch(1).stream().await.unwrap();
    let held = stream.next().await.unwrap().unwrap();
    let late = site.migrate(&["--within", "3s"]);
    assert_eq!(late.status, 1, "{late:?}");
    assert!(
        late.err.contains("1 out at consumers") && late.err.contains("(user guest)"),
        "{late:?}"
    );
    assert!(late.err.contains("--undo"), "{late:?}");
    publisher.publish("order.new", "20").await.unwrap();

    let undone = site.migrate(&["--undo"]).ok();
    assert!(undone.starts_with("return-old"), "{undone}");
    assert_eq!(site.queue_type().await, "classic");
    assert_eq!(site.bindings().await, bindings);
    site.assert_clean().await;
    held.ack().unwrap();
    for _ in 0..20 {
        stream.next().await.unwrap().unwrap().ack().unwrap();
    }
    site.place.until_has(&client, "billing", 0).await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_migrated_is_refused_before_anything_is_touched() {
    let site = Site::new(QUORUM).await;
    let client = site.place.client().await;
    let absent = site.migrate(&[]);
    assert!(absent.status == 1 && absent.err.contains("topology apply"), "{absent:?}");

    client.apply(&Topology::new().queue(Queue::stream("billing"))).await.unwrap();
    let stream = site.migrate(&[]);
    assert!(stream.status == 1 && stream.err.contains("stream"), "{stream:?}");
    client.delete_queue("billing", Default::default()).await.unwrap();

    client.apply(&Topology::new().queue(Queue::classic("billing").auto_delete())).await.unwrap();
    let auto_delete = site.migrate(&[]);
    assert!(
        auto_delete.status == 1 && auto_delete.err.contains("last consumer"),
        "{auto_delete:?}"
    );
    client.delete_queue("billing", Default::default()).await.unwrap();

    // Nothing but its name leads to it.
    client.apply(&Topology::new().queue(Queue::classic("billing"))).await.unwrap();
    let bare = site.migrate(&[]);
    assert!(bare.status == 1 && bare.err.contains("--direct"), "{bare:?}");
    // Another queue dead-letters to it by its name.
    client.apply(&topology(QueueType::Classic)).await.unwrap();
    let waiting = Queue::classic("waiting").dead_letter_to("").dead_letter_key("billing");
    client.apply(&Topology::new().queue(waiting)).await.unwrap();
    client.publisher("").build().await.unwrap().publish("waiting", "x").await.unwrap();
    let sent = site.migrate(&[]);
    assert!(
        sent.status == 1 && sent.err.contains("\"waiting\"") && sent.err.contains("--direct"),
        "{sent:?}"
    );
    site.assert_clean().await;
    client.purge_queue("waiting").await.unwrap();

    for (file, named) in [
        ("[[queue]]\nname = \"other\"", "no queue \"billing\""),
        ("[[queue]]\nname = \"billing\"\ntype = \"stream\"", "stream"),
        ("[[queue]]\nname = \"billing\"\nauto-delete = true", "last consumer"),
    ] {
        fs::write(site.file(), file).unwrap();
        let said = site.migrate(&[]);
        assert!(said.status == 2 && said.err.contains(named), "{said:?}");
    }
    let wrong = site.management.url().replace("guest:guest", "guest:wrong");
    let said = site.migrate(&["--management", &wrong]);
    assert_eq!(said.status, 2, "the file is wrong still: {said:?}");
    fs::write(site.file(), QUORUM).unwrap();
    let said = site.migrate(&["--management", &wrong]);
    assert!(said.status == 77 && !said.err.contains("guest:wrong"), "{said:?}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_sends_to_the_queue_by_its_name_is_noticed_before_it_is_deleted() {
    let site = Site::new(QUORUM).await;
    let client = site.place.client().await;
    client.apply(&topology(QueueType::Classic)).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let directly = tokio::spawn(async move {
        let (mut confirmed, mut returned) = (0, 0);
        while !stopped.load(Ordering::Relaxed) {
            match publisher.publish("billing", "x").await {
                Ok(()) => confirmed += 1,
                Err(error) if error.kind() == ErrorKind::Unroutable => returned += 1,
                Err(error) => panic!("{error}"),
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        (confirmed, returned)
    });
    let noticed = site.migrate(&[]);
    assert!(noticed.status == 1 && noticed.err.contains("--direct"), "{noticed:?}");
    assert_eq!(site.queue_type().await, "classic");
    site.migrate(&["--direct"]).ok();
    stop.store(true, Ordering::Relaxed);
    let (confirmed, returned) = directly.await.unwrap();
    eprintln!("{confirmed} messages came directly, {returned} were returned");
    // Whoever asks to be told is told, and what is confirmed is there.
    site.place.until_has(&client, "billing", confirmed).await;
    site.assert_clean().await;
    client.close().await;
}
