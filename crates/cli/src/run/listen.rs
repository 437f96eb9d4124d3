//! What others may ask a running service: whether it is well, what it counts, what it has declared.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use leveret::{Client, Health};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::limited::LimitedListener;
use super::wanted::{Wanted, WantedNow, missing};
use crate::failure::Failure;
use crate::output::say;

/// Counts for those who will ask. To be called before anything is counted.
pub(super) fn count() -> Result<PrometheusHandle, Failure> {
    PrometheusBuilder::new().install_recorder().map_err(Failure::new)
}

/// Answers on an address, until it is dropped.
pub(super) struct Listening(JoinHandle<()>);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Clone)]
struct Asked {
    client: Client,
    counted: PrometheusHandle,
    wanted: Wanted,
}

impl Listening {
    pub(super) async fn begin(
        address: &str,
        client: &Client,
        counted: PrometheusHandle,
        wanted: Wanted,
    ) -> Result<Listening, Failure> {
        let failed = |error| Failure::listening(address, &error);
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let router = Router::new()
            .route("/health", get(health))
            .route("/metrics", get(metrics))
            .route("/topology", get(topology))
            .with_state(Asked { client: client.clone(), counted, wanted });
        say(&format!(
            "health, metrics and topology at http://{bound}/health, /metrics and /topology"
        ));
        Ok(Listening(tokio::spawn(async move {
            if let Err(error) = axum::serve(LimitedListener::new(listener), router).await {
                eprintln!("leveret: no longer listening: {error}");
            }
        })))
    }
}

async fn health(State(asked): State<Asked>) -> impl IntoResponse {
    let told = told(&asked.client.health(), &asked.wanted.now());
    let status = match told["healthy"] == true {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, [(header::CONTENT_TYPE, "application/json")], told.to_string())
}

/// What the client knows, and what the file asks for that it does not have yet.
fn told(health: &Health, wanted: &WantedNow) -> Value {
    let missing = missing(health, &wanted.consumers);
    let is_complete = missing.is_empty() && !wanted.is_stopping;
    let error = |error: &Option<leveret::Error>| error.as_ref().map(ToString::to_string);
    let connections = health.connections.iter().map(|connection| {
        json!({
            "name": connection.name,
            "up": connection.is_up,
            "endpoint": connection.endpoint,
            "blocked": connection.blocked,
            "error": error(&connection.error),
        })
    });
    let consumers = health.consumers.iter().map(|consumer| {
        json!({ "queue": consumer.queue, "live": consumer.is_live, "error": error(&consumer.error) })
    });
    let publishers = health.publishers.iter().map(|publisher| {
        json!({
            "exchange": publisher.exchange,
            "ready": publisher.is_ready(),
            "unconfirmed": publisher.unconfirmed,
            "error": error(&publisher.error),
        })
    });
    json!({
        "healthy": health.is_healthy() && is_complete,
        "stopping": wanted.is_stopping,
        "missing_consumers": missing,
        "connections": connections.collect::<Vec<_>>(),
        "consumers": consumers.collect::<Vec<_>>(),
        "publishers": publishers.collect::<Vec<_>>(),
    })
}

async fn metrics(State(asked): State<Asked>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], asked.counted.render())
}

async fn topology(State(asked): State<Asked>) -> impl IntoResponse {
    match asked.client.topology().to_toml() {
        Ok(text) => (StatusCode::OK, text),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}
