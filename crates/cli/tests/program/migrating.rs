//! `topology migrate`: other arguments for a queue that is in use, and being killed at every step.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::Value as AmqpValue;
use leveret::{Binding, Client, ErrorKind, Exchange, Message, Queue, QueueType, Topology};
use leveret_testkit::certificates::Authority;
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{self, Management};
use leveret_testkit::web::TlsFront;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::support::{Killed, Place, Said};

const PATIENCE: Duration = Duration::from_secs(60);

/// A broker with its management API, and a file that wants the queue otherwise.
struct Site {
    place: Place,
    queue: &'static str,
    management: Management,
    folder: TempDir,
}

impl Site {
    async fn new(file: &str) -> Site {
        let management = rabbitmq::shared().await.management().clone();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("topology.toml"), file).unwrap();
        Site { place: Place::new().await, queue: "billing", management, folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("topology.toml")
    }

    fn program(&self, options: &[&str]) -> Command {
        let file = self.file();
        let arguments = ["topology", "migrate", file.to_str().unwrap(), self.queue];
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
        let all = self.ask(&["queues", &self.vhost(), self.queue, "bindings"]).await;
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

    /// Until the API knows of the message in a queue.
    async fn until_counted(&self, queue: &str) {
        eventually(PATIENCE, format!("a count of what is in {queue}"), || async {
            self.ask(&["queues", &self.vhost(), queue]).await["messages"] == 1
        })
        .await;
    }

    async fn queue_type(&self) -> String {
        let queue = self.ask(&["queues", &self.vhost(), self.queue]).await;
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
    let by_headers =
        |matching| Binding::to_queue("billing", "by-headers", "").argument("x-match", matching);
    Topology::new()
        .exchange(Exchange::topic("orders"))
        .exchange(Exchange::headers("by-headers"))
        .queue(queue)
        .binding(by_headers("any").argument("number", 5))
        .binding(by_headers("all").argument("wide", 5i64).argument("whatever", AmqpValue::Void))
}

/// Publishes a message for each binding by headers, and has it come back: it is an error if there is no queue for it.
async fn check_headers(client: &Client) {
    let publisher = client.publisher("by-headers").build().await.unwrap();
    let of_width = Message::new("number").header("number", 5);
    let present = Message::new("wide").header("wide", 5i64).header("whatever", "x");
    for message in [of_width, present] {
        publisher.publish("", message).await.unwrap();
    }
}

/// A queue into which somebody publishes, numbered, and from which somebody consumes.
struct Busy {
    site: Site,
    client: Client,
    stop: Arc<AtomicBool>,
    /// How many were confirmed.
    publishing: JoinHandle<u32>,
    /// How often each came.
    seen: Arc<Mutex<BTreeMap<u32, u32>>>,
    consuming: JoinHandle<()>,
}

impl Busy {
    /// A site with this file, and a queue that is otherwise.
    async fn start(from: QueueType, file: &str) -> Busy {
        let site = Site::new(file).await;
        let client = site.place.client().await;
        client.apply(&topology(from)).await.unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let publishing = publish(&client, Arc::clone(&stop)).await;
        let seen = Arc::default();
        let consuming = consume(&client, Arc::clone(&seen));
        let busy = Busy { site, client, stop, publishing, seen, consuming };
        busy.until_more_came().await;
        busy
    }

    async fn until_more_came(&self) {
        let came = || self.seen.lock().unwrap().len();
        let before = came();
        eventually(PATIENCE, "messages that come", || async { came() > before + 100 }).await;
    }

    /// All that was published has come, the queue is of this type, and nothing else is left. How many messages came again.
    async fn end(self, to: &str) -> u32 {
        self.stop.store(true, Ordering::Relaxed);
        let published = self.publishing.await.unwrap();
        eventually(PATIENCE, format!("all of {published} messages"), || async {
            self.seen.lock().unwrap().len() as u32 == published
        })
        .await;
        assert_eq!(self.site.queue_type().await, to);
        assert_eq!(self.site.bindings().await.len(), 4);
        self.site.assert_clean().await;
        self.consuming.abort();
        self.client.close().await;
        self.seen.lock().unwrap().values().map(|times| times - 1).sum()
    }
}

async fn publish(client: &Client, stop: Arc<AtomicBool>) -> JoinHandle<u32> {
    let publisher = client.publisher("orders").build().await.unwrap();
    tokio::spawn(async move {
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            let message = Message::new(number.to_string()).message_id(number.to_string());
            publisher.publish("order.new", message).await.unwrap();
            number += 1;
            // Steadily: it is to be in everybody's way, and not to keep the machine busy.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        number
    })
}

fn consume(client: &Client, seen: Arc<Mutex<BTreeMap<u32, u32>>>) -> JoinHandle<()> {
    let handler = move |body: String| {
        *seen.lock().unwrap().entry(body.parse().unwrap()).or_default() += 1;
        async { Ok::<(), std::convert::Infallible>(()) }
    };
    let runner = client.consumer("billing").prefetch(20).workers(4).handle(handler);
    tokio::spawn(async move { drop(runner.run().await) })
}

async fn change_type(from: QueueType, file: &str, to: &str) {
    let site = Site::new(file).await;
    let client = site.place.client().await;
    client.apply(&topology(from)).await.unwrap();
    let bindings = site.bindings().await;
    assert_eq!(bindings.len(), 4);
    check_headers(&client).await;
    client.purge_queue("billing").await.unwrap();
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
    came.cancel().await.unwrap();
    check_headers(&client).await;
    site.place.until_has(&client, "billing", 2).await;
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
async fn a_name_may_have_any_characters() {
    const NAME: &str = "a/b %2F?&#~+.ü";
    let file = format!("[[queue]]\nname = {NAME:?}\ntype = \"quorum\"");
    let site = Site { queue: NAME, ..Site::new(&file).await };
    let client = site.place.client().await;
    let queue = Queue::classic(NAME).bind("to/ %2F ü", NAME);
    client
        .apply(&Topology::new().exchange(Exchange::direct("to/ %2F ü")).queue(queue))
        .await
        .unwrap();
    client.publisher("to/ %2F ü").build().await.unwrap().publish(NAME, "x").await.unwrap();
    let done = site.migrate(&[]).ok();
    assert!(done.ends_with(": 1 message moved out, 1 back\n"), "{done}");
    assert_eq!((site.queue_type().await.as_str(), site.bindings().await.len()), ("quorum", 1));
    site.assert_clean().await;
    site.place.until_has(&client, NAME, 1).await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn publishers_and_consumers_go_on_meanwhile() {
    let busy = Busy::start(QueueType::Classic, QUORUM).await;
    busy.site.migrate(&[]).ok();
    busy.until_more_came().await;
    busy.end("quorum").await;
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
    let busy = Busy::start(from, file).await;
    let mut killed = Vec::new();
    for (number, step) in STEPS.into_iter().enumerate() {
        let later = Duration::from_millis([0, 3, 17, 40][number % 4]);
        killed.extend(killed_at(&busy.site, step, later));
    }
    eprintln!("killed at {killed:?}");
    // What was half done may have been done by then, so that one or the other was passed over.
    assert!(killed.len() >= 7, "{killed:?}");
    busy.site.migrate(&[]).ok();
    let twice = busy.end(to).await;
    eprintln!("{twice} messages came again");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_step_it_loses_nothing_and_the_next_one_goes_on() {
    kill_at_any_step(QueueType::Classic, QUORUM, "quorum").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_step_of_the_way_from_quorum_to_classic_it_loses_nothing() {
    kill_at_any_step(QueueType::Quorum, CLASSIC, "classic").await;
}

/// Kills it at one step after the other and undoes it: either the queue is the former one, or it is said to be replaced.
#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_step_it_goes_back_or_says_that_the_queue_is_replaced() {
    let site = Site::new(QUORUM).await;
    let client = site.place.client().await;
    for step in ["prepare", "divert", "replace", "return-old", "reopen", "restore", "clean"] {
        client.apply(&topology(QueueType::Classic)).await.unwrap();
        let bindings = site.bindings().await;
        let publisher = client.publisher("orders").build().await.unwrap();
        for number in 0..30 {
            publisher.publish("order.new", number.to_string()).await.unwrap();
        }
        let reached = killed_at(&site, step, Duration::from_millis(20));
        let undone = site.migrate(&["--undo", "--within", "100s"]);
        eprintln!("killed at {reached:?}: {undone:?}");
        match undone.status {
            // It was too late, or too early, to kill it.
            0 if undone.out.contains("no migration was stopped") => {}
            0 => assert_eq!(site.queue_type().await, "classic", "{step}: {undone:?}"),
            _ => {
                assert!(undone.err.contains("Run it without --undo"), "{step}: {undone:?}");
                let was =
                    r#"{"arguments":{"x-queue-type":"classic"},"durable":true,"type":"classic"}"#;
                assert!(undone.err.contains(was), "{step}: {undone:?}");
                assert_eq!(undone.out, "", "nothing is touched");
                // Whatever the file says by now.
                fs::write(site.file(), CLASSIC).unwrap();
                let other = site.migrate(&["--undo"]);
                assert!(other.status == 1 && other.err.contains(was), "{step}: {other:?}");
                fs::write(site.file(), QUORUM).unwrap();
                site.migrate(&[]).ok();
                assert_eq!(site.queue_type().await, "quorum");
            }
        }
        let is_early = ["prepare", "divert"].contains(&step);
        let is_late = ["reopen", "restore"].contains(&step);
        assert!(!is_early || undone.status == 0, "{step}: {undone:?}");
        assert!(!is_late || undone.status == 1, "{step}: {undone:?}");
        site.assert_clean().await;
        assert_eq!(site.bindings().await, bindings);
        let mut seen = std::collections::BTreeSet::new();
        while let Some(delivery) = client.get("billing", Default::default()).await.unwrap() {
            seen.insert(String::from_utf8(delivery.body().to_vec()).unwrap());
            delivery.ack().unwrap();
        }
        assert_eq!(seen.len(), 30, "{step}");
        client.delete_queue("billing", Default::default()).await.unwrap();
    }
    client.close().await;
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
    assert_eq!(site.bindings().await.len(), 4);
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
    site.until_counted("waiting").await;
    let sent = site.migrate(&[]);
    assert!(
        sent.status == 1 && sent.err.contains("\"waiting\"") && sent.err.contains("--direct"),
        "{sent:?}"
    );
    site.assert_clean().await;
    client.delete_queue("waiting", Default::default()).await.unwrap();
    // So it may, under the keys that messages have.
    let waiting = Queue::classic("waiting").dead_letter_to("").bind("orders", "billing");
    client.apply(&Topology::new().queue(waiting)).await.unwrap();
    client.publisher("orders").build().await.unwrap().publish("billing", "x").await.unwrap();
    site.until_counted("waiting").await;
    let sent = site.migrate(&[]);
    assert!(sent.status == 1 && sent.err.contains("\"waiting\""), "{sent:?}");
    client.delete_queue("waiting", Default::default()).await.unwrap();

    // Messages would be lost where they wait, whatever becomes of those in the queue.
    let policy =
        json!({ "pattern": "^billing", "apply-to": "queues", "definition": { "expires": 60_000 } });
    let policies = ["policies", &site.vhost(), "expiring"];
    site.management.put(&policies, policy).await.unwrap();
    let expiring = site.migrate(&[]);
    assert!(expiring.status == 1 && expiring.err.contains("sets expires"), "{expiring:?}");
    site.assert_clean().await;
    site.management.delete(&policies).await.unwrap();

    for (file, named) in [
        ("[[queue]]\nname = \"other\"", "no queue \"billing\""),
        ("[[queue]]\nname = \"billing\"\ntype = \"stream\"", "stream"),
        ("[[queue]]\nname = \"billing\"\nauto-delete = true", "last consumer"),
    ] {
        fs::write(site.file(), file).unwrap();
        let said = site.migrate(&[]);
        assert!(said.status == 2 && said.err.contains(named), "{said:?}");
    }
    // The broker alone knows what it takes; it is asked before the queue is deleted.
    fs::write(site.file(), format!("{QUORUM}arguments = {{ x-max-length = -5 }}\n")).unwrap();
    let refused = site.migrate(&[]);
    assert!(refused.status == 2 && refused.err.contains("x-max-length"), "{refused:?}");
    assert_eq!(site.queue_type().await, "classic");
    site.assert_clean().await;
    fs::write(site.file(), "[[queue]]\nname = \"other\"").unwrap();
    let wrong = site.management.url().replace("guest:guest", "guest:wrong");
    let said = site.migrate(&["--management", &wrong]);
    assert_eq!(said.status, 2, "the file is wrong still: {said:?}");
    fs::write(site.file(), QUORUM).unwrap();
    let said = site.migrate(&["--management", &wrong]);
    assert!(said.status == 77 && !said.err.contains("guest:wrong"), "{said:?}");
    let authority = Authority::new("ours");
    let trusted = site.folder.path().join("ours");
    fs::write(&trusted, authority.certificate()).unwrap();
    let port = site.management.url().rsplit(':').next().unwrap().trim_end_matches('/');
    let server = authority.server(&["localhost"]);
    let front = TlsFront::before(port.parse().unwrap(), &server).await;
    let encrypted = format!("https://guest:guest@localhost:{}", front.port());
    let said = site.migrate(&["--dry-run", "--management", &encrypted]);
    assert!(said.status == 69 && said.err.contains("certificate"), "{said:?}");
    let mut trusting = site.program(&["--dry-run", "--management", &encrypted]);
    Said::from(trusting.env("SSL_CERT_FILE", &trusted).output().unwrap()).ok();
    let elsewhere = format!("{}/elsewhere", site.management.url().trim_end_matches('/'));
    let said = site.migrate(&["--management", &elsewhere]);
    assert!(said.status == 69 && said.err.contains("no management API"), "{said:?}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_one_migrates_a_queue_at_a_time() {
    let site = Site::new(QUORUM).await;
    let client = site.place.client().await;
    client.apply(&topology(QueueType::Classic)).await.unwrap();
    client.publisher("orders").build().await.unwrap().publish("order.new", "x").await.unwrap();
    let mut stream = client.consumer("billing").stream().await.unwrap();
    let held = stream.next().await.unwrap().unwrap();
    let mut first = Killed(site.program(&[]).stdout(Stdio::piped()).spawn().unwrap());
    let mut said = BufReader::new(first.0.stdout.take().unwrap()).lines();
    assert!(said.any(|line| line.unwrap().starts_with("replace ")));
    for options in [&[][..], &["--undo"]] {
        let second = site.migrate(options);
        assert!(second.status == 1 && second.err.contains("somebody else"), "{second:?}");
    }
    held.ack().unwrap();
    assert!(said.any(|line| line.unwrap().starts_with("done ")));
    assert!(first.0.wait().unwrap().success());
    assert_eq!(site.queue_type().await, "quorum");
    site.assert_clean().await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_reads_only_the_first_line_does_not_stop_it() {
    let site = Site::new(QUORUM).await;
    let client = site.place.client().await;
    client.apply(&topology(QueueType::Classic)).await.unwrap();
    let mut child = Killed(site.program(&[]).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(child.0.wait().unwrap().success());
    assert_eq!(site.queue_type().await, "quorum");
    site.assert_clean().await;
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
    // A message that comes at the very moment at which the queue is deleted is confirmed by RabbitMQ, and gone with the queue.
    eventually(PATIENCE, format!("{confirmed} messages, or one less"), || async {
        match client.inspect_queue("billing").await {
            Ok(info) if (confirmed - 1..=confirmed).contains(&info.messages) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    site.assert_clean().await;
    client.close().await;
}
