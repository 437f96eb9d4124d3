//! The two halves of a run, each in a process of its own.

use std::io::{self, Read, Write};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Command;
use tokio::runtime;
use tokio::time::timeout;

use super::jobs::{Candidate, Run, Side};
use super::{lapin, leveret};
use crate::client::{Failure, Measured, answer_on, ask};

/// A run takes seconds; one that takes this long hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a server says when it can be called.
const READY: &str = "ready";

/// The child's side.
pub(crate) fn run_one(run: Run) -> io::Result<()> {
    let mut runtime = runtime::Builder::new_multi_thread();
    if let Some(threads) = run.threads {
        runtime.worker_threads(threads.into());
    }
    answer_on(runtime.enable_all().build()?, PATIENCE, async {
        match (run.side, run.candidate) {
            (Side::Client, Candidate::Leveret) => leveret::call(run).await,
            (Side::Client, Candidate::Lapin) => lapin::call(run).await,
            (Side::Server, Candidate::Leveret) => leveret::serve(run, say_ready, stop()).await,
            (Side::Server, Candidate::Lapin) => lapin::serve(run, say_ready, stop()).await,
        }
    })
}

fn say_ready() {
    println!("{READY}");
    let _ = io::stdout().flush();
}

/// Until standard input ends.
async fn stop() {
    let ended = tokio::task::spawn_blocking(|| io::stdin().read_to_end(&mut Vec::new()));
    let _ = ended.await;
}

/// What both halves took.
#[derive(Clone, Debug)]
pub(super) struct Both {
    pub(super) client: Measured,
    pub(super) server: Measured,
}

impl Both {
    /// User and system time of both processes.
    pub(super) fn cpu(&self) -> Duration {
        self.client.cpu + self.server.cpu
    }
}

/// The parent's side: starts a server, has it called, and says how it went or why it failed.
pub(super) async fn start(run: Run) -> Result<Result<Both, String>, Failure> {
    let mut server = Command::new(std::env::current_exe()?)
        .arg("run-rpc")
        .args(options(Run { side: Side::Server, ..run }).iter().flat_map(|(n, v)| [*n, v]))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut output = BufReader::new(server.stdout.take().ok_or("no output")?);
    let mut first = String::new();
    timeout(PATIENCE, output.read_line(&mut first)).await??;
    if first.trim() != READY {
        return Ok(Err(format!("the server did not start: {}", first.trim())));
    }
    let client = ask("run-rpc", &options(Run { side: Side::Client, ..run })).await?;
    drop(server.stdin.take());
    let mut said = String::new();
    timeout(PATIENCE, output.read_to_string(&mut said)).await??;
    let said: Value = serde_json::from_str(&said).unwrap_or_default();
    let server = Measured::from_json(&said)
        .ok_or_else(|| said["failed"].as_str().unwrap_or("the server ended").to_owned());
    Ok(client.and_then(|client| Ok(Both { client, server: server? })))
}

fn options(run: Run) -> Vec<(&'static str, String)> {
    let mut options = vec![
        ("--candidate", run.candidate.to_string()),
        ("--side", run.side.to_string()),
        ("--port", run.port.to_string()),
        ("--calls", run.calls.to_string()),
        ("--in-flight", run.in_flight.to_string()),
        ("--callers", run.callers.to_string()),
        ("--handlers", run.handlers.to_string()),
        ("--timeout", run.timeout.to_string()),
        ("--size", run.size.to_string()),
    ];
    options.extend(run.threads.map(|threads| ("--threads", threads.to_string())));
    options
}
