//! `leveret tail`: shows what an exchange gets, as it comes.

use clap::Args;
use leveret::{Client, Queue, Topology};

use crate::failure::Failure;
use crate::message::Shown;
use crate::output::{Form, note, print, print_bytes};
use crate::reach::Reach;

/// Shows what is published to an exchange from now on, until Ctrl-C.
///
/// It gets copies by a queue of its own, which is gone with it: nobody gets less because somebody looks.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The exchange.
    #[arg(value_name = "EXCHANGE")]
    exchange: String,

    /// The routing keys: patterns of a topic exchange, as in `order.*`; all if there are none.
    #[arg(value_name = "KEY", default_value = "#")]
    keys: Vec<String>,

    /// End after so many.
    #[arg(short = 'n', long, alias = "limit", value_name = "COUNT")]
    count: Option<u64>,

    /// Write only the bodies, as they are.
    #[arg(long, conflicts_with = "json")]
    raw: bool,

    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
}

/// The queue, as the client calls it.
const QUEUE: &str = "leveret-tail";

/// How many may wait for a slow terminal; of more, the oldest are dropped.
const WAITING: u64 = 10_000;

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let command = async |client: &Client| show(client, &arguments).await;
    arguments.reach.with_client(command).await
}

async fn show(client: &Client, arguments: &Arguments) -> Result<(), Failure> {
    let mut queue = Queue::temporary(QUEUE).max_length(WAITING);
    for key in &arguments.keys {
        queue = queue.bind(&arguments.exchange, key);
    }
    client.apply(&Topology::new().queue(queue)).await?;
    let mut deliveries = client.consumer(QUEUE).auto_ack().stream().await?;
    note(&format!("listening to exchange {:?}; stop with Ctrl-C", arguments.exchange));
    let mut left = arguments.count.unwrap_or(u64::MAX);
    while left > 0 {
        let Some(delivery) = deliveries.next().await else { break };
        let delivery = delivery?;
        match (arguments.raw, arguments.form.json) {
            (true, _) => print_bytes(delivery.body())?,
            (_, true) => print(&delivery.to_json())?,
            _ => print(&format!("{}\n", Shown::from(&delivery).in_full()))?,
        }
        left -= 1;
    }
    Ok(())
}
