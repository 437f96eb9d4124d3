//! RabbitMQ's management API over HTTP.

use std::fmt;
use std::time::Duration;

use reqwest::{Client, Method, Url};
use serde_json::Value;

/// How long a request may take. A cluster that elects a leader takes seconds.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A client of RabbitMQ's management API.
///
/// Paths are given as segments below `/api`, and each is percent-encoded: the queue `a/b` of the
/// default virtual host is `["queues", "/", "a/b"]`.
#[derive(Clone, Debug)]
pub struct Management {
    base: Url,
    client: Client,
}

impl Management {
    /// The API at an `http://user:password@host:port` URL.
    ///
    /// # Panics
    /// If the URL is none.
    pub fn at(url: &str) -> Management {
        let base =
            Url::parse(url).unwrap_or_else(|error| panic!("{url:?} is no management URL: {error}"));
        assert!(base.has_host(), "{url:?} is no management URL: it names no host");
        let client = crate::web::client()
            .timeout(TIMEOUT)
            // An idle connection would belong to the runtime of the test that opened it and die
            // with that test, while this client may serve the next.
            .pool_max_idle_per_host(0)
            .build()
            .expect("an HTTP client without TLS needs nothing that could be missing");
        Management { base, client }
    }

    /// The URL it was made from.
    pub fn url(&self) -> &str {
        self.base.as_str()
    }

    /// Reads a path.
    pub async fn get(&self, path: &[&str]) -> Result<Value, ManagementError> {
        self.send(Method::GET, path, None).await
    }

    /// Makes or changes what is at a path.
    pub async fn put(&self, path: &[&str], body: Value) -> Result<Value, ManagementError> {
        self.send(Method::PUT, path, Some(body)).await
    }

    /// Does what a path stands for, such as publishing.
    pub async fn post(&self, path: &[&str], body: Value) -> Result<Value, ManagementError> {
        self.send(Method::POST, path, Some(body)).await
    }

    /// Removes what is at a path.
    pub async fn delete(&self, path: &[&str]) -> Result<Value, ManagementError> {
        self.send(Method::DELETE, path, None).await
    }

    async fn send(
        &self,
        method: Method,
        path: &[&str],
        body: Option<Value>,
    ) -> Result<Value, ManagementError> {
        let mut url = self.base.clone();
        url.path_segments_mut()
            .expect("an HTTP URL has a path")
            .pop_if_empty()
            .push("api")
            .extend(path);
        let failed = |status: Option<u16>, said: String| ManagementError {
            attempted: format!("{method} {}", url.path()),
            status,
            said,
        };
        let mut request = self.client.request(method.clone(), url.clone());
        if let Some(body) = &body {
            request = request.json(body);
        }
        let response = request.send().await.map_err(|error| failed(None, with_causes(&error)))?;
        let status = response.status();
        let text = response
            .text()
            .await
            .map_err(|error| failed(Some(status.as_u16()), with_causes(&error)))?;
        if !status.is_success() {
            return Err(failed(Some(status.as_u16()), text));
        }
        if text.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&text)
            .map_err(|error| failed(Some(status.as_u16()), format!("{error} in {text}")))
    }
}

/// What reqwest says alone ("error sending request") hides what happened.
fn with_causes(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        text.push_str(&format!(": {next}"));
        cause = next.source();
    }
    text
}

/// A request that the management API did not answer, or answered with an error.
#[derive(Debug)]
pub struct ManagementError {
    attempted: String,
    status: Option<u16>,
    said: String,
}

impl ManagementError {
    /// The HTTP status, if there was an answer.
    pub fn status(&self) -> Option<u16> {
        self.status
    }
}

impl fmt::Display for ManagementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ManagementError { attempted, status, said } = self;
        match status {
            Some(status) => write!(f, "{attempted}: RabbitMQ answered {status}: {said}"),
            None => write!(f, "{attempted}: no answer: {said}"),
        }
    }
}

impl std::error::Error for ManagementError {}
