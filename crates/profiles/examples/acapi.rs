//! Two applications by the conventions of ACAPI: one broadcasts events and answers requests, the other subscribes and asks.
//!
//! ```text
//! cargo run -p leveret-profiles --example acapi                                  # with a broker in memory
//! cargo run -p leveret-profiles --example acapi -- amqp://guest:guest@localhost  # with yours
//! ```

use std::time::Duration;

use leveret::prelude::*;
use leveret_profiles::{Acapi, AcapiSite};

/// What the ledger answers to requests for a policy.
async fn policy(number: String) -> Result<String, Failure> {
    match number.as_str() {
        "17" => Ok("the policy 17".to_owned()),
        other => Err(Failure::permanent(format!("there is no policy {other}")).kind("not-found")),
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let client = match std::env::args().nth(1) {
        Some(url) => Client::connect(url).await?,
        None => Client::embedded().await?,
    };
    // Exchanges such as dc0.example.e.topic.events; retries as Sneakers has them.
    let site =
        AcapiSite::new("dc0", "example").retry(Acapi::new().interval(Duration::from_millis(200)));
    client.apply(&site.topology()).await?;

    // The ledger: answers requests, from the queue dc0.example.q.ledger.policy-requests.
    let service =
        site.serve(&client, "ledger", "policy-requests", ["resource.policy"], policy).await?;
    service.declare().await?;
    let serving = tokio::spawn(service.run());

    // The enrollment: hears of families. The first time its database is locked, so the event comes again.
    let (heard, mut until_heard) = tokio::sync::mpsc::channel(10);
    let events = site.events(&client);
    let subscriber = site.subscribe(&events, "enroll", "families", ["individual.*"])?;
    subscriber.declare().await?;
    let handler = move |event: String, Attempt(attempt): Attempt| {
        let heard = heard.clone();
        async move {
            if attempt == 1 {
                return Err(Failure::retry("the database is locked").kind("database"));
            }
            let _ = heard.send(format!("{event}, at attempt {attempt}")).await;
            Ok(())
        }
    };
    events.publish("individual.created", "Ada was added").await?;
    let summary = subscriber
        .handle(handler)
        .run_until(async { println!("heard: {}", until_heard.recv().await.unwrap_or_default()) })
        .await?;

    let requests = site.requests(&client).timeout(Duration::from_secs(10)).build().await?;
    let found: String = requests.call("resource.policy", "17").await?;
    println!("asked for policy 17: {found}");
    let missing = requests.call::<String>("resource.policy", "18").await;
    let Err(error) = missing else { return Err("there should be no policy 18".into()) };
    println!("asked for policy 18: {error}");

    serving.abort();
    for queue in client.topology().queues() {
        client.delete_queue(queue.name(), Default::default()).await?;
    }
    for exchange in client.topology().exchanges() {
        client.delete_exchange(exchange.name(), Default::default()).await?;
    }
    client.close().await;
    match (summary.handled, summary.retried) {
        (1, 1) => Ok(()),
        other => Err(format!("expected one event, tried again once, not {other:?}").into()),
    }
}
