//! The `leveret` program.

mod broker;
mod demo;
mod failure;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Messaging on AMQP 0-9-1 that does not lose work.
#[derive(Debug, Parser)]
#[command(name = "leveret", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Broker(broker::Arguments),
    Demo(demo::Arguments),
}

#[tokio::main]
async fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Broker(arguments) => broker::run(arguments).await,
        Command::Demo(arguments) => demo::run(arguments).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("leveret: {error}");
            ExitCode::FAILURE
        }
    }
}
