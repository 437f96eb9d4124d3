//! The patterns of the .NET client's guide: calls and casts of a service, events for whoever wants them, and work that is
//! done once though its request comes twice.
//!
//! ```text
//! cargo run -p leveret --example patterns                                  # with a broker in memory
//! cargo run -p leveret --example patterns -- amqp://guest:guest@localhost  # with yours
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use leveret::inbox::{MemoryInbox, Remember};
use leveret::prelude::*;

type Account = Arc<AtomicI64>;

/// Not to be done twice.
async fn deposit(amount: String, State(account): State<Account>) -> Result<String, Failure> {
    let amount: i64 = amount.parse().map_err(|_| Failure::permanent("no amount").kind("amount"))?;
    Ok((account.fetch_add(amount, Ordering::Relaxed) + amount).to_string())
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let client = match std::env::args().nth(1) {
        Some(url) => Client::connect(url).await?,
        None => Client::embedded().await?,
    };

    // SimpleRpcServer and SimpleRpcClient: an inbox knows the ids of requests, and repeats their replies. (In memory; with
    // leveret-sql it is in the database of the account, in the same transaction.)
    let account = Account::default();
    let inbox = MemoryInbox::new(Remember::ids_for(Duration::from_secs(3600)));
    let bank = client
        .service("example-bank")
        .method("deposit", deposit)
        .state(Arc::clone(&account))
        .exactly_once(inbox);
    bank.declare().await?;
    let serving = tokio::spawn(bank.run());
    let rpc = client.rpc("example-bank").timeout(Duration::from_secs(10)).build().await?;
    for _ in 0..3 {
        let request = Message::new("50").message_id("the deposit of Ada");
        let balance: String = rpc.call("deposit", request).await?;
        println!("deposited 50: the balance is {balance}");
    }
    if let Err(error) = rpc.call::<String>("deposit", "fifty").await {
        println!("deposited fifty: {error}");
    }

    // Broadcasting: publishers do not know who listens.
    let stock = client.events("example-stock");
    let mut all = stock.listen(["STOCK.#"]).stream().await?;
    let mut ibm = stock.listen(["STOCK.IBM.*"]).stream().await?;
    for key in ["STOCK.KO.NYSE", "STOCK.IBM.NYSE"] {
        stock.publish(key, "up").await?;
    }
    let mut heard = Vec::new();
    for (listener, events) in [(&mut all, 2), (&mut ibm, 1)] {
        for _ in 0..events {
            let event = listener.next().await.ok_or("the listener has ended")??;
            heard.push(event.routing_key().to_str_lossy().into_owned());
            event.ack()?;
        }
    }
    println!("heard: {}", heard.join(", "));

    serving.abort();
    client.delete_queue("example-bank", Default::default()).await?;
    client.delete_exchange("example-stock", Default::default()).await?;
    client.close().await;
    let balance = account.load(Ordering::Relaxed);
    match (balance, heard.len()) {
        (50, 3) => Ok(()),
        other => Err(format!("expected a balance of 50 and three events, not {other:?}").into()),
    }
}
