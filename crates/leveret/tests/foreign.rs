//! Clients of others stand beside this one: on the embedded broker, and on the RabbitMQ at hand.

#[path = "../../broker/tests/foreign/clients.rs"]
#[allow(dead_code)]
mod clients;
#[path = "support/services.rs"]
mod services;

mod foreign {
    mod rpc;
}

use std::time::Duration;

use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(60);

async fn soon<F: IntoFuture>(what: &str, future: F) -> F::Output {
    timeout(SOON, future).await.unwrap_or_else(|_| panic!("{what} did not happen in {SOON:?}"))
}
