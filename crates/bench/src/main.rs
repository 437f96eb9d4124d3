//! Leveret and its peers, side by side: the same jobs, in the same run, interleaved.
//!
//! ```text
//! cargo run --release -p leveret-bench -- client --null-only
//! cargo run --release -p leveret-bench --features count-allocations -- client --client leveret --null-only
//! ```

use clap::{Parser, Subcommand};

use meter::Failure;
use suite::{Common, execute};

mod broker;
mod by_hand;
mod child;
mod client;
mod codec;
mod countdown;
mod inbox;
mod meter;
mod outbox;
mod retry;
mod rpc;
mod suite;
mod table;

#[cfg(feature = "count-allocations")]
#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

#[derive(Parser)]
#[command(about = "Runs Leveret and its peers side by side", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

#[derive(Subcommand)]
enum Command {
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
        Command::Codec => execute::<codec::Codec>((), &common),
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
