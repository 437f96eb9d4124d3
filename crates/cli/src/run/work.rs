//! The work on a message, done by a command or an HTTP endpoint.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use leveret::{Failure, Incoming, Message};

use super::command;
use super::http::Http;

/// Who does it.
#[derive(Clone, Debug)]
pub(super) struct Work(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    worker: Worker,
    timeout: Duration,
}

#[derive(Debug)]
enum Worker {
    Command(Vec<String>),
    Http(Http),
}

/// What came out of it.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) body: Bytes,
    pub(super) content_type: Option<String>,
}

impl From<Answer> for Message {
    fn from(answer: Answer) -> Self {
        let message = Message::new(answer.body);
        match answer.content_type {
            Some(content_type) => message.content_type(content_type),
            None => message,
        }
    }
}

impl Work {
    /// A command or, if there is none, the endpoint.
    pub(super) async fn new(
        command: &Option<Vec<String>>,
        http: &Option<String>,
        timeout: Duration,
    ) -> Result<Self, crate::failure::Failure> {
        let worker = match command {
            Some(command) => Worker::Command(command.clone()),
            None => Worker::Http(Http::new(http.clone().unwrap_or_default()).await?),
        };
        Ok(Work(Arc::new(Inner { worker, timeout })))
    }

    /// Does the work on one message.
    pub(super) async fn on(&self, message: Incoming) -> Result<Answer, Failure> {
        let facts = super::facts::facts(&message);
        self.with(&facts, message.body().clone()).await
    }

    /// Does the work on a batch: messages as lines of JSON.
    pub(super) async fn on_batch(&self, messages: Vec<Incoming>) -> Result<(), Failure> {
        let lines: String = messages.iter().map(|message| message.to_json() + "\n").collect();
        let queue = messages.first().map(|message| message.queue().to_owned()).unwrap_or_default();
        let facts = [
            ("queue", queue),
            ("batch", messages.len().to_string()),
            ("content-type", "application/x-ndjson".to_owned()),
        ];
        self.with(&facts, lines.into()).await.map(drop)
    }

    async fn with(&self, facts: &[(&'static str, String)], body: Bytes) -> Result<Answer, Failure> {
        let working = async {
            match &self.0.worker {
                Worker::Command(command) => command::run(command, facts, &body).await,
                Worker::Http(http) => http.post(facts, body).await,
            }
        };
        match tokio::time::timeout(self.0.timeout, working).await {
            Ok(result) => result,
            Err(_) => {
                let text = format!("it took longer than {:?}", self.0.timeout);
                Err(Failure::retry(text).kind("timeout"))
            }
        }
    }
}
