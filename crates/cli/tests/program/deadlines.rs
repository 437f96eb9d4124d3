//! How long the program waits by default, as docs/operations.md says. That it waits no shorter is asserted; that it waits no
//! longer, that it ends.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use leveret_testkit::eventually;
use rustix::process::Signal;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::time::{Instant, timeout};

use crate::running::{Running, TOPOLOGY, until_lines};
use crate::support::{Place, Said, program};

/// Longer than all that is waited for here; a machine may be busy.
const PATIENCE: Duration = Duration::from_secs(300);

const MINUTE: Duration = Duration::from_secs(60);

async fn ended(mut running: Running) -> (i32, String) {
    let ending = tokio::task::spawn_blocking(move || {
        let status = running.child.0.wait().unwrap().code().unwrap();
        (status, running.log())
    });
    timeout(PATIENCE, ending).await.expect("it ends").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_tries_for_a_minute_to_connect() {
    let mut command = program(&[]);
    command.env("LEVERET_URL", "amqp://127.0.0.1:1");
    let began = Instant::now();
    let (status, log) = ended(Running::spawn_by(command, "relay-delays = true\n", &[])).await;
    assert_eq!(status, 69, "{log}");
    assert!(began.elapsed() >= MINUTE - Duration::from_secs(10), "{log}");
    assert!(log.contains("gave up after") && log.contains("attempts in 60s"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_waits_a_minute_for_a_queue_that_is_not_there() {
    let place = Place::new().await;
    let began = Instant::now();
    let file = "[[consumer]]\nqueue = \"missing\"\ncommand = [\"cat\"]\n";
    let (status, log) = ended(Running::spawn(&place, file, &[], &[])).await;
    assert_eq!(status, 1, "{log}");
    assert!(began.elapsed() >= MINUTE, "{log}");
    assert!(log.contains("\"missing\""), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_has_a_minute_and_thirty_seconds_when_the_service_stops() {
    let place = Place::new().await;
    let client = place.client().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
command = ["sh", "-c", "echo begun >> FOLDER/seen; sleep 600"]
"#
    );
    let running = Running::start(&place, &file, &[]);
    place.run(&["publish", "billing", "x"]).ok();
    until_lines(&running.path("seen"), 1).await;
    let began = Instant::now();
    eventually(PATIENCE, "another attempt", async || {
        fs::read_to_string(running.path("seen")).unwrap().lines().count() == 2
    })
    .await;
    assert!(began.elapsed() >= MINUTE - Duration::from_secs(1), "{}", running.log());

    let began = Instant::now();
    running.signal(Signal::TERM);
    let (_, log) = ended(running).await;
    assert!(began.elapsed() >= Duration::from_secs(30), "{log}");
    place.until_has(&client, "billing", 1).await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_gives_a_silent_broker_ten_seconds() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("amqp://{}", silent.local_addr().unwrap());
    let began = Instant::now();
    for arguments in [&["get", "q"][..], &["status"], &["publish", "q", "x"]] {
        let mut command = Command::from(program(arguments));
        command.env("LEVERET_URL", &url).stdout(Stdio::piped()).stderr(Stdio::piped());
        let said = timeout(PATIENCE, command.kill_on_drop(true).output()).await.expect("it ends");
        let said = Said::from(said.unwrap());
        assert_eq!(said.status, 69, "{said:?}");
    }
    assert!(began.elapsed() >= Duration::from_secs(9), "{:?}", began.elapsed());
}
