//! `leveret get`: looks at the first messages of a queue, or takes them.

use clap::Args;
use leveret::amqp::GetOptions;
use leveret::{Client, Filter};

use crate::failure::Failure;
use crate::message::Shown;
use crate::output::{Form, note, print, print_bytes};
use crate::parking::Returns;
use crate::reach::Reach;

/// Shows the first messages of a queue. They stay there, unless they are taken.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The queue.
    #[arg(value_name = "QUEUE")]
    queue: String,

    /// How many.
    #[arg(short = 'n', long, alias = "limit", value_name = "COUNT", default_value_t = 1)]
    count: usize,

    /// Take them out of the queue, each after it was shown.
    #[arg(long)]
    take: bool,

    /// Write only the bodies, as they are.
    #[arg(long, conflicts_with = "json")]
    raw: bool,

    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    returns: Returns,
    #[command(flatten)]
    reach: Reach,
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let command = async |client: &Client| match arguments.take {
        true => take(client, &arguments).await,
        false => look(client, &arguments).await,
    };
    let shown = match (arguments.take, arguments.count) {
        (true, 2..) => arguments.reach.with_client(command).await?,
        _ => arguments.reach.with_client_briefly(command).await?,
    };
    if shown == 0 {
        note(&format!("queue {:?} has no message", arguments.queue));
    }
    Ok(())
}

async fn look(client: &Client, arguments: &Arguments) -> Result<usize, Failure> {
    let lot = arguments.returns.lot(client, &arguments.queue);
    let messages = lot.list(&Filter::new(), arguments.count).await?;
    for message in &messages {
        match (arguments.raw, arguments.form.json) {
            (true, _) => print_bytes(message.body())?,
            (_, true) => print(&message.to_json())?,
            _ => print(&format!("{}\n", Shown::from(message).in_full()))?,
        }
    }
    Ok(messages.len())
}

async fn take(client: &Client, arguments: &Arguments) -> Result<usize, Failure> {
    for shown in 0..arguments.count {
        let got = client.get(&arguments.queue, GetOptions::default()).await?;
        let Some(delivery) = got else { return Ok(shown) };
        match (arguments.raw, arguments.form.json) {
            (true, _) => print_bytes(delivery.body())?,
            (_, true) => print(&delivery.to_json())?,
            _ => print(&format!("{}\n", Shown::from(&delivery).in_full()))?,
        }
        delivery.ack()?;
    }
    Ok(arguments.count)
}
