//! Prices of shares are broadcast; one application keeps the last of each, another warns when one falls, by an event of its
//! own.
//!
//! ```text
//! cargo run --example events                                  # with a broker in memory
//! cargo run --example events -- amqp://guest:guest@localhost  # with yours
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use leveret::prelude::*;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Tick {
    symbol: String,
    price: f64,
}

type Prices = Arc<Mutex<BTreeMap<String, f64>>>;

/// Handlers of events cannot reply, but they may emit.
async fn watch(
    Json(tick): Json<Tick>,
    State(prices): State<Prices>,
    emit: Emit,
) -> Result<(), Error> {
    let before = lock(&prices).insert(tick.symbol.clone(), tick.price);
    match before {
        Some(before) if tick.price < before => {
            emit.publish(&format!("ALERT.{}", tick.symbol), Json(&tick)).await
        }
        _ => Ok(()),
    }
}

fn lock(prices: &Prices) -> std::sync::MutexGuard<'_, BTreeMap<String, f64>> {
    prices.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[tokio::main]
async fn main() {
    if let Err(error) = run().await {
        eprintln!("events: {error}");
        std::process::exit(1);
    }
}

async fn run() -> Result<(), BoxError> {
    let client = match std::env::args().nth(1) {
        Some(url) => Client::connect(url).await?,
        None => Client::embedded().await?,
    };
    let stock = client.events("example.stock");

    // For this program alone, and gone with it. A durable one: stock.subscribe("watcher", ["STOCK.#"]).
    let watching = stock.listen(["STOCK.#"]).state(Prices::default());
    let mut alerts = stock.listen(["ALERT.*"]).stream().await?;
    watching.declare().await?;

    for (symbol, price) in [("IBM", 171.5), ("KO", 62.0), ("IBM", 169.0), ("KO", 62.5)] {
        let tick = Tick { symbol: symbol.to_owned(), price };
        println!("{symbol} is at {price}");
        stock.publish(&format!("STOCK.{symbol}.NYSE"), Json(&tick)).await?;
    }

    let until_alert = async {
        if let Some(Ok(alert)) = alerts.next().await {
            println!("{}: {}", alert.routing_key(), String::from_utf8_lossy(alert.body()));
            let _ = alert.ack();
        }
    };
    let summary = watching.handle(watch).run_until(until_alert).await?;
    println!("{} events were handled", summary.handled);
    client.close().await;
    Ok(())
}
