//! The `leveret` program.

#[cfg(not(unix))]
compile_error!(
    "the program `leveret` needs a Unix system: it ends the processes of handlers by their group. The libraries do not"
);

mod bench;
mod broker;
mod call;
mod demo;
mod failure;
mod files;
mod get;
mod http;
mod lines;
mod logging;
mod management;
mod manual;
mod message;
mod output;
mod parking;
mod progress;
mod publish;
mod reach;
mod run;
mod signals;
mod status;
mod tail;
mod text;
mod topology;

use std::fs::File;
use std::process::{self, ExitCode};
use std::{env, io};

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use tokio::runtime::Builder;

use failure::Failure;

/// Messaging on AMQP 0-9-1 that does not lose work.
#[derive(Debug, Parser)]
#[command(name = "leveret", version, arg_required_else_help = true, after_help = failure::STATUSES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Arguments),
    Run(run::Arguments),
    Broker(broker::Arguments),
    Status(status::Arguments),
    Publish(publish::Arguments),
    Get(get::Arguments),
    Tail(tail::Arguments),
    Call(call::Arguments),
    Topology(topology::Arguments),
    Parking(parking::Arguments),
    Bench(bench::Arguments),
    Completions(manual::Completions),
    Man(manual::Man),
    #[command(name = run::reaper::SUBCOMMAND, hide = true)]
    Reap,
}

fn main() -> ExitCode {
    let matches = Arguments::command().try_get_matches().unwrap_or_else(|error| wrong(&error));
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    if is_json(&matches) {
        output::use_json_errors();
    }
    logging::begin(matches!(arguments.command, Command::Run(_)).then_some("leveret=info"));
    let runtime = match can_open_files()
        .and_then(|()| Builder::new_multi_thread().enable_all().build())
    {
        Ok(runtime) => runtime,
        Err(error) => {
            let text =
                format_args!("cannot start: {error}; `ulimit -n` and `ulimit -u` may be too low");
            return Failure::new(text).report();
        }
    };
    let result = runtime.block_on(run(arguments.command));
    // Nothing waits for a file or a terminal that never answers a read.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Ends the process: the arguments are wrong, or ask for help. A program that asks for JSON gets a line of it.
fn wrong(error: &clap::Error) -> ! {
    let wants_json = env::args_os().any(|argument| argument == "--json");
    if !(wants_json && error.use_stderr()) {
        error.exit();
    }
    let text = error.render().to_string();
    let failure = Failure::wrong(text.trim().trim_start_matches("error: "));
    output::use_json_errors();
    let _ = failure.report();
    process::exit(failure.status() as i32)
}

/// Whether there is room for what a command needs at least. What runs it panics where there is not.
fn can_open_files() -> io::Result<()> {
    const NEEDED: usize = 20;
    if cfg!(unix) {
        (0..NEEDED).map(|_| File::open("/dev/null")).collect::<io::Result<Vec<File>>>()?;
    }
    Ok(())
}

async fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Demo(arguments) => demo::run(arguments).await,
        Command::Run(arguments) => run::run(arguments).await,
        Command::Broker(arguments) => broker::run(arguments).await,
        Command::Status(arguments) => status::run(arguments).await,
        Command::Publish(arguments) => publish::run(arguments).await,
        Command::Get(arguments) => get::run(arguments).await,
        Command::Tail(arguments) => tail::run(arguments).await,
        Command::Call(arguments) => call::run(arguments).await,
        Command::Topology(arguments) => topology::run(arguments).await,
        Command::Parking(arguments) => parking::run(arguments).await,
        Command::Bench(arguments) => bench::run(arguments).await,
        Command::Completions(arguments) => manual::completions(&arguments, Arguments::command()),
        Command::Man(arguments) => manual::man(&arguments, Arguments::command()),
        Command::Reap => run::reaper::reap().await,
    }
}

/// Whether the command was given `--json`.
fn is_json(matches: &ArgMatches) -> bool {
    let here = matches.try_get_one::<bool>("json").ok().flatten().copied();
    here.unwrap_or_else(|| matches.subcommand().is_some_and(|(_, inner)| is_json(inner)))
}
