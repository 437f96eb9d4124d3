//! Sends ten letters through a queue and reads them again.
//!
//! ```text
//! cargo run --example letters -- amqp://guest:guest@localhost
//! ```

use leveret::amqp::{Connection, ConsumeOptions, Options, Outcome, Publish, QueueOptions};

#[tokio::main]
async fn main() {
    let uri = std::env::args().nth(1).unwrap_or_else(|| "amqp://localhost".to_owned());
    if let Err(error) = run(&uri).await {
        eprintln!("letters: {error}");
        std::process::exit(1);
    }
}

async fn run(uri: &str) -> Result<(), Box<dyn std::error::Error>> {
    let connection = Connection::open(&Options::from_uri(uri)?).await?;
    let channel = connection.open_channel().await?.into_confirm().await?;
    // For this connection alone, and gone with it.
    let exclusive = QueueOptions { exclusive: true, durable: false, ..QueueOptions::default() };
    let queue = channel.declare_queue("", exclusive).await?;

    for number in 1..=10 {
        let letter = Publish {
            routing_key: &queue.name,
            mandatory: true,
            body: format!("letter {number}").into(),
            ..Publish::default()
        };
        match channel.publish(&letter).await?.await {
            Outcome::Acked => {}
            other => return Err(format!("letter {number} was not taken: {other:?}").into()),
        }
    }

    let mut letters = channel.consume(&queue.name, ConsumeOptions::default()).await?;
    for _ in 1..=10 {
        let Some(delivery) = letters.next().await else { break };
        let delivery = delivery?;
        println!("{}", String::from_utf8_lossy(delivery.body()));
        delivery.ack()?;
    }
    connection.close().await?;
    Ok(())
}
