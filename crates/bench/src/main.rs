//! Leveret and its peers, side by side: the same jobs, in the same run, interleaved.
//!
//! ```text
//! cargo run --release -p leveret-bench -- codec
//! cargo run --release -p leveret-bench -- client
//! cargo run --release -p leveret-bench -- broker
//! cargo run --release -p leveret-bench -- retry
//! cargo run --release -p leveret-bench -- rpc
//! cargo run --release -p leveret-bench -- outbox
//! cargo run --release -p leveret-bench -- inbox
//! cargo run --release -p leveret-bench --features count-allocations -- client --client leveret --null-only
//! ```

use std::error::Error;

use clap::{Parser, Subcommand};

mod broker;
mod client;
mod codec;
mod inbox;
mod measure;
mod outbox;
mod report;
mod retry;
mod rpc;
mod turns;

#[cfg(feature = "count-allocations")]
#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

#[derive(Parser)]
#[command(about = "Runs Leveret and its peers side by side", version)]
struct Arguments {
    #[command(subcommand)]
    job: Job,
    /// Print JSON instead of a table
    #[arg(long, global = true)]
    json: bool,
    /// How often each candidate runs; the median counts [default: 7 for codec, 3 for the others]
    #[arg(long, global = true, value_parser = clap::value_parser!(u32).range(3..))]
    rounds: Option<u32>,
}

#[derive(Subcommand)]
enum Job {
    /// Encoding and decoding alone: leveret-wire and amq-protocol, the codec of lapin
    Codec,
    /// Whole clients: Leveret's engine and toolkit, lapin, amqprs, deadpool-lapin and RustStream, against a null peer and a
    /// real RabbitMQ
    Client(client::Arguments),
    /// Whole brokers: the embedded one and RabbitMQ
    Broker(broker::Arguments),
    /// Messages that fail, wait and succeed, or are parked and replayed: Leveret, and lapin by hand, on a real RabbitMQ
    Retry(retry::Arguments),
    /// Calls and replies: Leveret, and lapin by hand, over the embedded broker and a real RabbitMQ
    Rpc(rpc::Arguments),
    /// Sending what is in an outbox: Leveret's relay, and relays by hand with lapin, between PostgreSQL or SQLite and RabbitMQ
    Outbox(outbox::Arguments),
    /// Handling messages exactly once: Leveret's inbox, and lapin and sqlx by hand, between RabbitMQ and PostgreSQL; and what it
    /// takes to remember many of them
    Inbox(inbox::Arguments),
    /// One run of one client, for `client`
    #[command(hide = true)]
    RunOne(client::Run),
    /// One run of one candidate, for `retry`
    #[command(hide = true)]
    RunRetry(retry::Run),
    /// One half of a run, for `rpc`
    #[command(hide = true)]
    RunRpc(rpc::Run),
    /// One run of one candidate, for `outbox`
    #[command(hide = true)]
    RunOutbox(outbox::Run),
    /// One run of one candidate, for `inbox`
    #[command(hide = true)]
    RunInbox(inbox::Run),
    /// The null peer, for `client`
    #[command(hide = true)]
    NullPeer,
    /// The embedded broker, for `broker`
    #[command(hide = true)]
    ServeBroker,
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let Arguments { job, json, rounds } = Arguments::parse();
    match job {
        Job::Codec => {
            let results = codec::run(rounds.unwrap_or(7));
            show(json, || report::json(&results), || report::table(&results));
        }
        Job::Client(arguments) => {
            let rows = client::run(&arguments, rounds.unwrap_or(3))?;
            show(json, || client::json(&rows), || client::print(&rows));
        }
        Job::Broker(arguments) => {
            let rows = broker::run(&arguments, rounds.unwrap_or(3))?;
            show(json, || broker::json(&rows), || broker::table(&rows));
        }
        Job::Retry(arguments) => {
            let rows = retry::run(&arguments, rounds.unwrap_or(3))?;
            show(json, || retry::json(&rows), || retry::table(&rows));
        }
        Job::Rpc(arguments) => {
            let rows = rpc::run(&arguments, rounds.unwrap_or(3))?;
            show(json, || rpc::json(&rows), || rpc::table(&rows));
        }
        Job::Outbox(arguments) => {
            let rows = outbox::run(&arguments, rounds.unwrap_or(3))?;
            show(json, || outbox::json(&rows), || outbox::table(&rows));
        }
        Job::Inbox(arguments) => {
            let rows = inbox::run(&arguments, rounds.unwrap_or(3))?;
            show(json, || inbox::json(&rows), || inbox::table(&rows));
        }
        Job::ServeBroker => broker::serve()?,
        Job::RunOne(run) => client::run_one(run)?,
        Job::RunRetry(run) => retry::run_one(run)?,
        Job::RunRpc(run) => rpc::run_one(run)?,
        Job::RunOutbox(run) => outbox::run_one(run)?,
        Job::RunInbox(run) => inbox::run_one(run)?,
        Job::NullPeer => client::run_null_peer()?,
    }
    Ok(())
}

fn show(as_json: bool, json: impl FnOnce() -> serde_json::Value, table: impl FnOnce() -> String) {
    if as_json {
        println!("{}", json());
    } else {
        print!("{}", table());
    }
}
