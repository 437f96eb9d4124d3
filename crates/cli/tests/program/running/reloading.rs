//! Reading the file again, and what `/health` says of it.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn the_file_is_read_again_when_asked_and_a_wrong_one_changes_nothing() {
    let place = Place::new().await;
    let file = |word: &str| {
        format!(
            "{TOPOLOGY}\n[[consumer]]\nqueue = \"billing\"\ncommand = [\"sh\", \"-c\", \"cat >> FOLDER/{word}; echo >> FOLDER/{word}\"]\n"
        )
    };
    let mut running = Running::start(&place, &file("first"), &[]);
    place.run(&["publish", "order.new", "1", "-e", "orders"]).ok();
    until_lines(&running.path("first"), 1).await;

    running.write("[[consumer]]\nqueue = 5");
    running.signal(Signal::HUP);
    running.until_logged("goes on with what it has").await;
    place.run(&["publish", "order.new", "2", "-e", "orders"]).ok();
    until_lines(&running.path("first"), 2).await;

    running.write(&file("second"));
    running.signal(Signal::HUP);
    running.until("read ");
    running.until("running: ");
    place.run(&["publish", "order.new", "3", "-e", "orders"]).ok();
    assert_eq!(until_lines(&running.path("second"), 1).await, ["3"]);
    running.stop();
}

/// The topology, and a consumer whose command writes each message to a file.
fn billing(word: &str) -> String {
    format!(
        "{TOPOLOGY}\n[[consumer]]\nqueue = \"billing\"\ncommand = [\"sh\", \"-c\", \"cat >> FOLDER/{word}; echo >> FOLDER/{word}\"]\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_run_changes_nothing() {
    let place = Place::new().await;
    let running = Running::start(&place, &billing("first"), &[]);
    let conflict = billing("second").replace("type = \"quorum\"", "type = \"classic\"");
    let nowhere =
        format!("{}\n[[consumer]]\nqueue = \"nowhere\"\ncommand = [\"cat\"]\n", billing("second"));
    for (number, (file, said)) in
        [(conflict, "queue \"billing\""), (nowhere, "there is no queue \"nowhere\"")]
            .iter()
            .enumerate()
    {
        running.write(file);
        running.signal(Signal::HUP);
        let log = running.until_logged(said).await;
        assert!(log.contains("goes on with what it has"), "{log}");
        place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
        until_lines(&running.path("first"), number + 1).await;
    }
    assert!(!running.path("second").exists());
    assert_eq!(running.stop(), "stopped: 2 messages handled\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_url_is_said_to_need_a_new_start() {
    let place = Place::new().await;
    let mut running = Running::start(&place, &billing("first"), &[]);
    running.write(&format!("url = \"amqp://shop:sesame@elsewhere\"\n{}", billing("first")));
    running.signal(Signal::HUP);
    running.until("running: ");
    let log = running.until_logged("the new url is not used before the next start").await;
    assert!(!log.contains("sesame"), "{log}");
    running.stop();
}

/// The broker refuses one of two consumers that a reload has started.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_is_refused_leaves_what_ran_before() {
    let (place, client) =
        Place::with(leveret::Topology::new().queue(leveret::Queue::classic("held"))).await;
    let holding = client.consumer("held").exclusive().stream().await.unwrap();
    let mut running = Running::start(&place, &billing("first"), &[]);
    let held = "[[consumer]]\nqueue = \"held\"\ncommand = [\"cat\"]\n";
    running.write(&format!("{}\n{held}", billing("second")));
    running.signal(Signal::HUP);
    running.until_logged("goes on with what it has: consuming queue \"held\"").await;
    place.run(&["publish", "order.new", "1", "-e", "orders"]).ok();
    // Once it can be, the same file is taken up.
    drop(holding);
    eventually(PATIENCE, "the queue without a consumer", || async {
        client.inspect_queue("held").await.is_ok_and(|info| info.consumers == 0)
    })
    .await;
    running.signal(Signal::HUP);
    assert!(running.until("read ").ends_with(": 2 started, 1 stopped\n"));
    place.run(&["publish", "order.new", "2", "-e", "orders"]).ok();
    eventually(PATIENCE, "both messages", || async {
        let text = |name| fs::read_to_string(running.path(name)).unwrap_or_default();
        (text("first") + &text("second")).lines().count() == 2
    })
    .await;
    assert_eq!(running.stop(), "stopped: 2 messages handled\n");
    client.close().await;
}

/// What has changed is replaced at once, though its handler is still at work, and what has not goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_waits_for_no_handler_and_stops_only_what_has_changed() {
    let place = Place::new().await;
    let file = |audit: &str| {
        format!(
            r#"
[[topology.queue]]
name = "billing"

[[topology.queue]]
name = "audit"

[[consumer]]
queue = "billing"
command = ["sh", "-c", "echo begun >> FOLDER/billing; while [ ! -e FOLDER/go ]; do sleep 0.05; done; echo done >> FOLDER/billing"]

[[consumer]]
queue = "audit"
prefetch = 1
command = ["sh", "-c", "echo begun >> FOLDER/{audit}; while [ ! -e FOLDER/go ]; do sleep 0.05; done; echo done >> FOLDER/{audit}"]
"#
        )
    };
    let client = place.client().await;
    let mut running = Running::start(&place, &file("first"), &[]);
    place.run(&["publish", "billing", "1"]).ok();
    place.run(&["publish", "audit", "1"]).ok();
    until_lines(&running.path("billing"), 1).await;
    until_lines(&running.path("first"), 1).await;
    running.write(&file("second"));
    running.signal(Signal::HUP);
    assert!(running.until("read ").ends_with(": 1 started, 1 stopped\n"));
    running.until("running: ");
    // The old handler is still at work.
    place.run(&["publish", "audit", "2"]).ok();
    until_lines(&running.path("second"), 1).await;
    assert_eq!(until_lines(&running.path("first"), 1).await, ["begun"]);
    fs::write(running.path("go"), "").unwrap();
    for name in ["billing", "first", "second"] {
        assert_eq!(until_lines(&running.path(name), 2).await, ["begun", "done"]);
    }
    assert_eq!(running.stop(), "stopped: 3 messages handled\n");
    client.close().await;
}

/// A queue that another program declares later, and what `/health` says until then.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_not_there_yet_is_waited_for() {
    let place = Place::new().await;
    let client = place.client().await;
    let file =
        "[[consumer]]\nqueue = \"later\"\ncommand = [\"sh\", \"-c\", \"echo x >> FOLDER/seen\"]\n";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("service.toml");
    fs::write(&path, file.replace("FOLDER", folder.path().to_str().unwrap())).unwrap();
    let service = listening::Service::start(&place, &path);
    let (status, health) = service.ask("/health").await;
    let health: serde_json::Value = serde_json::from_str(&health).unwrap();
    assert!(status == 503 && health["missing_consumers"]["later"] == 1, "{health}");
    client.apply(&leveret::Topology::new().queue(leveret::Queue::classic("later"))).await.unwrap();
    place.run(&["publish", "later", "x"]).ok();
    until_lines(&folder.path().join("seen"), 1).await;
    eventually(PATIENCE, "the service to be well", || async {
        service.ask("/health").await.0 == 200
    })
    .await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_name_is_said_to_need_a_new_start() {
    let place = Place::new().await;
    let mut running =
        Running::start(&place, &format!("name = \"shop\"\n{}", billing("first")), &[]);
    running.write(&format!("name = \"store\"\n{}", billing("first")));
    running.signal(Signal::HUP);
    assert!(running.until("read ").ends_with(": 0 started, 0 stopped\n"));
    running.until_logged("the new name is not used before the next start").await;
    running.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn delays_are_relayed_until_the_program_ends_and_a_reload_says_so() {
    let place = Place::new().await;
    let relaying = format!("relay-delays = true\n{}", billing("first"));
    let mut running = Running::start(&place, &relaying, &[]);
    running.write(&billing("first"));
    running.signal(Signal::HUP);
    running.until("running: ");
    running.until_logged("the new relay-delays is not used before the next start").await;
    running.stop();
}

/// As long as it connects, which may take a minute.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_that_is_asked_for_while_it_connects_comes_later() {
    let place = Place::new().await;
    let (proxy, url) = proxy(&place).await;
    proxy.stall(Direction::ToClient);
    let mut running = Running::spawn(&place, &billing("first"), &["--url", &url], &[]);
    eventually(PATIENCE, "the connection", async || proxy.seen().to_server > 0).await;
    running.signal(Signal::HUP);
    proxy.unstall(Direction::ToClient);
    running.until("running: ");
    assert!(running.until("read ").ends_with(": 0 started, 0 stopped\n"));
    running.stop();
}

/// A queue with a consumer whose handler is at work until there is a file `go`.
fn busy(word: &str, timeout: &str) -> String {
    format!(
        r#"{TOPOLOGY}
[[consumer]]
queue = "billing"
timeout = "{timeout}"
command = ["sh", "-c", "echo begun >> FOLDER/{word}; while [ ! -e FOLDER/go ]; do sleep 0.05; done; echo done >> FOLDER/{word}"]
"#
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_entry_has_as_long_as_its_handlers_may_take() {
    let place = Place::new().await;
    let mut running = Running::start(&place, &busy("first", "60s"), &["--drain", "300ms"]);
    place.run(&["publish", "order.new", "1", "-e", "orders"]).ok();
    until_lines(&running.path("first"), 1).await;
    // Its handler takes longer than the old one would have been given by --drain.
    let second =
        "command = [\"sh\", \"-c\", \"sleep 1; cat >> FOLDER/second; echo >> FOLDER/second\"]";
    running.write(&format!("{TOPOLOGY}\n[[consumer]]\nqueue = \"billing\"\n{second}\n"));
    running.signal(Signal::HUP);
    assert!(running.until("read ").ends_with(": 1 started, 1 stopped\n"));
    place.run(&["publish", "order.new", "2", "-e", "orders"]).ok();
    assert_eq!(until_lines(&running.path("second"), 1).await, ["2"]);
    fs::write(running.path("go"), "").unwrap();
    assert_eq!(until_lines(&running.path("first"), 2).await, ["begun", "done"]);
    assert_eq!(running.stop(), "stopped: 2 messages handled\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_entry_is_drained_no_longer_than_the_program() {
    let place = Place::new().await;
    let client = place.client().await;
    let mut running = Running::start(&place, &busy("first", "1h"), &["--drain", "300ms"]);
    place.run(&["publish", "order.new", "1", "-e", "orders"]).ok();
    until_lines(&running.path("first"), 1).await;
    running.write(&billing("second"));
    running.signal(Signal::HUP);
    assert!(running.until("read ").ends_with(": 1 started, 1 stopped\n"));
    assert_eq!(running.stop(), "stopped: 0 messages handled, 1 given back unfinished\n");
    place.until_has(&client, "billing", 1).await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_that_fails_declares_and_relays_nothing() {
    let place = Place::new().await;
    let client = place.client().await;
    let held = leveret::Queue::classic("held");
    let quotes = leveret::Queue::classic("quotes").max_length(5);
    client.apply(&leveret::Topology::new().queue(held).queue(quotes)).await.unwrap();
    let holding = client.consumer("held").exclusive().stream().await.unwrap();
    let nowhere = Path::new("/no/such/directory");
    let no_authorities = [("SSL_CERT_FILE", nowhere), ("SSL_CERT_DIR", nowhere)];
    let running = Running::start_with(&place, &billing("first"), &[], &no_authorities);
    let fresh = "[[topology.queue]]\nname = \"fresh\"\n";
    let consumer = |queue: &str, work: &str| format!("[[consumer]]\nqueue = \"{queue}\"\n{work}\n");
    for (entry, said) in [
        (consumer("billing", "http = \"https://localhost/\""), "authority"),
        ("[[service]]\nname = \"quotes\"\ncommand = [\"cat\"]\n".to_owned(), "x-max-length"),
        (consumer("nowhere", "command = [\"cat\"]"), "there is no queue \"nowhere\""),
    ] {
        running.write(&format!("relay-delays = true\n{}{fresh}{entry}", billing("first")));
        running.signal(Signal::HUP);
        running.until_logged(said).await;
        assert!(client.inspect_queue("fresh").await.is_err(), "{said}");
    }
    // What only shows when the consumer begins leaves the topology, but relays nothing.
    let held = consumer("held", "command = [\"cat\"]");
    running.write(&format!("relay-delays = true\n{}{held}", billing("first")));
    running.signal(Signal::HUP);
    running.until_logged("goes on with what it has: consuming queue \"held\"").await;
    assert!(client.inspect_queue("leveret.delay.relay").await.is_err());
    drop(holding);
    running.stop();
    client.close().await;
}

/// A reload that reads the system's authorities from a pipe, and so lasts until they are written.
async fn reload_that_lasts(place: &Place) -> (Running, String, fs::File) {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("authorities");
    named_pipe(&pipe);
    let listen = ["--listen", "127.0.0.1:0"];
    let file = billing("first");
    let mut running = Running::spawn(place, &file, &listen, &[("SSL_CERT_FILE", &pipe)]);
    let base = running.base();
    running.until("running: ");
    eventually(PATIENCE, "the service to be well", async || {
        listening::ask(&base, "/health").await.0 == 200
    })
    .await;
    let audit = "[[topology.queue]]\nname = \"audit\"\n[[consumer]]\nqueue = \"audit\"\nhttp = \"https://localhost/\"\n";
    running.write(&format!("{}{audit}", billing("second")));
    running.signal(Signal::HUP);
    let authorities = open_read_pipe(&pipe).await;
    (running, base, authorities)
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_good_during_a_reload() {
    let place = Place::new().await;
    let (mut running, base, mut authorities) = reload_that_lasts(&place).await;
    let (status, health) = listening::ask(&base, "/health").await;
    assert_eq!(status, 200, "{health}");
    std::io::Write::write_all(&mut authorities, Authority::new("ours").certificate().as_bytes())
        .unwrap();
    drop(authorities);
    let reading = tokio::task::spawn_blocking(move || {
        assert!(running.until("read ").ends_with(": 2 started, 1 stopped\n"));
        running
    });
    while !reading.is_finished() {
        let (status, health) = listening::ask(&base, "/health").await;
        assert_eq!(status, 200, "{health}");
    }
    reading.await.unwrap().stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_does_not_keep_a_service_from_stopping() {
    let place = Place::new().await;
    let (running, _, authorities) = reload_that_lasts(&place).await;
    assert_eq!(running.stop(), "stopped: 0 messages handled\n");
    drop(authorities);
}

/// It resumes only when its handler ends, which takes longer than new consumers get to be live.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_does_not_wait_for_a_busy_consumer_that_has_lost_its_connection() {
    let place = Place::new().await;
    let (proxy, url) = proxy(&place).await;
    let options = ["--listen", "127.0.0.1:0", "--url", &url];
    let mut running = Running::spawn(&place, &busy("first", "1h"), &options, &[]);
    let base = running.base();
    running.until("running: ");
    place.run(&["publish", "order.new", "1", "-e", "orders"]).ok();
    until_lines(&running.path("first"), 1).await;
    proxy.cut(Cut::Reset);
    eventually(PATIENCE, "a connection whose consumer is not live", async || {
        let (status, text) = listening::ask(&base, "/health").await;
        let health: serde_json::Value = serde_json::from_str(&text).unwrap();
        let is_lost =
            health["connections"][0]["up"] == true && health["missing_consumers"]["billing"] == 1;
        is_lost.then(|| assert_eq!(status, 503, "{health}"))
    })
    .await;
    // The log mentions the new name once the file is taken up.
    running.write(&format!("name = \"store\"\n{}", billing("second")));
    running.signal(Signal::HUP);
    running.until_logged("the new name is not used before the next start").await;
    assert!(running.until("read ").ends_with(": 1 started, 1 stopped\n"));
    // The message that was at work is delivered again.
    assert_eq!(until_lines(&running.path("second"), 1).await, ["1"]);
    fs::write(running.path("go"), "").unwrap();
    running.stop();
}

/// A consumer with the design of Orb, whose redelivery queue has a name of its own.
fn with_orb(word: &str) -> String {
    let retry = "{ profile = \"orb\", names = { redelivery-queue = \"again\" } }";
    let queue = "[[topology.queue]]\nname = \"audit\"\ndead-letter-exchange = \"orb.redelivery\"\ndead-letter-routing-key = \"orb.redelivery\"\n";
    let command = format!("command = [\"sh\", \"-c\", \"echo >> FOLDER/{word}\"]");
    format!("{queue}[[consumer]]\nqueue = \"audit\"\nretry = {retry}\n{command}\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn health_names_a_redelivery_queue_without_a_consumer() {
    let place = Place::new().await;
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("authorities");
    named_pipe(&pipe);
    // What this endpoint needs is awaited before any consumer starts.
    let endpoint = "[[topology.queue]]\nname = \"other\"\n[[consumer]]\nqueue = \"other\"\nhttp = \"https://localhost/\"\n";
    let file = with_orb("seen") + endpoint;
    let options = ["--listen", "127.0.0.1:0"];
    let mut running = Running::spawn(&place, &file, &options, &[("SSL_CERT_FILE", &pipe)]);
    let base = running.base();
    let mut authorities = open_read_pipe(&pipe).await;
    let (status, health) = listening::ask(&base, "/health").await;
    let health: serde_json::Value = serde_json::from_str(&health).unwrap();
    let missing = serde_json::json!({ "again": 1, "audit": 1, "other": 1 });
    assert!(status == 503 && health["missing_consumers"] == missing, "{health}");
    std::io::Write::write_all(&mut authorities, Authority::new("ours").certificate().as_bytes())
        .unwrap();
    drop(authorities);
    running.until("running: ");
    eventually(PATIENCE, "the service to be well", || async {
        listening::ask(&base, "/health").await.0 == 200
    })
    .await;
    running.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redelivery_queue_that_cannot_be_consumed_refuses_the_reload() {
    let (place, client) =
        Place::with(leveret::Topology::new().queue(leveret::Queue::new("again"))).await;
    let holding = client.consumer("again").exclusive().stream().await.unwrap();
    let mut running = Running::start(&place, &billing("first"), &[]);
    running.write(&(billing("first") + &with_orb("second")));
    running.signal(Signal::HUP);
    running.until_logged("goes on with what it has: consuming queue \"again\"").await;
    place.run(&["publish", "order.new", "1", "-e", "orders"]).ok();
    assert_eq!(until_lines(&running.path("first"), 1).await, ["1"]);
    drop(holding);
    eventually(PATIENCE, "the queue without a consumer", || async {
        client.inspect_queue("again").await.is_ok_and(|info| info.consumers == 0)
    })
    .await;
    running.signal(Signal::HUP);
    assert!(running.until("read ").ends_with(": 2 started, 0 stopped\n"));
    // The reload has waited for it.
    assert_eq!(client.inspect_queue("again").await.unwrap().consumers, 1);
    running.stop();
    client.close().await;
}

/// The new file is a pipe that says nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_never_read_does_not_keep_a_service_from_stopping() {
    let place = Place::new().await;
    let mut running = Running::start(&place, &billing("first"), &[]);
    let path = running.path("service.toml");
    fs::remove_file(&path).unwrap();
    named_pipe(&path);
    running.signal(Signal::HUP);
    let _silent = open_read_pipe(&path).await;
    running.signal(Signal::TERM);
    eventually(PATIENCE, "its end", || {
        let ended = running.child.0.try_wait().unwrap();
        async move { ended.is_some() }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_gone_from_the_topology_stays_on_the_broker() {
    let place = Place::new().await;
    let client = place.client().await;
    let audit = "[[topology.queue]]\nname = \"audit\"\n";
    let mut running = Running::start(&place, &(billing("first") + audit), &[]);
    running.write(&billing("second"));
    running.signal(Signal::HUP);
    running.until("read ");
    client.inspect_queue("audit").await.expect("the queue");
    running.stop();
    client.close().await;
}
