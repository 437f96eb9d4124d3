//! Leveret and its peers, side by side: the same jobs, in the same run, interleaved.
//!
//! ```text
//! cargo run --release -p leveret-bench -- codec
//! ```

use clap::{Parser, Subcommand};

mod codec;
mod measure;
mod report;

#[derive(Parser)]
#[command(about = "Runs Leveret and its peers side by side", version)]
struct Arguments {
    #[command(subcommand)]
    job: Job,
    /// Print JSON instead of a table
    #[arg(long, global = true)]
    json: bool,
    /// How often each candidate runs; the median counts
    #[arg(long, global = true, default_value_t = 7, value_parser = clap::value_parser!(u32).range(3..))]
    rounds: u32,
}

#[derive(Subcommand)]
enum Job {
    /// Encoding and decoding alone: leveret-wire and amq-protocol, the codec of lapin
    Codec,
}

fn main() {
    let arguments = Arguments::parse();
    let results = match arguments.job {
        Job::Codec => codec::run(arguments.rounds),
    };
    if arguments.json {
        println!("{}", report::json(&results));
    } else {
        print!("{}", report::table(&results));
    }
}
