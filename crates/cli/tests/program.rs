//! The program as a person runs it.

use std::process::{Command, Output};

fn leveret(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_leveret")).args(arguments).output().expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_demo_balances_its_books() {
    let output = leveret(&["demo", "--messages", "2000", "--cuts", "3"]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    for line in [
        "confirmed      2000",
        "consumed      1996",
        "parked         4",
        "cuts         3",
        "lost         0",
    ] {
        assert!(said.contains(line), "{line:?} is not in:\n{said}");
    }
}

#[test]
fn a_demo_without_its_broker_says_where_none_answers() {
    let output = leveret(&["demo", "--url", "amqp://127.0.0.1:1"]);
    assert!(!output.status.success());
    let said = text(&output.stderr);
    assert!(said.starts_with("leveret: no broker answers at 127.0.0.1:1"), "{said}");
}

#[test]
fn a_wrong_url_is_named() {
    let output = leveret(&["demo", "--url", "http://localhost"]);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("scheme \"http\""));
}
