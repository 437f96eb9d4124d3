//! Leveret and its peers, side by side: the same jobs, in the same run, interleaved.
//!
//! ```text
//! cargo run --release -p leveret-bench -- client --null-only
//! cargo run --release -p leveret-bench --features count-allocations -- client --candidate leveret --null-only
//! ```

use clap::{Parser, Subcommand};

use meter::Failure;
use suite::{ArgumentsOf, Common, execute};

mod broker;
mod by_hand;
mod child;
mod client;
mod codec;
mod countdown;
mod inbox;
mod message;
mod meter;
mod outbox;
mod rabbitmq;
mod retry;
mod rpc;
mod suite;
mod table;

#[cfg(feature = "count-allocations")]
#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

#[derive(Parser)]
#[command(about = "Measure Leveret and its peers side by side", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

#[derive(Subcommand)]
enum Command {
    /// Encode and decode with leveret-wire and with amq-protocol, the codec of lapin
    Codec(ArgumentsOf<codec::Codec>),
    /// Publish and consume with Leveret, lapin, amqprs, deadpool-lapin and RustStream, over a null peer and RabbitMQ
    Client(ArgumentsOf<client::Clients>),
    /// Load the embedded broker and RabbitMQ
    Broker(ArgumentsOf<broker::Brokers>),
    /// Retry, park and replay failed messages with Leveret and with lapin code, on RabbitMQ
    Retry(ArgumentsOf<retry::Retries>),
    /// Call services with Leveret and with lapin code, over the embedded broker and RabbitMQ
    Rpc(ArgumentsOf<rpc::Calls>),
    /// Relay an outbox to RabbitMQ with Leveret, from PostgreSQL and SQLite, and with SQL and lapin code
    Outbox(ArgumentsOf<outbox::Relays>),
    /// Handle messages exactly once with Leveret's inbox and with SQL and lapin code, on RabbitMQ and PostgreSQL
    Inbox(ArgumentsOf<inbox::Inboxes>),
    /// The null peer, for `client`
    #[command(hide = true)]
    NullPeer,
    /// The embedded broker, for `broker` and `rpc`
    #[command(hide = true)]
    ServeBroker,
}

fn main() -> Result<(), Failure> {
    let Arguments { command, common } = Arguments::parse();
    match command {
        Command::Codec(arguments) => execute::<codec::Codec>(arguments, &common),
        Command::Client(arguments) => execute::<client::Clients>(arguments, &common),
        Command::Broker(arguments) => execute::<broker::Brokers>(arguments, &common),
        Command::Retry(arguments) => execute::<retry::Retries>(arguments, &common),
        Command::Rpc(arguments) => execute::<rpc::Calls>(arguments, &common),
        Command::Outbox(arguments) => execute::<outbox::Relays>(arguments, &common),
        Command::Inbox(arguments) => execute::<inbox::Inboxes>(arguments, &common),
        Command::NullPeer => Ok(client::null_peer::serve()?),
        Command::ServeBroker => broker::process::serve(),
    }
}
