//! A service that tells prices, and callers who ask for them.
//!
//! ```text
//! cargo run --example prices                                    # with a broker in memory
//! cargo run --example prices -- amqp://guest:guest@localhost
//! ```

use std::time::Duration;

use leveret::prelude::*;
use tokio::sync::oneshot;

async fn quote(Json(symbol): Json<String>) -> Result<Json<f64>, Failure> {
    match symbol.as_str() {
        "IBM" => Ok(Json(142.5)),
        "LVMH" => Ok(Json(711.0)),
        other => Err(Failure::permanent(format!("no price for {other}")).kind("unknown-symbol")),
    }
}

async fn ticks(Json(count): Json<u32>, mut replier: Replier) -> Result<End, Error> {
    for number in 0..count {
        replier.send(Json(142.0 + f64::from(number))).await?;
    }
    Ok(End)
}

#[tokio::main]
async fn main() {
    if let Err(error) = run().await {
        eprintln!("prices: {error}");
        std::process::exit(1);
    }
}

async fn run() -> Result<(), BoxError> {
    let client = match std::env::args().nth(1) {
        Some(url) => Client::connect(&*url).await?,
        None => Client::embedded().await?,
    };
    let service = client.service("prices").method("quote", quote).method("ticks", ticks);
    service.declare().await?;
    let (stop, stopped) = oneshot::channel::<()>();
    let service = tokio::spawn(service.run_until(stopped));

    let prices = client.rpc("prices").timeout(Duration::from_secs(5)).build().await?;
    for symbol in ["IBM", "LVMH", "XYZ"] {
        match prices.call::<Json<f64>>("quote", Json(symbol)).await {
            Ok(Json(price)) => println!("{symbol}: {price}"),
            Err(error) => println!("{symbol}: {error}"),
        }
    }
    let mut ticks = prices.stream::<Json<f64>>("ticks", Json(3)).await?;
    while let Some(tick) = ticks.next().await {
        println!("tick: {}", tick?.0);
    }
    drop(stop);
    println!("{:?}", service.await??);
    client.close().await;
    Ok(())
}
