//! Commands as handlers: what is believed of them, and what they leave behind.

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
command = ["sh", "-c", "sleep 600 & echo $! >> FOLDER/sleeping; echo $$ >> FOLDER/sleeping; wait"]
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
