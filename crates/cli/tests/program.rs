//! The program as a person runs it, with nothing but itself.

mod support;

const ON_RABBITMQ: bool = false;

#[path = "program/calling.rs"]
mod calling;
#[path = "program/deadlines.rs"]
mod deadlines;
#[path = "program/demo.rs"]
mod demo;
#[path = "program/guide.rs"]
mod guide;
#[path = "program/parking.rs"]
mod parking;
#[path = "program/publishing.rs"]
mod publishing;
#[path = "program/running.rs"]
mod running;
#[path = "program/silence.rs"]
mod silence;
#[path = "program/statuses.rs"]
mod statuses;
#[path = "program/topology.rs"]
mod topology;

use support::{Said, leveret, on_a_terminal, program};

#[test]
fn the_demo_needs_no_broker() {
    demo::check(leveret(&["demo", "--messages", "400", "--cuts", "3"]), 3);
}

#[test]
fn on_a_terminal_the_demo_shows_how_far_it_is_and_then_its_table() {
    let demo = program(&["demo", "--messages", "400", "--cuts", "3"]);
    let (shown, status) = on_a_terminal(demo, "");
    let shown = console::strip_ansi_codes(&shown).replace("\r\n", "\n");
    for bar in ["cover art", "ACAPI", "Orb", "Chandra", "bank"] {
        let is_bar = |line: &str| line.contains(bar) && line.contains('█') && line.contains('/');
        assert!(shown.split(['\r', '\n']).any(is_bar), "there is no bar of {bar} in:\n{shown}");
    }
    // Which of the cuts are drawn is a matter of time.
    assert!(shown.contains("all connections cut"), "{shown}");
    demo::check(Said { status, out: shown, err: String::new() }, 3);
}

#[test]
fn a_demo_without_its_broker_says_where_none_answers() {
    let said = leveret(&["demo", "--url", "amqp://127.0.0.1:1"]);
    assert_ne!(said.status, 0);
    assert!(said.err.starts_with("leveret: no broker answers at 127.0.0.1:1"), "{said:?}");
}

#[test]
fn a_wrong_url_is_named() {
    let said = leveret(&["demo", "--url", "http://localhost"]);
    assert!(said.status != 0 && said.err.contains("scheme \"http\""), "{said:?}");
}

#[test]
fn who_finds_no_broker_is_told_so_by_the_exit_status() {
    let nowhere = ["--url", "amqp://127.0.0.1:1"];
    for command in
        [&["get", "q"][..], &["parking", "list", "q"], &["publish", "q", "x"], &["status"]]
    {
        let said = leveret(&[command, &nowhere].concat());
        assert_eq!(said.status, 69, "{command:?}: {said:?}");
        assert!(!said.err.is_empty() || said.out.contains("refused"), "{command:?}: {said:?}");
    }
}

#[test]
fn wrong_arguments_and_files_have_a_status_of_their_own() {
    for (command, named) in [
        (&["get"][..], "<QUEUE>"),
        (&["get", "q", "--url", "amqp://localhost:port"], "port"),
        (&["get", "q", "--timeout", "soon"], "30s"),
        (&["publish", "q", "x", "-H", "novalue"], "region=eu"),
        (&["parking", "import", "lot", "/no/such/file"], "/no/such/file"),
        (&["topology", "plan", "/no/such/file.toml"], "/no/such/file.toml"),
        (&["parking", "move", "lot"], "--to-queue"),
        (&["parking", "edit", "lot"], "--set-header"),
    ] {
        let said = leveret(command);
        assert_eq!(said.status, 2, "{command:?}: {said:?}");
        assert!(said.err.contains(named), "{named:?} is not in {:?}", said.err);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_without_a_management_api_cannot_tell_what_a_migration_needs() {
    let place = support::Place::new().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("topology.toml");
    std::fs::write(&file, "[[queue]]\nname = \"q\"").unwrap();
    let file = file.to_str().unwrap();
    let said = place.run(&["topology", "migrate", file, "q", "--management", "http://127.0.0.1:1"]);
    assert_eq!(said.status, 69, "{said:?}");
    assert!(
        said.err.contains("rabbitmq_management") && said.err.contains("127.0.0.1:1"),
        "{said:?}"
    );
}

#[test]
fn shells_and_manuals_get_what_they_need() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(leveret(&["completions", shell]).ok().contains("parking"), "{shell}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("man");
    leveret(&["man", path.to_str().unwrap()]).ok();
    let page = std::fs::read_to_string(path.join("leveret-parking-replay.1")).unwrap();
    assert!(page.contains("dry\\-run"), "{page}");
    assert!(leveret(&["man"]).ok().contains("Exit status"));
}
