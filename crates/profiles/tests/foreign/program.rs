//! A program of the other side, which runs beside a test.

use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use leveret_testkit::eventually;
use serde_json::Value as Json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use crate::{SOON, soon};

/// Where `scripts/install-python-clients` puts it.
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/foreign/python/bin/python");

pub(crate) struct Program {
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
    reading: JoinHandle<()>,
    complaint: JoinHandle<String>,
}

impl Program {
    /// Starts a program of this folder, and waits until its consumers are there.
    pub(crate) async fn start(name: &str, url: &str, settings: Json) -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign").join(name);
        let mut command = Command::new(PYTHON);
        command
            .arg(file)
            .args([url, &settings.to_string()])
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("Python, as scripts/install-python-clients has it");
        let said = Arc::new(Mutex::new(Vec::new()));
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let reading = tokio::spawn({
            let said = Arc::clone(&said);
            async move {
                while let Ok(Some(line)) = lines.next_line().await {
                    said.lock().unwrap().push(line);
                }
            }
        });
        let mut errors = child.stderr.take().unwrap();
        let complaint = tokio::spawn(async move {
            let mut text = String::new();
            let _ = errors.read_to_string(&mut text).await;
            text
        });
        let program = Program { child, said, reading, complaint };
        program.until("it is ready", |said| said.iter().any(|line| line == "ready")).await
    }

    /// What it has said so far.
    pub(crate) fn said(&self) -> Vec<String> {
        self.said.lock().unwrap().clone()
    }

    /// Waits for what it says. If it dies meanwhile, the test fails with its last words.
    pub(crate) async fn until(mut self, what: &str, is_said: impl Fn(&[String]) -> bool) -> Self {
        let alive = eventually(SOON, format!("{what}, by the other side"), async || {
            let has_ended = self.reading.is_finished();
            let said = self.said();
            if has_ended || is_said(&said) { Ok(!has_ended) } else { Err(format!("{said:?}")) }
        })
        .await;
        if !alive && !is_said(&self.said()) {
            let complaint = soon("its last words", &mut self.complaint).await.unwrap();
            panic!("the other side has ended: {complaint}");
        }
        self
    }

    /// Lets it end, and gives all that it has said.
    pub(crate) async fn end(mut self) -> Vec<String> {
        drop(self.child.stdin.take());
        let status = soon("its end", self.child.wait()).await.unwrap();
        let complaint = soon("its last words", self.complaint).await.unwrap();
        assert!(status.success(), "the other side has failed: {complaint}");
        soon("its words", self.reading).await.unwrap();
        std::mem::take(&mut *self.said.lock().unwrap())
    }
}
