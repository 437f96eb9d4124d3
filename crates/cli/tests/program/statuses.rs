//! How the program ends: with which status, and with which words.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use leveret::{Queue, Topology};
use leveret_testkit::certificates::Authority;
use leveret_testkit::eventually;
use leveret_testkit::web::TlsFront;
use rustix::fs::OFlags;
use rustix::io::ioctl_fionread;
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;

use crate::support::{Killed, Place, Said, leveret, on_a_terminal, program};

/// A broker with a user who may do nothing in the virtual host `/`, and none of whose names is in `shop`.
struct Guarded {
    address: String,
    _child: Killed,
    _folder: tempfile::TempDir,
}

impl Guarded {
    fn start() -> Guarded {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("broker.toml");
        let text = "virtual_hosts = [\"/\", \"shop\"]\n[[users]]\nname = \"ann\"\npassword = \"a\"\n\
                    [[users.permissions]]\nvirtual_host = \"/\"\n";
        fs::write(&file, text).unwrap();
        let arguments = ["broker", "--listen", "127.0.0.1:0", "--file", file.to_str().unwrap()];
        let child = program(&arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut child = Killed(child.unwrap());
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("listening on ").unwrap().split(',').next().unwrap();
        Guarded { address: address.to_owned(), _child: child, _folder: folder }
    }

    fn url(&self, user: &str, vhost: &str) -> String {
        format!("amqp://{user}@{}{vhost}", self.address)
    }
}

/// Runs a command to its end, with a line to read.
fn leveret_with_a_line(folder: &Path, arguments: &[&str]) -> Said {
    let line = fs::File::open(folder.join("lines.jsonl")).unwrap();
    program(arguments).stdin(line).output().unwrap().into()
}

/// A service that answers every request with this text, and where it listens.
async fn answering(text: &'static str) -> (JoinSet<()>, String) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let router = axum::Router::new().fallback(move || async move { text });
    let mut serving = JoinSet::new();
    serving.spawn(async move { axum::serve(listener, router).await.unwrap() });
    (serving, address)
}

async fn output_of_child(child: std::process::Child) -> Said {
    tokio::task::spawn_blocking(move || child.wait_with_output().unwrap()).await.unwrap().into()
}

async fn output_of(mut command: Command) -> Said {
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap().into()
}

fn is_on_both(said: &Said, words: &str) -> bool {
    said.out.contains(words) || said.err.contains(words)
}

/// Files that commands need.
fn files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("topology.toml"), "[[queue]]\nname = \"q\"\n").unwrap();
    fs::write(folder.path().join("lines.jsonl"), "{\"body\":\"x\"}\n").unwrap();
    let service = "[[consumer]]\nqueue = \"q\"\ncommand = [\"cat\"]\n";
    fs::write(folder.path().join("service.toml"), service).unwrap();
    folder
}

/// Each command that needs a broker.
fn commands(folder: &Path) -> Vec<Vec<String>> {
    let file = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (topology, lines) = (file("topology.toml"), file("lines.jsonl"));
    let service = file("service.toml");
    let commands: [&[&str]; 24] = [
        &["status"],
        &["status", "q"],
        &["get", "q"],
        &["get", "q", "--take"],
        &["publish", "q", "x"],
        &["publish", "q", "--lines"],
        &["call", "s", "m", "x"],
        &["tail", "amq.topic"],
        &["parking", "list", "q"],
        &["parking", "export", "q"],
        &["parking", "import", "q", &lines],
        &["topology", "plan", &topology],
        &["topology", "apply", &topology],
        &["call", "s", "m", "x", "--cast"],
        &["parking", "show", "q", "1"],
        &["parking", "groups", "q"],
        &["parking", "replay", "q", "--yes"],
        &["parking", "edit", "q", "--body", "y", "--yes"],
        &["parking", "move", "q", "--to-queue", "other"],
        &["parking", "purge", "q", "--yes"],
        &["topology", "delete", "q", "--management", "http://127.0.0.1:1"],
        &["topology", "migrate", &topology, "q", "--management", "http://127.0.0.1:1"],
        &["bench", "--messages", "10"],
        &["run", &service, "--connect-max-retries", "0"],
    ];
    commands.iter().map(|command| command.iter().map(|&word| word.to_owned()).collect()).collect()
}

#[test]
fn every_command_ends_with_the_status_of_the_table() {
    let (broker, folder) = (Guarded::start(), files());
    let missing = "cacertfile=/no/such/file";
    let cases = [
        (broker.url("ann:wrong", "/"), 77, "403 ACCESS_REFUSED"),
        (broker.url("ann:a", "/shop"), 77, "refused"),
        (broker.url("ann:a", "/nowhere"), 77, "no virtual host \"nowhere\""),
        (broker.url("ann:a", "/"), 77, "leave out the slash"),
        ("amqp://127.0.0.1:1".to_owned(), 69, "refused"),
        (format!("amqps://127.0.0.1:1?{missing}"), 2, missing.split('=').next().unwrap()),
        ("amqp://host:port".to_owned(), 2, "port"),
        ("amqp://ann:a,b@host".to_owned(), 2, "%2C"),
        ("amqp://ann:a@h1:5672,h2:5672/v".to_owned(), 2, "amqp://user:password@host2"),
    ];
    let check = |url: &str, status, words| {
        for command in commands(folder.path()) {
            let command = command.iter().map(String::as_str).chain(["--url", url]);
            let command: Vec<&str> = command.collect();
            let said = leveret_with_a_line(folder.path(), &command);
            assert_eq!(said.status, status, "{command:?}: {said:?}");
            assert!(is_on_both(&said, words), "{command:?}: {words:?} is not in {said:?}");
        }
    };
    std::thread::scope(|scope| {
        for (url, status, words) in &cases {
            scope.spawn(move || check(url, *status, words));
        }
    });
}

#[test]
fn a_user_without_permissions_is_told_so_by_every_command() {
    let (broker, folder) = (Guarded::start(), files());
    let url = broker.url("ann:a", "");
    for command in commands(folder.path()) {
        // To be let in, and to cast a message into the dark, needs none.
        if command == ["status"] || command.ends_with(&["--cast".to_owned()]) {
            continue;
        }
        // What a service may not do now, it may do later; and whether a queue can be migrated, the management API has to tell.
        if matches!(command[0].as_str(), "run") || command[1] == "migrate" {
            continue;
        }
        let command: Vec<&str> =
            command.iter().map(String::as_str).chain(["--url", &url]).collect();
        let said = leveret_with_a_line(folder.path(), &command);
        assert_eq!(said.status, 77, "{command:?}: {said:?}");
    }
}

#[test]
fn a_port_that_is_taken_is_named_with_what_to_do() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let said = leveret(&["broker", "--listen", &address]);
    assert_eq!(
        (said.status, said.err.contains("choose another port by --listen")),
        (1, true),
        "{said:?}"
    );
    for wrong in ["nonsense", "127.0.0.1:99999"] {
        assert_eq!(leveret(&["broker", "--listen", wrong]).status, 2, "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_whose_port_is_taken_says_what_to_do() {
    let place = Place::new().await;
    let folder = files();
    let file = folder.path().join("service.toml");
    fs::write(&file, "[[service]]\nname = \"s\"\ncommand = [\"cat\"]\n").unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let said = place.run(&["run", file.to_str().unwrap(), "--listen", &address]);
    assert_eq!(
        (said.status, said.err.contains("choose another port by --listen")),
        (1, true),
        "{said:?}"
    );
}

#[test]
fn the_guide_and_the_help_have_the_same_table_of_statuses() {
    let rows = |text: &str, begin: &str, end: &str, between: &str| -> Vec<(String, String)> {
        let rest = text.split_once(begin).expect(begin).1;
        let table = rest.split_once(end).map_or(rest, |(table, _)| table);
        let row = |line: &str| {
            let (status, meaning) = line.trim().trim_matches('|').trim().split_once(between)?;
            status.trim().parse::<u8>().ok()?;
            Some((status.trim().to_owned(), meaning.trim().to_owned()))
        };
        table.lines().filter_map(row).collect()
    };
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
    let page = fs::read_to_string(page).unwrap();
    let guide = rows(&page, "## Exit status", "\n## ", "|");
    let help = leveret(&["--help"]).ok();
    // A terminal's width breaks lines; a pipe has none.
    assert_eq!(guide, rows(&help, "Exit status:", "\n\n", " "));
    assert_eq!(guide.len(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_stopped_twice_ends_with_the_status_of_the_second_signal() {
    let place = Place::new().await;
    let folder = files();
    let (file, began) = (folder.path().join("service.toml"), folder.path().join("began"));
    let command = format!("touch {}; sleep 600", began.display());
    let text = format!("[[service]]\nname = \"s\"\ncommand = [\"sh\", \"-c\", {command:?}]\n");
    fs::write(&file, text).unwrap();
    for (signal, status, words) in
        [(Signal::TERM, 143, "stopped by SIGTERM"), (Signal::INT, 130, "stopped by Ctrl-C")]
    {
        let arguments = ["run", file.to_str().unwrap(), "--drain", "10m"];
        let child = place.program(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = Killed(child.unwrap());
        let mut out = BufReader::new(child.0.stdout.take().unwrap()).lines();
        assert!(out.any(|line| line.unwrap().starts_with("running: ")));
        place.run(&["call", "s", "any", "x", "--cast"]).ok();
        eventually(Duration::from_secs(60), "the handler", || async { began.exists() }).await;
        fs::remove_file(&began).unwrap();
        let process = Pid::from_child(&child.0);
        kill_process(process, signal).unwrap();
        // So that the two do not come as one: a service that is stopping takes no further request.
        let is_stopping =
            || async { place.run(&["status", "s", "--json"]).out.contains("\"consumers\":0") };
        eventually(Duration::from_secs(60), "the service to stop", is_stopping).await;
        kill_process(process, signal).unwrap();
        let mut err = String::new();
        std::io::Read::read_to_string(&mut child.0.stderr.take().unwrap(), &mut err).unwrap();
        assert_eq!(child.0.wait().unwrap().code(), Some(status), "{err}");
        assert!(err.contains(words), "{err}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_has_gone_is_no_error() {
    let place = Place::new().await;
    let folder = files();
    let topology = folder.path().join("topology.toml");
    let topology = topology.to_str().unwrap();
    place.run(&["topology", "apply", topology]).ok();
    let many = "x\n".repeat(3000);
    place.run_with_input(&["publish", "q", "--lines"], &many).ok();
    let commands: [&[&str]; 9] = [
        &["parking", "export", "q"],
        &["parking", "list", "q"],
        &["get", "q", "-n", "3000", "--json"],
        &["get", "q", "-n", "10", "--raw"],
        &["status", "q"],
        &["topology", "graph", topology],
        &["completions", "bash"],
        &["man"],
        &["--help"],
    ];
    for arguments in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = place.program(arguments).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let said = Said::from(child.wait_with_output().unwrap());
        assert!(said.status == 0 && !said.err.contains("pipe"), "{arguments:?}: {said:?}");
    }
    // All are there still.
    assert!(place.run(&["status", "q", "--json"]).out.contains("\"messages\":3000"));
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_from_elsewhere_cannot_move_the_cursor_or_forge_a_line() {
    let hostile = "x\u{1b}[2J\r\nleveret: forged\u{202e}\u{9b}";
    let place = Place::new().await;
    let broker = Guarded::start();
    let url = broker.url("ann:a", "");
    for said in [
        place.run(&["get", hostile]),
        place.run(&["status", hostile]),
        place.run(&["tail", hostile]),
        place.run(&["publish", "k", "x", "--exchange", hostile]),
        leveret(&["get", hostile, "--url", &url]),
        leveret(&["status", hostile, "--url", &url]),
    ] {
        let text = said.out.clone() + &said.err;
        let is_hostile = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
        assert!(!text.contains(is_hostile), "{said:?}");
        assert!(!text.lines().any(|line| line.starts_with("leveret: forged")), "{said:?}");
    }
    let folder = files();
    place.run(&["topology", "apply", folder.path().join("topology.toml").to_str().unwrap()]).ok();
    place.run(&["publish", "q", hostile, "--message-id", hostile]).ok();
    for command in [
        &["get", "q", "--json"][..],
        &["parking", "export", "q"],
        &["parking", "list", "q", "--json"],
    ] {
        let said = place.run(command).ok();
        assert!(said.trim_end().chars().all(|c| c.is_ascii() && !c.is_control()), "{said:?}");
    }
    // The message id is named.
    let said = place.run(&["parking", "move", "q", "--to-queue", "nosuch"]);
    assert!(said.err.contains("leveret: message 1 (x"), "{said:?}");
    assert!(!said.err.lines().any(|line| line.starts_with("leveret: forged")), "{said:?}");
    for command in [&["get", "q"][..], &["parking", "show", "q", "1"], &["parking", "list", "q"]] {
        let said = place.run(command).ok();
        assert!(!said.contains(['\u{1b}', '\u{202e}', '\u{9b}', '\r']), "{said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_or_exchange_that_is_missing_is_named_in_a_sentence() {
    let place = Place::new().await;
    for (command, kind) in [
        (&["get", "nosuch"][..], "queue"),
        (&["get", "nosuch", "--take"], "queue"),
        (&["status", "nosuch"], "queue"),
        (&["parking", "list", "nosuch"], "queue"),
        (&["tail", "nosuch"], "exchange"),
        (&["publish", "k", "x", "--exchange", "nosuch"], "exchange"),
    ] {
        let said = place.run(command);
        let words = format!("there is no {kind} \"nosuch\" in virtual host \"/\"");
        assert!(said.status == 1 && is_on_both(&said, &words), "{command:?}: {said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_web_server_is_told_from_a_broker() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("amqp://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move { axum::serve(listener, axum::Router::new()).await });
    let said = tokio::task::spawn_blocking(move || leveret(&["status", "--url", &url]));
    let said = said.await.unwrap();
    assert!(said.status == 69 && is_on_both(&said, "the port speaks HTTP"), "{said:?}");
    serving.abort();
}

#[test]
fn a_named_pipe_in_place_of_a_certificate_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("ca.pem");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let url = format!("amqps://127.0.0.1:1?cacertfile={}", pipe.display());
    for command in [&["status"][..], &["get", "q"]] {
        let said = leveret(&[command, &["--url", &url]].concat());
        assert!(said.status == 2 && is_on_both(&said, "no regular file"), "{said:?}");
    }
}

#[test]
fn too_few_files_are_an_error_and_no_panic() {
    let own = env!("CARGO_BIN_EXE_leveret");
    for limit in 3..24 {
        for command in ["status --url amqp://127.0.0.1:1", "broker --listen 127.0.0.1:0"] {
            let line = format!("ulimit -n {limit}; exec timeout 5 {own} {command}");
            let said = Said::from(Command::new("sh").args(["-c", &line]).output().unwrap());
            assert!(!said.err.contains("panicked"), "{limit}: {said:?}");
        }
    }
    let line = format!("ulimit -n 4; exec {own} status");
    let said = Said::from(Command::new("sh").args(["-c", &line]).output().unwrap());
    assert!(said.status == 1 && said.err.contains("ulimit -n"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn both_variables_for_logs_are_read_and_tls_is_logged() {
    let place = Place::new().await;
    for variable in ["LEVERET_LOG", "RUST_LOG"] {
        let mut status = place.program(&["status"]);
        status.env_remove("LEVERET_LOG").env_remove("RUST_LOG").env(variable, "leveret=debug");
        let said = Said::from(status.output().unwrap());
        assert!(said.err.contains("connected to amqp://"), "{variable}: {said:?}");
    }
    let authority = Authority::new("authority");
    let port = place.url().rsplit(':').next().unwrap().parse().unwrap();
    let front = TlsFront::before(port, &authority.server(&["127.0.0.1"])).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    fs::write(&file, authority.certificate()).unwrap();
    let url = format!("amqps://127.0.0.1:{}?cacertfile={}", front.port(), file.display());
    let said = tokio::task::spawn_blocking(move || {
        let mut status = program(&["status", "--url", &url]);
        Said::from(status.env("LEVERET_LOG", "trace").output().unwrap())
    });
    let said = said.await.unwrap();
    for words in ["TLS with amqps://", "DEBUG rustls", "DEBUG leveret"] {
        assert!(said.err.contains(words), "{words:?} is not in {said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_a_command_whose_output_nothing_reads() {
    let (place, folder) = (Place::new().await, files());
    place.run(&["topology", "apply", folder.path().join("topology.toml").to_str().unwrap()]).ok();
    place.run_with_input(&["publish", "q", "--lines"], &"x\n".repeat(3000)).ok();
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    for (arguments, signal, status) in [
        (&["get", "q", "-n", "3000", "--json"][..], Signal::TERM, 143),
        (&["parking", "export", "q"], Signal::INT, 130),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut command = place.program(arguments);
        command.stdout(writer.try_clone().unwrap()).stderr(writer);
        let child = Killed(command.spawn().unwrap());
        drop(command);
        // A pipe has 64 KiB.
        let is_full = || async { ioctl_fionread(&reader).unwrap() > 60_000 };
        eventually(Duration::from_secs(60), "the pipe to be full", is_full).await;
        // To the last byte, so that there is no room for words either.
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let mut options = fs::File::options();
        let mut rest = options.write(true).custom_flags(nonblocking).open(path).unwrap();
        while std::io::Write::write(&mut rest, b"x").is_ok() {}
        let process = Pid::from_child(&child.0);
        kill_process(process, signal).unwrap();
        kill_process(process, signal).unwrap();
        let child = Mutex::new(child);
        let end = || async {
            // Signals that come as one are one.
            let _ = kill_process(process, signal);
            child.lock().unwrap().0.try_wait().unwrap()
        };
        eventually(Duration::from_secs(30), "the end of the command", || async {
            end().await.is_some()
        })
        .await;
        let ended = child.lock().unwrap().0.wait();
        assert_eq!(ended.unwrap().code(), Some(status), "{arguments:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_has_gone_does_not_hide_a_failure() {
    let (place, folder) = (Place::new().await, files());
    let topology = folder.path().join("topology.toml");
    let topology = topology.to_str().unwrap();
    place.run(&["topology", "apply", topology]).ok();
    place.run(&["publish", "q", "x"]).ok();
    fs::write(topology, "[[queue]]\nname = \"q\"\ndurable = false\n").unwrap();
    for (arguments, input) in [
        (&["topology", "plan", topology][..], ""),
        (&["topology", "apply", topology], ""),
        (&["publish", "nosuch", "--lines"], "a\nb\n"),
        (&["status", "nosuch"], ""),
        (&["parking", "move", "q", "--to-queue", "nosuch"], ""),
        (&["parking", "import", "q"], "no JSON\n"),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = place.program(arguments);
        let child = command.stdin(Stdio::piped()).stdout(writer).stderr(Stdio::piped()).spawn();
        let mut child = child.unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), input.as_bytes()).unwrap();
        let said = Said::from(child.wait_with_output().unwrap());
        assert!(said.status == 1 && !said.err.contains("pipe"), "{arguments:?}: {said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_that_were_published_before_a_signal_are_counted() {
    let (place, client) = Place::with(Topology::new().queue(Queue::classic("q"))).await;
    let mut command = place.program(&["publish", "q", "--lines"]);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"a\nb\n").unwrap();
    place.until_has(&client, "q", 2).await;
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let said = Said::from(child.wait_with_output().unwrap());
    assert_eq!((said.status, said.out.as_str()), (143, "2 messages published\n"), "{said:?}");
    assert!(!said.err.contains("not confirmed"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_fails_is_told_of_while_the_next_one_is_awaited() {
    let place = Place::new().await;
    let mut command = place.program(&["publish", "nosuch", "--lines"]);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = Killed(child.unwrap());
    let mut stdin = child.0.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"a\n").unwrap();
    let mut told = BufReader::new(child.0.stderr.take().unwrap());
    let line = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        told.read_line(&mut line).unwrap();
        line
    });
    let line = tokio::time::timeout(Duration::from_secs(60), line).await;
    // The end of the input ends a command that says nothing.
    drop(stdin);
    let line = line.expect("it says nothing before the next line").unwrap();
    assert!(line.contains("line 1"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_that_a_signal_stops_says_how_many_messages_are_done() {
    let queues = ["full", "moved", "imported"].map(Queue::classic);
    let (place, client) =
        Place::with(queues.into_iter().fold(Topology::new(), Topology::queue)).await;
    place.run_with_input(&["publish", "full", "--lines"], &"x\n".repeat(1000)).ok();
    let folder = tempfile::tempdir().unwrap();
    let lines = folder.path().join("lines.jsonl");
    fs::write(&lines, "{\"body\":\"x\"}\n".repeat(1000)).unwrap();
    let slowly = ["--rate", "10"];
    for (arguments, queue, word) in [
        (&["parking", "move", "full", "--to-queue", "moved"][..], "moved", "moved"),
        (&["parking", "import", "imported", lines.to_str().unwrap()], "imported", "imported"),
    ] {
        let mut command = place.program(&[arguments, &slowly].concat());
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let some = || async { client.inspect_queue(queue).await.unwrap().messages >= 10 };
        eventually(Duration::from_secs(60), "some messages to be done", some).await;
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let said = Said::from(child.wait_with_output().unwrap());
        let told = said.err.split("at least ").nth(1).unwrap_or_default();
        let is_told = told.starts_with(|c: char| c.is_ascii_digit()) && told.contains(word);
        assert!(said.status == 143 && is_told, "{said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_written_leaves_nothing_behind() {
    let folder = files();
    let picture = folder.path().join("picture.mmd");
    let [topology, picture] = [&folder.path().join("topology.toml"), &picture]
        .map(|path| path.to_str().unwrap().to_owned());
    let graph = ["topology", "graph", &topology, "-o", &picture];
    // No file can grow, as on a full disk.
    let full = r#"trap "" XFSZ; ulimit -f 0; exec "$0" "$@""#;
    let on_a_full_disk = |arguments: &[&str]| {
        let mut command = Command::new("sh");
        command.args(["-c", full, env!("CARGO_BIN_EXE_leveret")]).args(arguments);
        Said::from(command.output().unwrap())
    };
    let there = || fs::read_dir(folder.path()).unwrap().count();
    let before = there();
    let said = on_a_full_disk(&graph);
    assert!(said.status == 1 && there() == before, "{said:?}");
    fs::write(&picture, "the one from before").unwrap();
    let said = on_a_full_disk(&graph);
    assert!(said.status == 1 && there() == before + 1, "{said:?}");
    assert_eq!(fs::read_to_string(&picture).unwrap(), "the one from before");
    leveret(&graph).ok();
    assert!(fs::read_to_string(&picture).unwrap().starts_with("flowchart"));

    let manual = folder.path().join("manual");
    let said = on_a_full_disk(&["man", manual.to_str().unwrap()]);
    assert_eq!(said.status, 1, "{said:?}");
    // A path that is wrong is another matter.
    for path in ["nosuch/picture.mmd", "topology.toml/picture.mmd", "."] {
        let path = folder.path().join(path);
        let said = leveret(&["topology", "graph", &topology, "-o", path.to_str().unwrap()]);
        assert_eq!(said.status, 2, "{path:?}: {said:?}");
    }
    assert_eq!(leveret(&["man", &topology]).status, 2);
    let said = leveret(&["topology", "graph", &topology, "-o", "/dev/stdout"]);
    assert!(said.status == 0 && said.out.starts_with("flowchart"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_error_is_a_line_of_json_if_results_are() {
    let (place, folder) = (Place::new().await, files());
    place.run(&["topology", "apply", folder.path().join("topology.toml").to_str().unwrap()]).ok();
    place.run(&["publish", "q", "x"]).ok();
    for (arguments, input, words) in [
        (&["publish", "nosuch", "--lines"][..], "a\nb\n", "line 2"),
        (&["parking", "import", "q"], "no JSON\n", "line 1"),
        (&["parking", "move", "q", "--to-queue", "nosuch"], "", "message 1"),
        (&["status", "q", "--management", "http://127.0.0.1:1"], "", "not counted"),
        (&["get", "q", "--take", "--count", "2", "--url", "amqp://127.0.0.1:1"], "", "refused"),
    ] {
        let said = place.run_with_input(&[arguments, &["--json"]].concat(), input);
        let told = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect(line);
        let errors: Vec<_> = said.err.lines().map(told).collect();
        let is_told = |error: &serde_json::Value| error["error"].as_str().unwrap().contains(words);
        assert!(errors.iter().any(is_told), "{arguments:?}: {said:?}");
        // What the command as a whole came to is the last one.
        let statuses: Vec<_> = errors.iter().map(|error| error["status"].as_i64()).collect();
        let last = (said.status != 0).then_some(Some(said.status.into()));
        let parts = statuses.len() - usize::from(last.is_some());
        let expected: Vec<_> = std::iter::repeat_n(None, parts).chain(last).collect();
        assert_eq!(statuses, expected, "{arguments:?}: {said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_hangs_ends_with_a_line_of_json_if_results_are() {
    let (place, client) = Place::with(Topology::new().queue(Queue::classic("q"))).await;
    let mut command = place.program(&["parking", "import", "q", "--json"]);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    // More lines are awaited, by a read that nothing interrupts.
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"{\"body\":\"x\"}\n").unwrap();
    place.until_has(&client, "q", 1).await;
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let said = output_of_child(child).await;
    let told: serde_json::Value = serde_json::from_str(&said.err).expect(&said.err);
    assert!(said.status == 143 && told["status"] == 143, "{said:?}");
    drop(stdin);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_a_field_forges_no_line() {
    let (place, folder) = (Place::new().await, tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let toml = "\"x\\nleveret: forged\" = 1\n";
    fs::write(path("wrong.toml"), toml).unwrap();
    fs::write(path("wrong.yaml"), "\"x\\nleveret: forged\": 1\n").unwrap();
    fs::write(path("wrong.jsonl"), "{\"x\\nleveret: forged\":1,\"body\":\"x\"}\n").unwrap();
    fs::write(path("topology.toml"), "[[queue]]\nname = \"lot\"\n").unwrap();
    place.run(&["topology", "apply", &path("topology.toml")]).ok();
    let (_serving, address) = answering("\"x\\nleveret: forged\" = 1\n").await;
    let (toml, yaml) = (path("wrong.toml"), path("wrong.yaml"));
    for arguments in [
        &["topology", "graph", &toml][..],
        &["topology", "graph", &yaml],
        &["run", &toml, "--check"],
        &["run", &yaml, "--check"],
        &["parking", "import", "lot", &path("wrong.jsonl")],
        &["topology", "export", &address],
    ] {
        let said = output_of(place.program(arguments)).await;
        assert!(said.status != 0 && said.err.contains("forged"), "{arguments:?}: {said:?}");
        let is_forged = said.err.lines().any(|line| line.starts_with("leveret: forged"));
        assert!(!is_forged, "{arguments:?}: {said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exported_topology_has_the_same_names_with_invisible_characters_escaped() {
    let place = Place::new().await;
    let (_serving, address) = answering("[[queue]]\nname = \"a\u{202e}b\u{e0041}\"\n").await;
    let said = output_of(place.program(&["topology", "export", &address])).await.ok();
    assert_eq!(said, "[[queue]]\nname = \"a\\u202eb\\U000e0041\"\n");
    // In single quotes, TOML has no escapes.
    let (_serving, address) = answering("[[queue]]\nname = 'a\u{202e}\"'\n").await;
    let said = output_of(place.program(&["topology", "export", &address])).await;
    assert!(said.status == 1 && said.err.contains("invisible"), "{said:?}");
    assert!(!is_on_both(&said, "\u{202e}"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_cannot_be_shown_is_not_answered() {
    let (place, client) = Place::with(Topology::new().queue(Queue::classic("q"))).await;
    place.run(&["publish", "q", "x"]).ok();
    let mut command = Command::new("sh");
    command.args(["-c", r#"exec "$0" "$@" 2>/dev/full"#, env!("CARGO_BIN_EXE_leveret")]);
    command.args(["parking", "purge", "q", "--url", place.url()]);
    let (shown, status) = on_a_terminal(command, "y\n");
    assert_eq!(status, 1, "{shown}");
    place.until_has(&client, "q", 1).await;
}

#[test]
fn a_service_whose_two_files_have_another_queue_of_one_name_is_refused() {
    let folder = files();
    let service = folder.path().join("service.toml");
    let of_type = |queue_type: &str| {
        let inner = format!("[[topology.queue]]\nname = \"q\"\ntype = {queue_type:?}\n");
        let text = "[[consumer]]\nqueue = \"q\"\ncommand = [\"cat\"]\n";
        fs::write(&service, format!("topology-file = \"topology.toml\"\n{text}{inner}")).unwrap();
        leveret(&["run", service.to_str().unwrap(), "--check"])
    };
    let there = "[[queue]]\nname = \"q\"\ntype = \"quorum\"\n";
    fs::write(folder.path().join("topology.toml"), there).unwrap();
    of_type("quorum").ok();
    let said = of_type("classic");
    assert!(said.status == 2 && said.err.contains("queue \"q\" is described"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_no_wrong_argument() {
    let (place, folder) = (Place::new().await, files());
    place.run(&["topology", "apply", folder.path().join("topology.toml").to_str().unwrap()]).ok();
    place.run(&["publish", "q", "x"]).ok();
    for arguments in [&["parking", "export", "q"][..], &["get", "q"], &["parking", "list", "q"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let said = Said::from(place.program(arguments).stdout(full).output().unwrap());
        assert!(said.status == 1 && said.err.contains("No space left"), "{arguments:?}: {said:?}");
    }
}

#[test]
fn the_demo_ends_with_the_status_of_the_table() {
    let broker = Guarded::start();
    for (url, status) in [
        ("http://localhost".to_owned(), 2),
        ("amqps://localhost".to_owned(), 2),
        ("amqp://127.0.0.1:1".to_owned(), 69),
        (broker.url("ann:wrong", "/"), 77),
    ] {
        let said = leveret(&["demo", "--url", &url]);
        assert_eq!(said.status, status, "{url}: {said:?}");
    }
}

#[test]
fn a_mistake_in_the_brokers_file_is_a_wrong_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("broker.toml");
    let ann = "[[users]]\nname = \"ann\"\npassword = \"a\"\n";
    let permission = |vhost: &str, pattern: &str| {
        format!("{ann}[[users.permissions]]\nvirtual_host = {vhost:?}\nread = {pattern:?}\n")
    };
    for text in [format!("{ann}{ann}"), permission("nowhere", ""), permission("/", "(")] {
        fs::write(&file, &text).unwrap();
        let arguments = ["broker", "--listen", "127.0.0.1:0", "--file", file.to_str().unwrap()];
        let said = leveret(&arguments);
        assert_eq!(said.status, 2, "{text}: {said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_whose_messages_go_to_one_consumer_alone_is_no_missing_broker() {
    let queue = Queue::classic("q").single_active_consumer();
    let (place, client) = Place::with(Topology::new().queue(queue)).await;
    let mut consuming = client.consumer("q").prefetch(1).stream().await.unwrap();
    for body in ["one", "two"] {
        place.run(&["publish", "q", body]).ok();
    }
    let held = consuming.next().await;
    let said = place.run(&["get", "q"]);
    assert!(said.status == 1 && said.err.contains("another consumer"), "{said:?}");
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
async fn status_asks_the_management_api_only_where_it_is_said_to_be() {
    let (place, folder) = (Place::new().await, files());
    place.run(&["topology", "apply", folder.path().join("topology.toml").to_str().unwrap()]).ok();
    let said = place.run(&["status", "q"]);
    assert!(said.status == 0 && said.err.is_empty(), "{said:?}");
    let said = place.run(&["status", "q", "--management", "http://127.0.0.1:1"]);
    assert!(said.status == 0 && said.err.contains("are not counted"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_in_a_file_is_never_quoted() {
    let (place, folder) = (Place::new().await, tempfile::tempdir().unwrap());
    let secret = "amqp://shop:pw5151@host/v";
    for (name, text) in [
        ("service.toml", format!("queue = \"{secret}\"\n")),
        ("url.yaml", secret.to_owned()),
        ("bind.toml", format!("[[queue]]\nname = \"q\"\nbind = \"{secret}\"\n")),
        ("line.jsonl", format!("\"{secret}\"\n")),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap();
        let run = folder.path().join("run.toml");
        fs::write(&run, format!("topology-file = {path:?}\n")).unwrap();
        for command in [
            &["topology", "plan", path][..],
            &["topology", "graph", path],
            &["run", run.to_str().unwrap()],
            &["parking", "import", "lot", path, "--dry-run"],
        ] {
            let said = place.run(command);
            assert_ne!(said.status, 0, "{command:?}: {said:?}");
            assert!(!is_on_both(&said, "pw5151"), "{command:?}: {said:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_too_long_in_a_file_is_a_wrong_file() {
    let (place, folder) = (Place::new().await, files());
    let topology = folder.path().join("topology.toml");
    let topology = topology.to_str().unwrap();
    fs::write(topology, format!("[[queue]]\nname = \"{}\"\n", "q".repeat(256))).unwrap();
    for command in ["plan", "apply"] {
        let said = place.run(&["topology", command, topology]);
        assert!(said.status == 2 && is_on_both(&said, "at most 255"), "{said:?}");
    }
    let (service, long) = (folder.path().join("service.toml"), "x".repeat(256));
    let consumer = "[[consumer]]\nqueue = \"q\"\ncommand = [\"cat\"]\n";
    let queue = format!("{consumer}[[topology.queue]]\nname");
    for text in [
        format!("[[consumer]]\nqueue = {long:?}\ncommand = [\"cat\"]\n"),
        format!("[[service]]\nname = {long:?}\ncommand = [\"cat\"]\n"),
        format!("[[service]]\nname = \"s\"\nexchange = {long:?}\ncommand = [\"cat\"]\n"),
        format!("{consumer}[[topology.exchange]]\nname = {long:?}\ntype = \"topic\"\n"),
        format!("{queue} = {long:?}\n"),
        format!("{queue} = \"q\"\nbind = [{{ exchange = \"x\", key = {long:?} }}]\n"),
        format!("{queue} = \"q\"\nbind = [{{ exchange = {long:?} }}]\n"),
    ] {
        fs::write(&service, &text).unwrap();
        let said = leveret(&["run", service.to_str().unwrap(), "--check"]);
        assert!(said.status == 2 && said.err.contains("at most 255"), "{text}: {said:?}");
    }
}

#[test]
fn a_wrong_argument_is_told_as_json_if_results_are() {
    for arguments in [&["get", "--json"][..], &["get", "q", "--json", "--count", "many"]] {
        let said = leveret(arguments);
        let told: serde_json::Value = serde_json::from_str(&said.err).expect(&said.err);
        assert!(said.status == 2 && told["status"] == 2, "{said:?}");
        assert!(told["error"].as_str().is_some_and(|text| !text.is_empty()), "{said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_port_answers_is_shown_neither_raw_nor_whole() {
    let hostile = "<h1>\u{1b}[2J\r\nleveret: forged</h1>".to_owned() + &"long".repeat(1000);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let place = Place::new().await;
    let answer = axum::routing::any(|uri: axum::http::Uri| async move {
        let status = if uri.path().starts_with("/fails") { 500 } else { 200 };
        (axum::http::StatusCode::from_u16(status).unwrap(), hostile)
    });
    let router = axum::Router::new().fallback(answer);
    let serving = tokio::spawn(async move { axum::serve(listener, router).await });
    for path in ["", "/fails"] {
        let url = format!("http://{address}{path}");
        let folder = files();
        let topology = folder.path().join("topology.toml");
        for arguments in [
            &["topology", "export", &url][..],
            &["topology", "migrate", topology.to_str().unwrap(), "q", "--management", &url],
        ] {
            let mut command = place.program(arguments);
            let output = tokio::task::spawn_blocking(move || command.output().unwrap());
            let said = Said::from(output.await.unwrap());
            let text = said.out.clone() + &said.err;
            assert!(said.status == 1 && text.len() < 1000, "{said:?}");
            assert!(!text.contains(['\u{1b}', '\r']), "{said:?}");
            assert!(!text.lines().any(|line| line.starts_with("leveret: forged")), "{said:?}");
        }
    }
    serving.abort();
}
