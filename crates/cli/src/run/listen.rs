//! What others may ask a running service: whether it is well, what it counts, what it has declared.

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use leveret::{Client, Health};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::limited::LimitedListener;
use super::wanted::{Wanted, WantedNow, missing};
use crate::failure::Failure;
use crate::output::{note, say};

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
            .layer(map_response(last))
            .with_state(Asked { client: client.clone(), counted, wanted });
        say(&format!(
            "health, metrics and topology at http://{bound}/health, /metrics and /topology"
        ));
        Ok(Listening(tokio::spawn(async move {
            if let Err(error) = axum::serve(LimitedListener::new(listener), router).await {
                note(&format!("no longer listening: {error}"));
            }
        })))
    }
}

async fn health(State(asked): State<Asked>) -> impl IntoResponse {
    let told = told(asked.client.health(), &asked.wanted.now());
    let status = match told["healthy"] == true {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, [(header::CONTENT_TYPE, "application/json")], told.to_string())
}

/// What the client knows, and what the file asks for that it does not have yet.
fn told(mut health: Health, wanted: &WantedNow) -> Value {
    let mut told = json!(health);
    let missing = missing(&health, &wanted.consumers);
    if wanted.is_reloading {
        health.consumers.retain(|consumer| consumer.is_live);
    }
    told["healthy"] = json!(health.is_healthy() && missing.is_empty() && !wanted.is_stopping);
    told["stopping"] = json!(wanted.is_stopping);
    told["missing_consumers"] = json!(missing);
    told
}

/// A connection has one request, so that the end of its lifetime comes within none.
async fn last(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
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
