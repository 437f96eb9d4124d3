//! Processes of this program: one for each run, so that its CPU time and memory are its own, and one for each server.
//!
//! A run is described in JSON on the command line; its process prints what it measured, or why it failed, in JSON.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::runtime;
use tokio::time::timeout;

use crate::meter::{Failure, Measured};
use crate::suite::{RunOf, Suite};

/// How long a server may take to start or to end.
const SERVER_DEADLINE: Duration = Duration::from_secs(30);

/// What a run's process prints.
type Answer = Result<Measured, String>;

/// The child's side: does a run, and prints its answer.
pub(crate) fn answer<S: Suite>(run: &str) -> Result<(), Failure> {
    let run: RunOf<S> = serde_json::from_str(run)?;
    let mut runtime = runtime::Builder::new_multi_thread();
    if let Some(threads) = S::threads(&run.setting) {
        runtime.worker_threads(threads.into());
    }
    let runtime = runtime.enable_all().build()?;
    #[cfg(feature = "count-allocations")]
    let _profiler = dhat::Profiler::builder().testing().build();
    let answer: Answer = runtime.block_on(async {
        match timeout(S::DEADLINE, S::run(run)).await {
            Ok(done) => done.map_err(|error| error.to_string()),
            Err(_) => Err(format!("not done after {:?}", S::DEADLINE)),
        }
    });
    println!("{}", serde_json::to_string(&answer)?);
    // A client that hangs would hang here, too.
    runtime.shutdown_background();
    Ok(())
}

/// The parent's side: has a run done, and gives its answer.
pub(crate) async fn ask<S: Suite>(run: &RunOf<S>) -> Result<Answer, Failure> {
    let output = command(&arguments::<S>(run)?)?.stdin(Stdio::null()).output().await?;
    let died = |_| Err(format!("the process ended with {}", output.status));
    Ok(serde_json::from_slice(&output.stdout).unwrap_or_else(died))
}

fn command(arguments: &[String]) -> Result<Command, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(arguments).stderr(Stdio::inherit()).kill_on_drop(true);
    Ok(command)
}

fn arguments<S: Suite>(run: &RunOf<S>) -> Result<[String; 3], Failure> {
    Ok([S::NAME.to_owned(), "--run".to_owned(), serde_json::to_string(run)?])
}

/// A process that serves until its standard input ends, or until this value is dropped. It prints a line when it is ready.
pub(crate) struct Server {
    process: Child,
    output: BufReader<ChildStdout>,
    /// The line that it printed.
    pub(crate) ready: String,
}

impl Server {
    /// Starts a hidden command of this program that prints where it listens on 127.0.0.1.
    pub(crate) async fn start(name: &str) -> Result<(Server, u16), Failure> {
        let server = Server::spawn(&[name.to_owned()]).await?;
        let port = server.ready.parse();
        let port = port.map_err(|_| format!("{name} did not start: {}", server.ready))?;
        Ok((server, port))
    }

    /// Starts a run that serves another one.
    pub(crate) async fn of_run<S: Suite>(run: &RunOf<S>) -> Result<Server, Failure> {
        Server::spawn(&arguments::<S>(run)?).await
    }

    async fn spawn(arguments: &[String]) -> Result<Server, Failure> {
        let mut command = command(arguments)?;
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut output = BufReader::new(process.stdout.take().ok_or("a server without output")?);
        let mut ready = String::new();
        timeout(SERVER_DEADLINE, output.read_line(&mut ready)).await??;
        ready.truncate(ready.trim_end().len());
        Ok(Server { process, output, ready })
    }

    pub(crate) fn process_id(&self) -> Result<u32, Failure> {
        self.process.id().ok_or_else(|| "the server has ended".into())
    }

    /// Ends a run that serves another one, and gives its answer.
    pub(crate) async fn finish(mut self) -> Result<Answer, Failure> {
        drop(self.process.stdin.take());
        let mut answer = String::new();
        timeout(SERVER_DEADLINE, self.output.read_to_string(&mut answer)).await??;
        Ok(serde_json::from_str(&answer)?)
    }
}

/// The server's side: waits until the process that started this one closes its standard input, or ends.
pub(crate) async fn stdin_end() {
    let _ = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
}
