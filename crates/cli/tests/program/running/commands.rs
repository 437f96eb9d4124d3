//! Commands as handlers: what is believed of them, and what they leave behind.

use leveret::Message;
use leveret::amqp::{Properties, ShortStr};

use super::*;

/// Waits until a process is gone.
async fn until_ended(process: &str) {
    eventually(PATIENCE, format!("the end of process {process}"), || async {
        let mut command = Command::new("kill");
        !command.args(["-0", process]).stderr(Stdio::null()).status().unwrap().success()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_takes_too_long_is_ended_with_all_it_has_started() {
    let place = Place::new().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
timeout = "300ms"
retry = {{ wait = "50ms", times = 0 }}
command = ["sh", "-c", "sleep 600 & echo $! >> FOLDER/sleeping; wait"]
"#
    );
    let client = place.client().await;
    let running = Running::start(&place, &file, &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    place.until_has(&client, "billing.parked", 1).await;
    let parked = place.run(&["parking", "list", "billing.parked", "--json"]).json();
    assert_eq!(parked[0]["story"]["kind"], "timeout");
    let process = fs::read_to_string(running.path("sleeping")).unwrap().trim().to_owned();
    until_ended(&process).await;
    running.stop();
    client.close().await;
}

/// A process that it has left behind keeps its output open.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_ends_well_is_believed_and_what_it_leaves_behind_is_ended() {
    let place = Place::new().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
timeout = "30s"
command = ["sh", "-c", "sleep 600 & echo $! >> FOLDER/billing"]

[[service]]
name = "quotes"
timeout = "30s"
command = ["sh", "-c", "sleep 600 & echo $! >> FOLDER/quotes; echo 17"]
"#
    );
    let running = Running::start(&place, &file, &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    assert_eq!(place.run(&["call", "quotes", "any", "x", "--raw"]).ok(), "17\n\n");
    for name in ["billing", "quotes"] {
        until_ended(&until_lines(&running.path(name), 1).await[0]).await;
    }
    assert_eq!(running.stop(), "stopped: 2 messages handled\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_reply_may_be_of_any_length() {
    let place = Place::new().await;
    let answer = post(async || vec![b'x'; 17 * 1024 * 1024]);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/", answer);
    let serving = tokio::spawn(async move { axum::serve(listener, router).await });
    let file = format!(
        r#"{TOPOLOGY}
[[topology.queue]]
name = "audit"

[[consumer]]
queue = "billing"
command = ["sh", "-c", "head -c 17825792 /dev/zero && echo x >> FOLDER/seen"]

[[consumer]]
queue = "audit"
http = "http://{address}/"
"#
    );
    let client = place.client().await;
    let running = Running::start(&place, &file, &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    place.run(&["publish", "audit", "x"]).ok();
    until_lines(&running.path("seen"), 1).await;
    place.until_has(&client, "audit", 0).await;
    assert_eq!(running.stop(), "stopped: 2 messages handled\n");
    serving.abort();
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_killed_takes_its_commands_along() {
    let place = Place::new().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
command = ["sh", "-c", "cat > FOLDER/body; sleep 600 & echo $! >> FOLDER/sleeping; echo $$ >> FOLDER/sleeping; wait"]
"#
    );
    let running = Running::start(&place, &file, &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    let processes = until_lines(&running.path("sleeping"), 2).await;
    running.signal(Signal::KILL);
    for process in processes {
        until_ended(&process).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_not_told_the_password_of_the_broker() {
    let place = Place::new().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
command = ["sh", "-c", "env | grep -e ^LEVERET -e sesame >> FOLDER/env; echo end >> FOLDER/env"]
"#
    );
    let own = [("LEVERET_PRIORITY", Path::new("9")), ("LEVERET_TOKEN", Path::new("sesame"))];
    let running = Running::start_with(&place, &file, &[], &own);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    let env = eventually(PATIENCE, "the variables of the command", || async {
        let text = fs::read_to_string(running.path("env")).unwrap_or_default();
        text.ends_with("end\n").then_some(text)
    })
    .await;
    assert!(env.contains("LEVERET_ROUTING_KEY=order.new"), "{env}");
    for name in ["LEVERET_URL", "LEVERET_PRIORITY", "sesame", place.url()] {
        assert!(!env.contains(name), "{name} is in {env}");
    }
    running.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_command_complains_of_is_one_line_of_the_log() {
    let place = Place::new().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
retry = {{ waits = ["50ms"] }}
command = ["sh", "-c", "printf 'no\\r\\nforged: all is well\\033[2J\\n' >&2; exit 75"]
"#
    );
    let client = place.client().await;
    let running = Running::start(&place, &file, &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders", "--message-id", "order-17"]).ok();
    place.until_has(&client, "billing.parked", 1).await;
    let log = running.until_logged("is parked").await;
    let forged: Vec<&str> = log.lines().filter(|line| line.contains("forged")).collect();
    assert_eq!(forged.len(), 2, "{log}");
    for line in forged {
        for part in ["billing", "order.new", "order-17", r"no\r\nforged"] {
            assert!(line.contains(part), "{part:?} is not in {line:?}");
        }
    }
    assert!(!log.contains(['\r', '\x1b']), "{log:?}");
    running.stop();
    client.close().await;
}

/// The process that ends the commands of a service that is killed.
fn reaper_of(service: &Running) -> Option<String> {
    let parent = format!("PPid:\t{}", service.child.0.id());
    let is_reaper = |process: &PathBuf| {
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        let command = fs::read_to_string(process.join("cmdline")).unwrap_or_default();
        status.lines().any(|line| line == parent) && command.contains("__reap")
    };
    let mut processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let found = processes.find(is_reaper)?;
    Some(found.file_name().unwrap().to_str().unwrap().to_owned())
}

/// Kills the reaper of a service, and waits for the next one.
async fn replace_reaper(service: &Running) {
    let reaper = reaper_of(service).expect("a reaper");
    assert!(Command::new("kill").args(["-9", &reaper]).status().unwrap().success());
    eventually(PATIENCE, "another reaper", async || {
        reaper_of(service).is_some_and(|found| found != reaper)
    })
    .await;
}

/// A consumer whose command starts a process that stays until it is ended. It reads the body first: by then the reaper knows
/// the command.
fn sleeping_command() -> String {
    format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
workers = 2
timeout = "1h"
command = ["sh", "-c", "cat > FOLDER/body; sleep 600 & echo $! >> FOLDER/sleeping; wait"]
"#
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reaper_that_is_killed_is_replaced_and_knows_the_commands_at_work() {
    let place = Place::new().await;
    let running = Running::start(&place, &sleeping_command(), &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    until_lines(&running.path("sleeping"), 1).await;
    // No command starts or ends meanwhile.
    replace_reaper(&running).await;
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    let processes = until_lines(&running.path("sleeping"), 2).await;
    running.signal(Signal::KILL);
    for process in processes {
        until_ended(&process).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reaper_is_replaced_although_the_program_is_gone_from_its_path() {
    let place = Place::new().await;
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("leveret");
    fs::copy(env!("CARGO_BIN_EXE_leveret"), &copy).unwrap();
    let mut command = Command::new(&copy);
    command.env("LEVERET_URL", place.url());
    let mut running = Running::spawn_by(command, &sleeping_command(), &[]);
    running.until("running: ");
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    until_lines(&running.path("sleeping"), 1).await;
    fs::remove_file(&copy).unwrap();
    replace_reaper(&running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_a_signal_has_killed_is_tried_again() {
    let place = Place::new().await;
    let client = place.client().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
retry = {{ waits = ["50ms"] }}
command = ["sh", "-c", "echo $LEVERET_ATTEMPT >> FOLDER/seen; kill -9 $$"]
"#
    );
    let running = Running::start(&place, &file, &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    place.until_has(&client, "billing.parked", 1).await;
    assert_eq!(until_lines(&running.path("seen"), 2).await, ["1", "2"]);
    let parked = place.run(&["parking", "list", "billing.parked", "--json"]).json();
    assert_eq!(parked[0]["story"]["kind"], "signal");
    running.stop();
    client.close().await;
}

/// All that the guide lists.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_finds_all_properties_in_its_variables() {
    let place = Place::new().await;
    let client = place.client().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
command = ["sh", "-c", "env | grep ^LEVERET_ | sort > FOLDER/env; echo end >> FOLDER/env"]
"#
    );
    let running = Running::start(&place, &file, &[]);
    let (_, rest) = place.url().split_once("://").unwrap();
    let user = rest.split_once('@').map_or("guest", |(user, _)| user.split(':').next().unwrap());
    let text = |text: &str| Some(ShortStr::try_from(text.to_owned()).unwrap());
    let properties = Properties {
        content_type: text("text/plain"),
        content_encoding: text("identity"),
        priority: Some(3),
        correlation_id: text("order-17"),
        reply_to: text("answers"),
        expiration: text("3600000"),
        message_id: text("id-1"),
        timestamp: Some(1_700_000_000),
        kind: text("order"),
        user_id: text(user),
        app_id: text("shop"),
        ..Properties::default()
    };
    let publisher = client.publisher("orders").build().await.unwrap();
    publisher.publish("order.new", Message::with_properties("x", properties)).await.unwrap();
    let env = eventually(PATIENCE, "the variables of the command", async || {
        let text = fs::read_to_string(running.path("env")).unwrap_or_default();
        text.ends_with("end\n").then_some(text)
    })
    .await;
    let expected = [
        ("APP_ID", "shop"),
        ("ATTEMPT", "1"),
        ("CONTENT_ENCODING", "identity"),
        ("CONTENT_TYPE", "text/plain"),
        ("CORRELATION_ID", "order-17"),
        ("EXCHANGE", "orders"),
        ("EXPIRATION", "3600000"),
        ("MESSAGE_ID", "id-1"),
        ("PRIORITY", "3"),
        ("QUEUE", "billing"),
        ("REDELIVERED", "false"),
        ("REPLY_TO", "answers"),
        ("ROUTING_KEY", "order.new"),
        ("TIMESTAMP", "1700000000"),
        ("TYPE", "order"),
        ("USER_ID", user),
    ];
    let expected: String =
        expected.map(|(name, value)| format!("LEVERET_{name}={value}\n")).concat();
    assert_eq!(env, expected + "end\n");
    let guide = include_str!("../../../../../docs/operations.md");
    for name in env.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name) {
        assert!(guide.contains(&format!("`{name}`")), "{name} is not in the guide");
    }
    running.stop();
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_has_16_mib_at_most() {
    let place = Place::new().await;
    let file = r#"
[[service]]
name = "zeros"
command = ["sh", "-c", "head -c $(cat) /dev/zero"]
"#;
    let running = Running::start(&place, file, &[]);
    let call = |bytes: &str| {
        let within = ["call", "zeros", "any", bytes, "--raw", "--within", "1m", "--timeout", "1m"];
        place.run(&within)
    };
    assert_eq!(call("16777216").ok().len(), 16_777_216 + 1);
    let failed = call("16777217");
    assert!(failed.status == 1 && failed.err.contains("more than 16 MiB"), "{}", failed.err);
    running.stop();
}
