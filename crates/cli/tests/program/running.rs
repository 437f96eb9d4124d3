//! `run`: services whose handlers are commands and HTTP endpoints.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Redirect};
use axum::routing::{get, post};
use leveret_testkit::certificates::Authority;
use leveret_testkit::eventually;
use leveret_testkit::proxy::{Cut, Direction, FaultProxy};
use leveret_testkit::web::{self, TlsFront};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::{Killed, Place, leveret, program};

#[path = "running/commands.rs"]
mod commands;
#[path = "running/endpoints.rs"]
mod endpoints;
#[path = "running/files.rs"]
mod files;
#[path = "running/listening.rs"]
mod listening;
#[path = "running/pools.rs"]
mod pools;
#[path = "running/reloading.rs"]
mod reloading;
#[path = "running/stopping.rs"]
mod stopping;

const PATIENCE: Duration = Duration::from_secs(60);

/// A service that runs, and where its file is. Its log is the file `log` beside it.
pub(crate) struct Running {
    pub(crate) child: Killed,
    out: BufReader<ChildStdout>,
    folder: TempDir,
}

impl Running {
    pub(crate) fn start(place: &Place, file: &str, options: &[&str]) -> Running {
        Running::start_with(place, file, options, &[])
    }

    fn start_with(
        place: &Place,
        file: &str,
        options: &[&str],
        variables: &[(&str, &Path)],
    ) -> Running {
        let mut running = Running::spawn(place, file, options, variables);
        running.until("running: ");
        running
    }

    /// The same, but does not wait until it runs.
    pub(crate) fn spawn(
        place: &Place,
        file: &str,
        options: &[&str],
        variables: &[(&str, &Path)],
    ) -> Running {
        let mut command = place.program(&[]);
        command.envs(variables.iter().copied());
        Running::spawn_by(command, file, options)
    }

    pub(crate) fn spawn_by(mut command: Command, file: &str, options: &[&str]) -> Running {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("service.toml");
        fs::write(&path, file.replace("FOLDER", folder.path().to_str().unwrap())).unwrap();
        command.arg("run").arg(&path).args(options);
        command.stderr(fs::File::create(folder.path().join("log")).unwrap());
        let mut child = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
        let out = BufReader::new(child.0.stdout.take().unwrap());
        Running { child, out, folder }
    }

    /// Where it answers over HTTP, with `--listen`. Not yet running.
    fn base(&mut self) -> String {
        let line = self.until("health, metrics and topology at ");
        line.split_once("http://").unwrap().1.split_once("/health").unwrap().0.to_owned()
    }

    /// Reads what it says until a line begins so.
    fn until(&mut self, begin: &str) -> String {
        let mut line = String::new();
        while self.out.read_line(&mut line).unwrap() > 0 {
            if line.starts_with(begin) {
                return line;
            }
            line.clear();
        }
        panic!("it ended before it said {begin:?}");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child.0), signal).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Gives it another file to read.
    fn write(&self, file: &str) {
        let text = file.replace("FOLDER", self.folder.path().to_str().unwrap());
        fs::write(self.path("service.toml"), text).unwrap();
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    /// Waits until its log says something.
    async fn until_logged(&self, text: &str) -> String {
        eventually(PATIENCE, format!("{text:?} in the log"), || async {
            let log = self.log();
            log.contains(text).then_some(log)
        })
        .await
    }

    /// Asks it to stop, and waits.
    fn stop(mut self) -> String {
        self.signal(Signal::TERM);
        let said = self.until("stopped: ");
        assert!(self.child.0.wait().unwrap().success());
        said
    }
}

/// A proxy before the broker, and the URL that leads through it.
async fn proxy(place: &Place) -> (FaultProxy, String) {
    let (_, rest) = place.url().split_once("://").unwrap();
    let address = rest.split('/').next().unwrap().rsplit('@').next().unwrap();
    let proxy = FaultProxy::to(address).await;
    let url = proxy.url(place.url());
    (proxy, url)
}

/// Creates a pipe with a name.
fn named_pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Opens a pipe with a name once a reader has opened it.
async fn open_read_pipe(path: &Path) -> fs::File {
    let path = path.to_owned();
    let opening = tokio::task::spawn_blocking(|| fs::File::options().write(true).open(path));
    tokio::time::timeout(PATIENCE, opening).await.expect("a reader").unwrap().unwrap()
}

/// Waits until a file has so many lines.
pub(crate) async fn until_lines(path: &Path, count: usize) -> Vec<String> {
    eventually(PATIENCE, format!("{count} lines in {}", path.display()), || async {
        let text = fs::read_to_string(path).unwrap_or_default();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        (lines.len() >= count).then_some(lines)
    })
    .await
}

pub(crate) const TOPOLOGY: &str = r#"
[[topology.exchange]]
name = "orders"
type = "topic"

[[topology.queue]]
name = "billing"
type = "quorum"
bind = [{ exchange = "orders", key = "order.*" }]
"#;

/// Nobody else is there when its time comes: whoever has published it has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_message_gets_to_its_exchange() {
    let place = Place::new().await;
    let client = place.client().await;
    let running = Running::start(&place, &format!("relay-delays = true\n{TOPOLOGY}"), &[]);
    place.run(&["publish", "order.new", "x", "--exchange", "orders", "--in", "1s"]).ok();
    place.until_has(&client, "billing", 1).await;
    assert_eq!(running.stop().trim(), "stopped: 0 messages handled");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exit_status_of_a_command_decides() {
    let place = Place::new().await;
    // `later` fails at first, and `never` always.
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
retry = {{ wait = "50ms", times = 2 }}
command = ["sh", "-c", '''
body=$(cat)
echo "$body $LEVERET_ROUTING_KEY $LEVERET_ATTEMPT $LEVERET_MESSAGE_ID" >> FOLDER/seen
case "$body" in
  later) [ "$LEVERET_ATTEMPT" -gt 1 ] || exit 75 ;;
  never) echo "the bank is closed" >&2; exit 1 ;;
  broken) echo "no such order" >&2; exit 65 ;;
esac
''']
"#
    );
    let running = Running::start(&place, &file, &[]);
    for body in ["now", "later", "never", "broken"] {
        place.run(&["publish", "order.new", body, "-e", "orders", "--message-id", body]).ok();
    }
    let mut seen = until_lines(&running.path("seen"), 7).await;
    seen.sort();
    let expected = [
        "broken order.new 1 broken",
        "later order.new 1 later",
        "later order.new 2 later",
        "never order.new 1 never",
        "never order.new 2 never",
        "never order.new 3 never",
        "now order.new 1 now",
    ];
    assert_eq!(seen, expected);
    let client = place.client().await;
    place.until_has(&client, "billing.parked", 2).await;
    let mut parked = place.run(&["parking", "list", "billing.parked", "--json"]).json();
    parked.sort_by_key(|told| told["body"].as_str().unwrap().to_owned());
    let stories: Vec<_> = parked
        .iter()
        .map(|told| {
            (told["story"]["kind"].as_str().unwrap(), told["story"]["error"].as_str().unwrap())
        })
        .collect();
    assert_eq!(stories, [("exit-65", "no such order"), ("exit-1", "the bank is closed")]);
    assert_eq!(running.stop(), "stopped: 2 messages handled, 3 sent to be tried again, 2 parked\n");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_service_writes_is_the_reply() {
    let place = Place::new().await;
    let file = r#"
[[service]]
name = "voices"
workers = 4
command = ["sh", "-c", '[ "$LEVERET_TYPE" = shout ] || { echo "cannot $LEVERET_TYPE" >&2; exit 65; }; tr a-z A-Z']
"#;
    let running = Running::start(&place, file, &[]);
    let client = place.client().await;
    eventually(PATIENCE, "the queue of the service", || async {
        client.inspect_queue("voices").await.is_ok()
    })
    .await;
    assert_eq!(place.run(&["call", "voices", "shout", "hello", "--raw"]).ok(), "HELLO\n");
    let failed = place.run(&["call", "voices", "sing", "hello"]);
    assert!(failed.status == 1 && failed.err.contains("cannot sing"), "{failed:?}");
    running.stop();
    client.close().await;
}

/// The file of a service, and the folder it is in.
fn simple_service() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("service.toml");
    let consumer = "[[consumer]]\nqueue = \"billing\"\ncommand = [\"cat\"]\n";
    fs::write(&path, format!("{TOPOLOGY}\n{consumer}")).unwrap();
    (folder, path)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_goes_to_no_terminal_has_no_colours() {
    let place = Place::new().await;
    let (_folder, path) = simple_service();
    let mut command = place.program(&["run", path.to_str().unwrap()]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("CLICOLOR_FORCE");
    let mut child = Killed(command.spawn().unwrap());
    let mut said = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut said).unwrap();
    kill_process(Pid::from_child(&child.0), Signal::TERM).unwrap();
    let mut log = String::new();
    child.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.contains("is connected") && !log.contains('\x1b'), "{log:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_of_an_endpoint_decides() {
    let place = Place::new().await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    let answer = move |headers: HeaderMap, body: String| {
        let fact = |name: &str| {
            headers.get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
        };
        let attempt = fact("leveret-attempt");
        let line =
            format!("{body} {} {} {attempt}", fact("leveret-routing-key"), fact("content-type"));
        noted.lock().unwrap().push(line);
        async move {
            match (body.as_str(), attempt.as_str()) {
                ("busy", "1") => (StatusCode::TOO_MANY_REQUESTS, "too many").into_response(),
                ("wrong", _) => (StatusCode::UNPROCESSABLE_ENTITY, "no such field").into_response(),
                ("moved", _) => Redirect::to("/login").into_response(),
                _ => StatusCode::NO_CONTENT.into_response(),
            }
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        // Where one is welcome, and nothing is done.
        let login = get(async || "please log in");
        axum::serve(listener, Router::new().route("/bill", post(answer)).route("/login", login))
            .await
    });
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
http = "http://{address}/bill"
retry = {{ waits = ["50ms"] }}
"#
    );
    let running = Running::start(&place, &file, &[]);
    for body in ["good", "busy", "wrong", "moved"] {
        let publish =
            ["publish", "order.new", body, "-e", "orders", "--content-type", "text/plain"];
        place.run(&publish).ok();
    }
    let client = place.client().await;
    place.until_has(&client, "billing.parked", 2).await;
    eventually(PATIENCE, "five requests", || async { seen.lock().unwrap().len() == 5 }).await;
    let mut lines = seen.lock().unwrap().clone();
    lines.sort();
    let expected = [
        "busy order.new text/plain 1",
        "busy order.new text/plain 2",
        "good order.new text/plain 1",
        "moved order.new text/plain 1",
        "wrong order.new text/plain 1",
    ];
    assert_eq!(lines, expected);
    let parked = place.run(&["parking", "list", "billing.parked", "--json"]).json();
    let mut errors: Vec<_> =
        parked.iter().map(|one| one["story"]["error"].as_str().unwrap()).collect();
    errors.sort_unstable();
    assert_eq!(errors[0], "422 Unprocessable Entity: no such field");
    assert!(errors[1].contains("answered 303 See Other"), "{}", errors[1]);
    running.stop();
    serving.abort();
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_with_encryption_has_to_be_one_that_is_trusted() {
    let place = Place::new().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&asked);
    let bill = post(move || {
        *counted.lock().unwrap() += 1;
        async { StatusCode::NO_CONTENT }
    });
    let serving =
        tokio::spawn(
            async move { axum::serve(listener, Router::new().route("/bill", bill)).await },
        );
    let (authority, other) = (Authority::new("ours"), Authority::new("another"));
    let front = TlsFront::before(port, &authority.server(&["localhost"])).await;
    let folder = tempfile::tempdir().unwrap();
    let (trusted, untrusted) = (folder.path().join("ours"), folder.path().join("another"));
    fs::write(&trusted, authority.certificate()).unwrap();
    fs::write(&untrusted, other.certificate()).unwrap();
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
http = "https://localhost:{}/bill"
retry = {{ waits = ["50ms"] }}
"#,
        front.port()
    );
    let publish = ["publish", "order.new", "x", "-e", "orders"];

    let running = Running::start_with(&place, &file, &[], &[("SSL_CERT_FILE", &untrusted)]);
    place.run(&publish).ok();
    let client = place.client().await;
    place.until_has(&client, "billing.parked", 1).await;
    let parked = place.run(&["parking", "list", "billing.parked", "--json"]).json();
    let error = parked[0]["story"]["error"].as_str().unwrap();
    assert!(error.contains("does not answer") && error.contains("certificate"), "{error}");
    let done = "stopped: 0 messages handled, 1 sent to be tried again, 1 parked\n";
    assert_eq!(running.stop(), done);

    let running = Running::start_with(&place, &file, &[], &[("SSL_CERT_FILE", &trusted)]);
    place.run(&publish).ok();
    // A count of the queue may be that from before the message.
    eventually(PATIENCE, "a request", async || *asked.lock().unwrap() == 1).await;
    assert_eq!(running.stop().trim(), "stopped: 1 message handled");
    serving.abort();
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_come_as_lines_of_json() {
    let place = Place::new().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
batch = {{ size = 5, within = "300ms" }}
command = ["sh", "-c", "echo $LEVERET_BATCH >> FOLDER/batches; cat >> FOLDER/lines"]
"#
    );
    let client = place.client().await;
    let running = Running::start(&place, &file, &[]);
    let bodies: String = (0..12).map(|number| format!("{number}\n")).collect();
    place.run_with_input(&["publish", "order.new", "-e", "orders", "--lines"], &bodies).ok();
    let lines = until_lines(&running.path("lines"), 12).await;
    let told: Vec<serde_json::Value> =
        lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen: String =
        told.iter().map(|told| format!("{}\n", told["body"].as_str().unwrap())).collect();
    assert_eq!(seen, bodies);
    let batches = fs::read_to_string(running.path("batches")).unwrap();
    assert_eq!(batches.lines().map(|line| line.parse::<u32>().unwrap()).sum::<u32>(), 12);
    assert!(batches.lines().count() < 12, "{batches}");
    assert_eq!(running.stop(), "stopped: 12 messages handled\n");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_parameters_of_orb_are_flags() {
    let place = Place::new().await;
    let file = r#"
[[topology.queue]]
name = "operations"
type = "quorum"
dead-letter-exchange = "orb.redelivery"
dead-letter-routing-key = "orb.redelivery"

[[consumer]]
queue = "operations"
pool = "op"
retry = { profile = "orb" }
command = ["sh", "-c", "cat >> FOLDER/seen; echo >> FOLDER/seen; exit 75"]
"#;
    let flags = [
        "--mq-op-pool",
        "3",
        "--mq-redelivery-max-attempts",
        "2",
        "--mq-redelivery-initial-interval",
        "50ms",
        "--mq-redelivery-multiplier",
        "1",
        "--mq-redelivery-max-interval",
        "1s",
    ];
    let client = place.client().await;
    let running = Running::start(&place, file, &flags);
    eventually(PATIENCE, "as many consumers as the pool has", || async {
        client.inspect_queue("operations").await.is_ok_and(|info| info.consumers == 3)
    })
    .await;
    place.run(&["publish", "operations", "x"]).ok();
    // The program sends back what was rejected, twice, and then it is parked.
    place.until_has(&client, "orb.parked", 1).await;
    assert_eq!(until_lines(&running.path("seen"), 3).await, ["x", "x", "x"]);
    running.stop();
    for (flag, value, allowed) in [
        ("--mq-redelivery-multiplier", "0.5", "at least 1"),
        ("--mq-op-pool", "0", "1 to 10000"),
        ("--mq-redelivery-max-interval", "long", "30s or 4h"),
    ] {
        let said = leveret(&["run", "service.toml", flag, value]);
        assert_eq!(said.status, 2, "{said:?}");
        for part in [flag.trim_start_matches("--mq-"), value, allowed] {
            assert!(said.err.contains(part), "{part} is not in {said:?}");
        }
    }
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_stopped_finishes_what_is_at_work() {
    let place = Place::new().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
command = ["sh", "-c", "echo begun >> FOLDER/seen; while [ ! -e FOLDER/go ]; do sleep 0.05; done; echo done >> FOLDER/seen"]
"#
    );
    let client = place.client().await;
    let mut running = Running::start(&place, &file, &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    until_lines(&running.path("seen"), 1).await;
    running.signal(Signal::TERM);
    fs::write(running.path("go"), "").unwrap();
    assert_eq!(running.until("stopped: "), "stopped: 1 message handled\n");
    assert!(running.child.0.wait().unwrap().success());
    assert_eq!(until_lines(&running.path("seen"), 2).await, ["begun", "done"]);
    place.until_has(&client, "billing", 0).await;
    client.close().await;
}
