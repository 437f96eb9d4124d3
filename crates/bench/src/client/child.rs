//! One run in a process of its own, so that its CPU time is its own.

use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::jobs::{Client, Run};
use super::meter::{Failure, Measured};
use super::{amqprs, deadpool, lapin, leveret, limit, ruststream, toolkit};

/// A run takes seconds; one that takes this long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// The child's side.
pub(crate) fn run_one(run: Run) -> io::Result<()> {
    answer(PATIENCE, async {
        match run.client {
            Client::Leveret | Client::Stamped => leveret::run(run).await,
            Client::Toolkit => toolkit::run(run).await,
            Client::Lapin => lapin::run(run).await,
            Client::Amqprs => amqprs::run(run).await,
            Client::Deadpool => deadpool::run(run).await,
            Client::Ruststream => ruststream::run(run).await,
            Client::Limit => limit::run(run).await,
        }
    })
}

/// The parent's side: has a run done, and says how it went or why it failed.
pub(crate) async fn start(run: Run) -> io::Result<Result<Measured, String>> {
    let options = [
        ("--client", run.client.to_string()),
        ("--job", run.job.to_string()),
        ("--peer", run.peer.to_string()),
        ("--port", run.port.to_string()),
        ("--size", run.size.to_string()),
        ("--channels", run.channels.to_string()),
        ("--messages", run.messages.to_string()),
    ];
    ask("run-one", &options).await
}

/// Does a run, which may take so long, and says on standard output how it went.
pub(crate) fn answer(
    patience: Duration,
    run: impl Future<Output = Result<Measured, Failure>>,
) -> io::Result<()> {
    answer_on(Runtime::new()?, patience, run)
}

/// The same on a runtime of one's own.
pub(crate) fn answer_on(
    runtime: Runtime,
    patience: Duration,
    run: impl Future<Output = Result<Measured, Failure>>,
) -> io::Result<()> {
    #[cfg(feature = "count-allocations")]
    let _profiler = dhat::Profiler::builder().testing().build();
    let done = runtime.block_on(async {
        match tokio::time::timeout(patience, run).await {
            Ok(done) => done.map_err(|error| error.to_string()),
            Err(_) => Err(format!("not done after {patience:?}")),
        }
    });
    match done {
        Ok(measured) => println!("{}", measured.to_json()),
        Err(error) => println!("{}", json!({ "failed": error })),
    }
    // A client that hangs would hang here, too.
    runtime.shutdown_background();
    Ok(())
}

/// Starts a command of this program that [answers](answer), and gives its answer.
pub(crate) async fn ask(
    command: &str,
    options: &[(&str, String)],
) -> io::Result<Result<Measured, String>> {
    let output = tokio::process::Command::new(std::env::current_exe()?)
        .arg(command)
        .args(options.iter().flat_map(|(name, value)| [*name, value.as_str()]))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output()
        .await?;
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    Ok(Measured::from_json(&answer).ok_or_else(|| match answer["failed"].as_str() {
        Some(reason) => reason.to_owned(),
        None => format!("the process ended with {}", output.status),
    }))
}

/// A command of this program that serves, in a process of its own, and says on standard output on which port. It ends
/// with this value.
pub(crate) struct Server {
    process: Child,
    pub(crate) port: u16,
}

impl Server {
    pub(crate) fn start(command: &str) -> io::Result<Server> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        if let Some(stdout) = process.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let port = line.trim().parse().map_err(io::Error::other)?;
        Ok(Server { process, port })
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
