//! The work on a message, done by a command or an HTTP endpoint.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use leveret::{Failure, Incoming, Message};
use tokio::sync::OnceCell;

use super::command;
use super::http::Http;
use super::reaper::Reaper;

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
    Command(Vec<String>, Reaper),
    Http(Http),
}

/// What becomes of what a command writes, or an endpoint answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// It is the reply to a call.
    Reply,
    /// Nothing: the sender does not wait for a reply.
    Discarded,
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
    /// A command or, if there is none, the endpoint. The first command starts the reaper.
    pub(super) async fn new(
        command: &Option<Vec<String>>,
        http: &Option<String>,
        timeout: Duration,
        reaper: &OnceCell<Reaper>,
    ) -> Result<Self, crate::failure::Failure> {
        let worker = match command {
            Some(command) => {
                let reaper = reaper.get_or_try_init(Reaper::start).await?.clone();
                Worker::Command(command.clone(), reaper)
            }
            None => Worker::Http(Http::new(http.clone().unwrap_or_default()).await?),
        };
        Ok(Work(Arc::new(Inner { worker, timeout })))
    }

    /// Does the work on one message.
    pub(super) async fn on(&self, message: Incoming) -> Result<(), Failure> {
        let facts = super::facts::facts(&message);
        self.with(&facts, message.body().clone(), Output::Discarded).await.map(drop)
    }

    /// Does what a request asks for. A request without an address for replies is as good as a message.
    pub(super) async fn answer(&self, request: Incoming) -> Result<Answer, Failure> {
        let facts = super::facts::facts(&request);
        let output = match request.properties().reply_to {
            Some(_) => Output::Reply,
            None => Output::Discarded,
        };
        self.with(&facts, request.body().clone(), output).await
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
        self.with(&facts, lines.into(), Output::Discarded).await.map(drop)
    }

    async fn with(
        &self,
        facts: &[(&'static str, String)],
        body: Bytes,
        output: Output,
    ) -> Result<Answer, Failure> {
        let within = self.0.timeout;
        match &self.0.worker {
            Worker::Command(command, reaper) => {
                command::run(command, facts, &body, output, within, reaper).await
            }
            Worker::Http(http) => http.post(facts, body, output, within).await,
        }
    }
}

pub(super) fn took_too_long(within: Duration) -> Failure {
    Failure::retry(format!("it took longer than {within:?}")).kind("timeout")
}
