//! What is started here ends with the test process, whatever happens to that one.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use leveret_testkit::process::{Ending, GuardedProcess};
use leveret_testkit::{ScratchFolder, eventually};

const SOON: Duration = Duration::from_secs(60);
/// A shell that starts another program and tells the process ids of both.
const SHELL_WITH_CHILD: &str = "sleep 1000 & echo $$ $! >pids.new; mv pids.new pids; wait";

#[tokio::test]
async fn a_dropped_process_is_gone_with_its_children_and_its_folder() {
    let folder = ScratchFolder::new();
    let process = start_shell_with_child(folder.path(), Ending::Kill);
    let pids = pids_in(folder.path()).await;
    assert_eq!(pids.len(), 2);
    assert!(pids.iter().all(|pid| is_alive(*pid)));

    drop(process);
    eventually(SOON, "both processes to be gone", async || !pids.iter().any(|pid| is_alive(*pid)))
        .await;
    let path = folder.path().to_owned();
    drop(folder);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_killed_test_process_leaves_nothing_behind() {
    let mut helper = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture", "testkit::guardian::a_test_that_is_killed"])
        .env("LEVERET_TO_BE_KILLED", "yes")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(helper.stdout.take().unwrap()).lines().map_while(Result::ok);
    let folder = lines
        .find_map(|line| line.strip_prefix("folder: ").map(PathBuf::from))
        .expect("the helper's folder");
    let pids = pids_in(&folder).await;
    assert!(pids.iter().all(|pid| is_alive(*pid)));

    helper.kill().unwrap();
    helper.wait().unwrap();
    eventually(SOON, "both processes to be gone", async || !pids.iter().any(|pid| is_alive(*pid)))
        .await;
    eventually(SOON, "the folder to be gone", async || !folder.exists()).await;
}

#[tokio::test]
#[ignore = "it is run, and killed, by a_killed_test_process_leaves_nothing_behind"]
async fn a_test_that_is_killed() {
    if std::env::var_os("LEVERET_TO_BE_KILLED").is_none() {
        return;
    }
    let folder = ScratchFolder::new();
    let mut process = start_shell_with_child(folder.path(), Ending::Kill);
    println!("folder: {}", folder.path().display());
    process.ended(Duration::from_secs(60)).await;
}

#[tokio::test]
async fn a_program_that_ends_by_itself_tells_how() {
    let folder = ScratchFolder::new();
    let log = File::create(folder.path().join("log")).unwrap();
    let mut process =
        GuardedProcess::start(["sh", "-c", "echo so long; exit 7"], Ending::Kill, log);
    assert_eq!(process.ended(SOON).await.code(), Some(7));
    assert_eq!(fs::read_to_string(folder.path().join("log")).unwrap(), "so long\n");
}

#[tokio::test]
async fn a_program_may_be_asked_to_quit_before_it_is_killed() {
    let folder = ScratchFolder::new();
    let log = File::create(folder.path().join("log")).unwrap();
    let tidy = "trap 'echo tidied up; exit' QUIT; echo ready; while :; do sleep 0.05; done";
    let process = GuardedProcess::start(["sh", "-c", tidy], Ending::Quit, log);
    let said = || fs::read_to_string(folder.path().join("log")).unwrap();
    eventually(SOON, "the program to be ready", async || said().contains("ready")).await;
    drop(process);
    assert_eq!(said(), "ready\ntidied up\n");
}

fn start_shell_with_child(folder: &Path, ending: Ending) -> GuardedProcess {
    let command = format!("cd {} && {{ {SHELL_WITH_CHILD}; }}", folder.display());
    GuardedProcess::start(["sh", "-c", &command], ending, File::create(folder.join("log")).unwrap())
}

async fn pids_in(folder: &Path) -> Vec<u32> {
    let text =
        eventually(SOON, "the process ids", async || fs::read_to_string(folder.join("pids"))).await;
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// A process that has ended but was not yet waited for counts as gone.
fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z"))
}
