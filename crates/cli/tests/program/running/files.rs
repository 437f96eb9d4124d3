//! The file of a service: mistakes are named, and passwords are not.

use std::os::unix::fs::PermissionsExt;

use leveret::{Exchange, Queue, Topology};

use super::*;
use crate::support::Said;

#[test]
fn mistakes_in_a_file_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("service.toml");
    let consumer = "[[consumer]]\nqueue = \"q\"\ncommand = [\"cat\"]\n";
    for (text, parts) in [
        ("".to_owned(), &["nothing to run"][..]),
        ("[[consumer]]\nqueue = \"q\"".to_owned(), &["\"q\"", "neither a command nor http"]),
        (format!("{consumer}http = \"http://x\""), &["both a command and http"]),
        (format!("{consumer}worker = 3"), &["line 4", "worker", "workers"]),
        (format!("{consumer}timeout = \"soon\""), &["line 4", "soon", "30s"]),
        (format!("{consumer}workers = 0"), &["1 to 10000"]),
        (
            format!("{consumer}retry = {{ profile = \"sidekiq\" }}"),
            &["line 4", "sidekiq", "cover-art"],
        ),
        (format!("{consumer}retry = {{ profile = \"chandra\" }}"), &["chandra", "exchange"]),
        (
            format!(
                "{consumer}retry = {{ profile = \"acapi\", names = {{ parking-key = \"p\" }} }}"
            ),
            &["Acapi", "parking-key", "docs/operations.md"],
        ),
        (
            format!("{consumer}retry = {{ profile = \"acapi\", exchange-type = \"direct\" }}"),
            &["direct", "fanout or topic"],
        ),
        (
            format!("{consumer}retry = {{ profile = \"acapi\", jitter = 0.5 }}"),
            &["jitter", "no meaning"],
        ),
        (
            format!("{consumer}retry = {{ profile = \"acapi\", only-to-queue = true }}"),
            &["only-to-queue", "no meaning"],
        ),
        (format!("{consumer}pool = \"op\"\nsubscribers = 3"), &["pool", "subscribers"]),
        (
            format!("{consumer}subscribers = 2\nbatch = {{ size = 5 }}"),
            &["\"q\"", "one subscriber"],
        ),
        (format!("{consumer}pool = \"op\"\nbatch = {{ size = 5 }}"), &["\"q\"", "one subscriber"]),
        (format!("{consumer}pool = \"big\""), &["line 4", "big", "observer"]),
        (
            format!(
                "{consumer}retry = {{ profile = \"orb\" }}\n{consumer}retry = {{ profile = \"orb\", times = 3 }}"
            ),
            &["orb", "twice"],
        ),
        ("[[consumer]]\nqueue = \"q\"\nhttp = \"ftp://x\"".to_owned(), &["ftp://x", "http://"]),
        (format!("{consumer}timeout = \"0s\""), &["\"q\"", "timeout of 0"]),
        (format!("{consumer}prefetch = 0"), &["\"q\"", "prefetch of at least 1"]),
        (format!("{consumer}retry = {{ wait = \"5000000000000h\" }}"), &["\"q\"", "49 days"]),
        (format!("{consumer}retry = {{ multiplier = 0.5 }}"), &["\"q\"", "multiplier"]),
        (format!("{consumer}retry = {{ jitter = 2.0 }}"), &["\"q\"", "jitter"]),
        (format!("url = \"amqp://rabbit:99999\"\n{consumer}"), &["url", "65535"]),
        ("[[consumer]]\nqueue = \"q\"\nhttp = \"http://x:99999\"".to_owned(), &["\"q\"", "port"]),
        (
            "[[consumer]]\nqueue = \"q\"\ncommand = [\"/no/such\"]".to_owned(),
            &["\"q\"", "/no/such"],
        ),
        (
            "[[consumer]]\nqueue = \"q\"\ncommand = [\"no-such-program\"]".to_owned(),
            &["no-such-program", "PATH"],
        ),
        (
            "[[topology.queue]]\nname = \"q\"\ntype = \"quorom\"".to_owned(),
            &["line 3", "quorom", "quorum"],
        ),
    ] {
        fs::write(&path, &text).unwrap();
        let said = leveret(&["run", path.to_str().unwrap(), "--check"]);
        assert_eq!(said.status, 2, "{text}\n{said:?}");
        for part in parts {
            assert!(said.err.contains(part), "{part:?} is not in:\n{}", said.err);
        }
    }
    fs::write(&path, consumer).unwrap();
    assert!(
        leveret(&["run", path.to_str().unwrap(), "--check"])
            .ok()
            .contains("1 consumer, 0 services")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_sends_what_has_waited_to_its_queue_alone() {
    let place = Place::new().await;
    let client = place.client().await;
    let every_order = Queue::quorum("audit").bind("orders", "#");
    let topology = Topology::new().exchange(Exchange::topic("orders")).queue(every_order);
    client.apply(&topology).await.unwrap();
    let file = r#"
[[topology.queue]]
name = "billing"
dead-letter-exchange = "billing.dlx"
dead-letter-routing-key = "retry.billing"

[[consumer]]
queue = "billing"
command = ["sh", "-c", "echo x >> FOLDER/seen; exit 75"]
retry = { profile = "chandra", exchange = "orders", only-to-queue = true, wait = "50ms", times = 1 }
"#;
    let running = Running::start(&place, file, &[]);
    place.run(&["publish", "billing", "x"]).ok();
    place.until_has(&client, "billing.parking_lot", 1).await;
    assert_eq!(until_lines(&running.path("seen"), 2).await, ["x", "x"]);
    assert_eq!(client.inspect_queue("audit").await.unwrap().messages, 0);
    running.stop();
    client.close().await;
}

#[test]
fn the_example_in_the_documentation_is_right() {
    let source = include_str!("../../../src/run/file.rs");
    let example = source.lines().skip_while(|line| *line != "//! ```toml").skip(1);
    let example: String = example
        .take_while(|line| *line != "//! ```")
        .map(|line| line.trim_start_matches("//!").to_owned() + "\n")
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("service.toml");
    fs::write(&path, example).unwrap();
    for name in ["bill", "quote"] {
        let program = folder.path().join(name);
        fs::write(&program, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let said = program(&["run", "service.toml", "--check"]).current_dir(folder.path()).output();
    Said::from(said.unwrap()).ok();
}

#[test]
fn no_error_about_a_file_shows_a_password() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("a.toml", "url = \"amqp://shop:sesame@rabbit\" x"),
        ("b.toml", "urls = \"amqp://shop:sesame@rabbit\""),
        ("c.toml", "url = \"amqp://shop:sesame@rabbit:99999\"\nrelay-delays = true"),
        ("d.yaml", "urls: \"amqp://shop:sesame@rabbit\""),
        ("e.yaml", "consumer: \"amqp://shop:sesame@rabbit\""),
        ("f.toml", "users = \"shop:sesame\""),
        ("g.toml", "[[users]]\nname = \"shop\"\npassword = \"sesame\"\npermission = []"),
        ("h.toml", "[[consumer]]\nqueue = \"q\"\nhttp = \"ftp://shop:sesame@rabbit\""),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap();
        let commands: [&[&str]; 3] =
            [&["run", path, "--check"], &["broker", "--file", path], &["topology", "plan", path]];
        for command in commands {
            let said = leveret(command);
            assert_eq!(said.status, 2, "{command:?}: {said:?}");
            assert!(!said.err.contains("sesame") && said.err.contains(name), "{said:?}");
        }
    }
}

#[test]
fn no_error_about_an_address_or_a_user_shows_a_password() {
    for command in [
        &["topology", "export", "http://shop:sesame@127.0.0.1:1"][..],
        &["topology", "export", "http://shop:sesame@rabbit:99999"],
        &["topology", "export", "ftp://shop:sesame@rabbit"],
        &["broker", "--user", "sesame"],
    ] {
        let said = leveret(command);
        assert!(said.status != 0 && !said.err.contains("sesame"), "{said:?}");
    }
}

#[test]
fn the_flags_of_orb_may_be_written_as_its_document_does() {
    let (_folder, path) = simple_service();
    for flag in ["--mq-max-connection-subscription", "--mq-max-connection-subscriptions"] {
        leveret(&["run", path.to_str().unwrap(), "--check", flag, "5"]).ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_may_be_in_a_file() {
    let place = Place::new().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("url");
    fs::write(&path, format!("# the broker\n{}\n", place.url())).unwrap();
    let path = path.to_str().unwrap();
    leveret(&["status", "--url-file", path]).ok();
    let mut command = program(&["status"]);
    Said::from(command.env("LEVERET_URL_FILE", path).output().unwrap()).ok();
    // An argument goes before the environment.
    let mut command = program(&["status", "--url-file", path]);
    Said::from(command.env("LEVERET_URL", "amqp://127.0.0.1:1").output().unwrap()).ok();
    let said = leveret(&["status", "--url-file", "/no/such/file"]);
    assert!(said.status == 2 && said.err.contains("/no/such/file"), "{said:?}");
}

#[test]
fn with_json_an_error_is_a_line_of_json() {
    let said = leveret(&["get", "q", "--json", "--url", "amqp://127.0.0.1:1"]);
    let error: serde_json::Value = serde_json::from_str(&said.err).unwrap();
    assert!(said.status == 69 && error["status"] == 69, "{said:?}");
    assert!(error["error"].as_str().unwrap().contains("127.0.0.1:1"), "{said:?}");
}

#[test]
fn the_broker_says_the_address_to_connect_to() {
    let mut command = program(&["broker", "--listen", "127.0.0.1:0"]);
    let mut child = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let first = lines.next().unwrap();
    let address = first.strip_prefix("listening on ").unwrap().split(',').next().unwrap();
    let line = lines.next().unwrap();
    assert!(line.contains(&format!("amqp://guest:guest@{address};")), "{line}");
}

#[test]
fn a_certificate_that_cannot_be_read_is_no_fault_of_the_broker() {
    let (_folder, path) = simple_service();
    let url = "amqps://127.0.0.1:1?cacertfile=/no/such/authority.pem";
    let said = leveret(&["run", path.to_str().unwrap(), "--url", url]);
    assert!(said.status == 2 && said.err.contains("/no/such/authority.pem"), "{said:?}");
}

#[test]
fn a_wait_that_no_queue_can_keep_is_refused_on_the_command_line_as_in_a_file() {
    let (_folder, path) = simple_service();
    let flags = ["--redelivery-max-interval", "50d"];
    let said = leveret(&[&["run", path.to_str().unwrap(), "--check"], &flags[..]].concat());
    assert!(said.status == 2 && said.err.contains("49 days"), "{said:?}");
}
