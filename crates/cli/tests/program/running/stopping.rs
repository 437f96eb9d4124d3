//! What ends a service at once, whatever it waits for.

use super::*;

/// Sends a signal until the process has ended, and gives its exit status.
async fn signal_until_ended(running: &mut Running, signal: Signal) -> Option<i32> {
    let process = Pid::from_child(&running.child.0);
    eventually(PATIENCE, "the end of the service", || {
        let ended = running.child.0.try_wait().unwrap();
        if ended.is_none() {
            kill_process(process, signal).unwrap();
        }
        async move { ended }
    })
    .await
    .code()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_that_is_read_from_a_pipe_does_not_keep_it_from_ending() {
    let place = Place::new().await;
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("url");
    named_pipe(&pipe);
    let options = ["--url-file", pipe.to_str().unwrap()];
    let mut running = Running::spawn(&place, "relay-delays = true\n", &options, &[]);
    let _silent = open_read_pipe(&pipe).await;
    running.signal(Signal::TERM);
    eventually(PATIENCE, "its end", || {
        let ended = running.child.0.try_wait().unwrap();
        async move { ended.is_some() }
    })
    .await;
}

/// One consumer has failed, and it waits for the handler of another one.
#[tokio::test(flavor = "multi_thread")]
async fn signals_end_a_service_that_drains_after_a_failure() {
    let place = Place::new().await;
    let client = place.client().await;
    let file = format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
timeout = "1h"
command = ["sh", "-c", "echo begun >> FOLDER/seen; sleep 600"]

[[consumer]]
queue = "later"
command = ["cat"]
"#
    );
    let mut running = Running::start(&place, &file, &["--drain", "10m"]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    until_lines(&running.path("seen"), 1).await;
    // Only this connection may consume it.
    let later = leveret::Queue::classic("later").exclusive();
    client.apply(&leveret::Topology::new().queue(later)).await.unwrap();
    running.until_logged("after a failure: ").await;
    assert_eq!(signal_until_ended(&mut running, Signal::INT).await, Some(130));
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_is_closed_is_no_reason_to_end() {
    let place = Place::new().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("service.toml");
    let seen = folder.path().join("seen");
    let file = format!(
        "{TOPOLOGY}\n[[consumer]]\nqueue = \"billing\"\ncommand = [\"sh\", \"-c\", \"cat >> {0}; echo >> {0}\"]\n",
        seen.display()
    );
    fs::write(&path, &file).unwrap();
    let mut command = place.program(&["run", path.to_str().unwrap()]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = Killed(child.unwrap());
    drop(child.0.stderr.take());
    let out = BufReader::new(child.0.stdout.take().unwrap());
    let mut running = Running { child, out, folder };
    running.until("running: ");
    // A file that is refused, and one that is taken up: each says something in the log.
    running.write("[[consumer]]\nqueue = 5");
    running.signal(Signal::HUP);
    place.run(&["publish", "order.new", "1", "-e", "orders"]).ok();
    until_lines(&seen, 1).await;
    running.write(&format!("name = \"other\"\n{file}"));
    running.signal(Signal::HUP);
    running.until("read ");
    assert_eq!(running.stop(), "stopped: 1 message handled\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_says_that_it_is_stopping_while_a_handler_is_at_work() {
    let place = Place::new().await;
    let file = format!(
        "{TOPOLOGY}\n[[consumer]]\nqueue = \"billing\"\ncommand = [\"sh\", \"-c\", \"echo begun >> FOLDER/seen; while [ ! -e FOLDER/go ]; do sleep 0.05; done\"]\n"
    );
    let options = ["--listen", "127.0.0.1:0", "--drain", "10m"];
    let mut running = Running::spawn(&place, &file, &options, &[]);
    let base = running.base();
    running.until("running: ");
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    until_lines(&running.path("seen"), 1).await;
    running.signal(Signal::TERM);
    eventually(PATIENCE, "that it is stopping", async || {
        let (status, text) = listening::ask(&base, "/health").await;
        let health: serde_json::Value = serde_json::from_str(&text).unwrap();
        status == 503 && health["stopping"] == true
    })
    .await;
    fs::write(running.path("go"), "").unwrap();
    assert_eq!(running.until("stopped: "), "stopped: 1 message handled\n");
}
