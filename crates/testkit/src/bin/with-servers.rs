//! Starts the servers that a whole test run shares, runs a command that finds them in its
//! environment, and ends them again.
//!
//! ```text
//! with-servers [--rabbitmq 3.10|4.0|4.3] [--postgres] -- command argument…
//! ```

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use leveret_testkit::postgres::Postgres;
use leveret_testkit::rabbitmq::{RabbitNode, Version};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

const USAGE: &str =
    "usage: with-servers [--rabbitmq 3.10|4.0|4.3] [--postgres] -- command argument…";

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let wishes = match Wishes::read(std::env::args_os().skip(1)) {
        Ok(wishes) => wishes,
        Err(error) => {
            eprintln!("with-servers: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let servers = Servers::start(&wishes).await;
    let status = run(&wishes.command, servers.environment()).await;
    drop(servers);
    match status {
        Ok(status) => exit_code(status),
        Err(error) => {
            eprintln!("with-servers: could not run {:?}: {error}", wishes.command[0]);
            ExitCode::from(127)
        }
    }
}

/// What the command line asks for.
struct Wishes {
    rabbitmq: Option<Version>,
    postgres: bool,
    /// Never empty.
    command: Vec<OsString>,
}

impl Wishes {
    fn read(mut arguments: impl Iterator<Item = OsString>) -> Result<Wishes, String> {
        let mut wishes = Wishes { rabbitmq: None, postgres: false, command: Vec::new() };
        while let Some(argument) = arguments.next() {
            match argument.to_str() {
                Some("--rabbitmq") => {
                    let version = arguments.next().ok_or("--rabbitmq takes a version")?;
                    let version = version.to_string_lossy().parse::<Version>();
                    wishes.rabbitmq = Some(version.map_err(|error| error.to_string())?);
                }
                Some("--postgres") => wishes.postgres = true,
                Some("--") => wishes.command = arguments.by_ref().collect(),
                _ => return Err(format!("unknown argument {argument:?}")),
            }
        }
        if wishes.command.is_empty() {
            return Err("no command to run; it follows after --".to_owned());
        }
        Ok(wishes)
    }
}

/// The servers that run for the command. One whose URL is in our environment already is somebody
/// else's, and is used as it is.
struct Servers {
    rabbitmq: Option<RabbitNode>,
    postgres: Option<Postgres>,
}

impl Servers {
    async fn start(wishes: &Wishes) -> Servers {
        let given = |name| std::env::var_os(name).is_some();
        let rabbitmq = async {
            match wishes.rabbitmq {
                Some(version) if !given("LEVERET_RABBITMQ_URL") => {
                    Some(RabbitNode::start(version).await)
                }
                _ => None,
            }
        };
        let postgres = async {
            if wishes.postgres && !given("LEVERET_POSTGRES_URL") {
                Some(Postgres::start().await)
            } else {
                None
            }
        };
        let (rabbitmq, postgres) = tokio::join!(rabbitmq, postgres);
        Servers { rabbitmq, postgres }
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if let Some(node) = &self.rabbitmq {
            variables.push(("LEVERET_RABBITMQ", node.version().to_string()));
            variables.push(("LEVERET_RABBITMQ_URL", node.url()));
            variables.push(("LEVERET_RABBITMQ_MANAGEMENT_URL", node.management().url().to_owned()));
        }
        if let Some(postgres) = &self.postgres {
            variables.push(("LEVERET_POSTGRES_URL", postgres.url()));
        }
        variables
    }
}

/// Runs the command to its end. It gets to hear of the signals that ask us to end, and decides for
/// both.
async fn run(
    command: &[OsString],
    environment: Vec<(&str, String)>,
) -> std::io::Result<ExitStatus> {
    let mut terminate = signal(SignalKind::terminate())?;
    // A terminal sends Ctrl-C to the command as well, so there is nothing to pass on.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut program = Command::new(&command[0]);
    program.args(&command[1..]).envs(environment).kill_on_drop(true);
    for name in variables_of_our_package() {
        program.env_remove(name);
    }
    let mut child = program.spawn()?;
    loop {
        tokio::select! {
            status = child.wait() => return status,
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {
                if let Some(pid) = child.id().and_then(|pid| Pid::from_raw(pid as i32)) {
                    kill_process(pid, Signal::TERM)?;
                }
            }
        }
    }
}

/// What `cargo run` says of this program. Were it passed on to a cargo that is the command, that would build `ring`, whose
/// build script asks for these, and all that stands on it, anew; and the next one, which does not see them, once more.
fn variables_of_our_package() -> impl Iterator<Item = OsString> {
    let of_a_package = |name: &OsString| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    std::env::vars_os().map(|(name, _)| name).filter(of_a_package)
}

/// As a shell has it: 128 and the number of the signal that ended the command.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}
