//! A broker that falls silent, at each frame at which it could.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leveret::{Client, Exchange, Queue, Topology};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::support::{Place, Said};

/// By then a command with a timeout of a second, or that was stopped, has ended, on a busy machine too; one that waits for the
/// client's own deadlines has not.
const SECONDS: Duration = Duration::from_secs(20);

/// Passes so many frames of the broker on each connection, and none after that.
struct Proxy {
    url: String,
    silence: Arc<Silence>,
    _accepting: JoinSet<()>,
}

struct Silence {
    limit: usize,
    has_begun: AtomicBool,
    began: tokio::sync::Notify,
}

impl Proxy {
    async fn to(broker: &str, limit: usize) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("amqp://{}", listener.local_addr().unwrap());
        let address = broker.rsplit('/').next().unwrap().to_owned();
        let (has_begun, began) = (AtomicBool::new(false), tokio::sync::Notify::new());
        let silence = Arc::new(Silence { limit, has_begun, began });
        let shared = Arc::clone(&silence);
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(broker) = TcpStream::connect(&address).await else { return };
                let (from_client, to_client) = client.into_split();
                let (from_broker, to_broker) = broker.into_split();
                connections.spawn(up(from_client, to_broker));
                connections.spawn(Arc::clone(&shared).down(from_broker, to_client));
            }
        });
        Proxy { url, silence, _accepting: accepting }
    }

    fn is_silent(&self) -> bool {
        self.silence.has_begun.load(Ordering::SeqCst)
    }
}

async fn up(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let _ = copy(&mut from, &mut to).await;
}

impl Silence {
    async fn down(self: Arc<Self>, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        const HEARTBEAT: u8 = 8;
        let (mut frame, mut came) = (Vec::new(), 0);
        loop {
            let mut header = [0; 7];
            if from.read_exact(&mut header).await.is_err() {
                return;
            }
            frame.clear();
            frame.extend(header);
            let length = u32::from_be_bytes([header[3], header[4], header[5], header[6]]);
            frame.resize(header.len() + length as usize + 1, 0);
            if from.read_exact(&mut frame[header.len()..]).await.is_err() {
                return;
            }
            came += usize::from(header[0] != HEARTBEAT);
            if came > self.limit {
                self.has_begun.store(true, Ordering::SeqCst);
                self.began.notify_one();
            } else if to.write_all(&frame).await.is_err() {
                return;
            }
        }
    }
}

/// A command on a queue of its own, in which there are messages.
struct Case {
    name: &'static str,
    arguments: &'static [&'static str],
    input: &'static str,
}

const fn case(name: &'static str, arguments: &'static [&'static str]) -> Case {
    Case { name, arguments, input: "" }
}

static CASES: [Case; 24] = [
    case("get", &["get", "QUEUE"]),
    case("take", &["get", "QUEUE", "--take", "--count", "2"]),
    case("status", &["status", "QUEUE"]),
    case("publish", &["publish", "QUEUE", "x"]),
    case("later", &["publish", "QUEUE", "x", "--in", "1h"]),
    Case { name: "lines", arguments: &["publish", "QUEUE", "--lines"], input: "a\nb\nc\n" },
    case("call", &["call", "echo", "any", "x", "--within", "1s"]),
    case("tail", &["tail", "news", "-n", "1"]),
    case("list", &["parking", "list", "QUEUE"]),
    case("move", &["parking", "move", "QUEUE", "--to-queue", "elsewhere"]),
    case("export", &["parking", "export", "QUEUE"]),
    Case {
        name: "import",
        arguments: &["parking", "import", "QUEUE"],
        input: "{\"body\":\"x\"}\n",
    },
    case("plan", &["topology", "plan", "FILE"]),
    case("apply", &["topology", "apply", "FILE"]),
    case("cast", &["call", "echo", "any", "x", "--cast"]),
    case("show", &["parking", "show", "QUEUE", "1"]),
    case("groups", &["parking", "groups", "QUEUE"]),
    case("replay", &["parking", "replay", "QUEUE", "--to-queue", "elsewhere", "--yes"]),
    case("edit", &["parking", "edit", "QUEUE", "--body", "y", "--to-queue", "elsewhere", "--yes"]),
    case("purge", &["parking", "purge", "QUEUE", "--yes"]),
    case(
        "delete",
        &["topology", "delete", "QUEUE", "--dry-run", "--management", "http://127.0.0.1:1"],
    ),
    // Its queue is empty, so that it goes.
    case("remove", &["topology", "delete", "QUEUE", "--management", "http://127.0.0.1:1"]),
    case(
        "migrate",
        &["topology", "migrate", "FILE", "elsewhere", "--management", "http://127.0.0.1:1"],
    ),
    case("bench", &["bench", "--messages", "10"]),
];

/// A broker with what the cases need.
struct Scene {
    place: Place,
    client: Client,
    folder: tempfile::TempDir,
    _working: JoinSet<()>,
}

impl Scene {
    async fn new() -> Scene {
        let topology =
            Topology::new().exchange(Exchange::topic("news")).queue(Queue::quorum("elsewhere"));
        let (place, client) = Place::with(topology).await;
        let folder = tempfile::tempdir().unwrap();
        let file =
            "[[queue]]\nname = \"elsewhere\"\ntype = \"quorum\"\n[[queue]]\nname = \"new\"\n";
        std::fs::write(folder.path().join("topology.toml"), file).unwrap();
        let mut working = JoinSet::new();
        let service = client.service("echo").fallback(async |message: leveret::Incoming| {
            Ok::<_, leveret::Failure>(message.body().to_vec())
        });
        service.declare().await.unwrap();
        working.spawn(async move { drop(service.run().await) });
        let news = client.publisher("news").allow_unroutable().build().await.unwrap();
        working.spawn(async move {
            // Whoever begins to listen hears something soon.
            let mut every = tokio::time::interval(Duration::from_millis(20));
            loop {
                every.tick().await;
                let _ = news.publish("a", "x").await;
            }
        });
        Scene { place, client, folder, _working: working }
    }

    /// Begins a command before which the broker falls silent after so many frames.
    async fn begin(
        &self,
        case: &Case,
        frames: usize,
        more: &[&str],
    ) -> (Proxy, tokio::process::Child) {
        let queue = format!("{}-{frames}{}", case.name, more.len());
        self.client.apply(&Topology::new().queue(Queue::quorum(&queue))).await.unwrap();
        let publisher = self.client.publisher("").build().await.unwrap();
        let bodies: &[&str] = if case.name == "remove" { &[] } else { &["one", "two"] };
        for &body in bodies {
            publisher.publish(&queue, body).await.unwrap();
        }
        let file = self.folder.path().join("topology.toml");
        let arguments = case.arguments.iter().map(|argument| match *argument {
            "QUEUE" => queue.as_str(),
            "FILE" => file.to_str().unwrap(),
            other => other,
        });
        let arguments: Vec<&str> = arguments.chain(more.iter().copied()).collect();
        let proxy = Proxy::to(self.place.url(), frames).await;
        let mut command = Command::from(self.place.program(&arguments));
        command.env("LEVERET_URL", &proxy.url).kill_on_drop(true);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(case.input.as_bytes()).await.unwrap();
        (proxy, child)
    }
}

/// Runs a check at all frames of all cases, many at the same time; it says whether the broker fell silent.
async fn at_every_frame<F>(check: impl Fn(Arc<Scene>, &'static Case, usize) -> F)
where
    F: Future<Output = bool> + Send + 'static,
{
    let scene = Arc::new(Scene::new().await);
    let mut running = JoinSet::new();
    let begin = |running: &mut JoinSet<_>, case, frames| {
        let checked = check(Arc::clone(&scene), case, frames);
        running.spawn(async move { (case, frames, checked.await) });
    };
    const STEP: usize = 4;
    for (case, first) in CASES.iter().flat_map(|case| (0..STEP).map(move |first| (case, first))) {
        begin(&mut running, case, first);
    }
    while let Some(checked) = running.join_next().await {
        let (case, frames, fell_silent): (&'static Case, usize, bool) = checked.unwrap();
        match fell_silent {
            true => begin(&mut running, case, frames + STEP),
            // A command hears some frames at least: start, tune, open-ok.
            false => assert!(frames > 3, "{}", case.name),
        }
    }
}

async fn ended(child: tokio::process::Child, what: &str) -> Said {
    let ended = timeout(SECONDS, child.wait_with_output()).await;
    ended.unwrap_or_else(|_| panic!("{what}: it has not ended")).unwrap().into()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_timeout_bounds_a_command_whenever_the_broker_falls_silent() {
    at_every_frame(|scene, case, frames| async move {
        let what = format!("{}, silent after {frames} frames", case.name);
        let (proxy, child) = scene.begin(case, frames, &["--timeout", "1s"]).await;
        let said = ended(child, &what).await;
        // A service that does not answer is no silence of the broker's; of lines, some may have been published.
        let is_partial =
            said.status == 1 && matches!(case.name, "call" | "lines" | "bench" | "migrate");
        // Of a queue that hands out nothing for so long, its leader may be as silent.
        let is_partial = is_partial || said.err.contains("its leader does not answer");
        let is_right = matches!(said.status, 0 | 69) || is_partial;
        assert!(is_right, "{what}: {said:?}");
        assert!(said.status == 0 || !said.err.is_empty(), "{what}: {said:?}");
        // That a broker lets clients connect is told, though it answers nothing else.
        let is_told = said.out.contains("connected in");
        assert!(case.name != "status" || frames < 3 || is_told, "{what}: {said:?}");
        proxy.is_silent()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_timeout_is_for_all_brokers_together() {
    let mut silent = Vec::new();
    for _ in 0..10 {
        silent.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let urls = silent.iter().map(|one| format!("amqp://{}", one.local_addr().unwrap()));
    let urls = urls.collect::<Vec<_>>().join(",");
    let mut running = JoinSet::new();
    for command in [&["get", "q"][..], &["topology", "delete", "q"], &["parking", "purge", "q"]] {
        let arguments = [command, &["--timeout", "1s", "--url", &urls]].concat();
        let mut command = Command::from(crate::support::program(&arguments));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let child = command.spawn().unwrap();
        running.spawn(async move { ended(child, "a command with ten brokers").await.status });
    }
    assert_eq!(running.join_all().await, [69; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_a_command_whenever_the_broker_falls_silent() {
    at_every_frame(|scene, case, frames| async move {
        let what = format!("{}, silent after {frames} frames", case.name);
        let (proxy, mut child) = scene.begin(case, frames, &["--timeout", "1h"]).await;
        tokio::select! {
            _ = child.wait() => return proxy.is_silent(),
            () = proxy.silence.began.notified() => {}
        }
        let (signal, status) = if frames % 2 == 0 { ("-TERM", 143) } else { ("-INT", 130) };
        let pid = child.id().unwrap().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().await.unwrap().success());
        let said = ended(child, &what).await;
        // It may have been done, or have failed otherwise, at that moment.
        let is_over = said.status == 0 || matches!(case.name, "call" | "migrate");
        assert!(said.status == status || is_over, "{what}: {said:?}");
        let words = ["nothing was", "may count as delivered", "is done", "under way", "published"];
        let is_told = words.iter().any(|words| said.err.contains(words));
        assert!(said.status != status || is_told, "{what}: {said:?}");
        true
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_the_demo_though_its_broker_is_silent() {
    let place = Place::new().await;
    for frames in [0, 3, 30] {
        let proxy = Proxy::to(place.url(), frames).await;
        let arguments = ["demo", "--messages", "100", "--url", &proxy.url];
        let mut command = Command::from(place.program(&arguments));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let child = command.spawn().unwrap();
        proxy.silence.began.notified().await;
        let pid = child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
        let said = ended(child, &format!("silent after {frames} frames")).await;
        assert_eq!(said.status, 143, "{said:?}");
        assert!(said.err.contains("stopped by SIGTERM"), "{said:?}");
    }
}
