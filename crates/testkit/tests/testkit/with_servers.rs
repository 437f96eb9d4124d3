//! The program `with-servers`, as far as it needs no server.

use std::process::{Command, Output};

#[test]
fn it_exits_as_its_command_does() {
    assert_eq!(with_servers(&["--", "sh", "-c", "exit 7"]).status.code(), Some(7));
    assert_eq!(with_servers(&["--", "true"]).status.code(), Some(0));
    // 128 and the number of SIGTERM, as in a shell.
    assert_eq!(with_servers(&["--", "sh", "-c", "kill -TERM $$"]).status.code(), Some(143));
}

#[test]
fn a_server_that_is_named_already_is_not_started() {
    let command = [
        "--rabbitmq",
        "3.10",
        "--postgres",
        "--",
        "sh",
        "-c",
        "echo $LEVERET_RABBITMQ_URL $LEVERET_POSTGRES_URL",
    ];
    let output = run(&command, |program| {
        program
            .env("LEVERET_RABBITMQ_URL", "amqp://elsewhere")
            .env("LEVERET_POSTGRES_URL", "postgres://elsewhere");
    });
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "amqp://elsewhere postgres://elsewhere\n"
    );
}

/// A cargo among the commands would build much of the workspace anew.
#[test]
fn the_command_is_not_told_of_the_package_of_with_servers() {
    let output = run(&["--", "env"], |program| {
        program.env("CARGO_PKG_NAME", "leveret-testkit").env("CARGO_TERM_COLOR", "never");
    });
    let environment = String::from_utf8(output.stdout).unwrap();
    assert!(!environment.contains("CARGO_PKG_"), "{environment}");
    assert!(environment.contains("CARGO_TERM_COLOR=never"), "{environment}");
}

#[test]
fn what_it_does_not_understand_is_refused() {
    for arguments in [
        &["--rabbitmq", "2.0", "--", "true"][..],
        &["--mysql", "--", "true"],
        &["--postgres"],
        &["--rabbitmq"],
    ] {
        let output = with_servers(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8(output.stderr).unwrap().contains("usage:"), "{arguments:?}");
    }
    assert_eq!(with_servers(&["--", "/no/such/program"]).status.code(), Some(127));
}

fn with_servers(arguments: &[&str]) -> Output {
    run(arguments, |_| {})
}

fn run(arguments: &[&str], prepare: impl FnOnce(&mut Command)) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_with-servers"));
    program.args(arguments);
    prepare(&mut program);
    program.output().unwrap()
}
