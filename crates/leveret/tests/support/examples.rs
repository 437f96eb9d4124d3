//! Running an example, as the build has made it beside the tests.

use std::process::Command;

/// What it said. It has to go well.
pub(crate) fn example(name: &str, arguments: &[&str]) -> String {
    let test = std::env::current_exe().expect("a test is a program");
    let build =
        test.parent().and_then(|deps| deps.parent()).expect("tests are in target/debug/deps");
    let output = Command::new(build.join("examples").join(name)).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("example {name} is not built: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {complaint}\n{said}");
    said
}
