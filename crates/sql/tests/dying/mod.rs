//! An inbox whose process dies at a named point.

// Each test file uses a part of this.
#![allow(dead_code, unreachable_pub)]

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leveret::inbox::{Changes, Doing, Opened, Report, Work};
use leveret::{Incoming, Message};
use leveret_sql::{Dialect, Inbox};
use leveret_testkit::eventually;
use rustix::process::{Signal, getpid, kill_process};
use sqlx::Database;

/// What tells a process where to die.
pub const POINT: &str = "LEVERET_TEST_WORKER_POINT";
/// How often it passes there before; never, by default.
pub const PASSES: &str = "LEVERET_TEST_WORKER_PASSES";
/// Where a process says that it has come to its point, and waits for leave to go on.
pub const GATE: &str = "LEVERET_TEST_WORKER_GATE";

pub const POINTS: [&str; 6] = [
    "before open",
    "after open",
    "before the work",
    "after the work",
    "before commit",
    "after commit",
];

fn is_at(point: &str) -> bool {
    std::env::var(POINT).is_ok_and(|wanted| wanted == point)
}

pub fn dies_at(point: &str) {
    static PASSED: AtomicUsize = AtomicUsize::new(0);
    if is_at(point) {
        let passes = std::env::var(PASSES).map_or(0, |passes| passes.parse().expect("a number"));
        if PASSED.fetch_add(1, Ordering::Relaxed) >= passes {
            kill_process(getpid(), Signal::KILL).expect("this process can be killed");
        }
    }
}

async fn waits_at(point: &str) {
    let Ok(gate) = std::env::var(GATE).map(PathBuf::from) else { return };
    if is_at(point) {
        File::create(gate.join("waits")).expect("a file that says so");
        let leave = || std::future::ready(gate.join("goes on").exists());
        eventually(Duration::from_secs(60), "leave to go on", leave).await;
    }
}

/// An inbox whose process dies around what it does.
pub struct Dying<D: Database, L>(pub Inbox<D, L>);

struct DyingWork(Box<dyn Work>);

impl<D: Database, L: Dialect<D>> leveret::inbox::Inbox for Dying<D, L> {
    fn open<'a>(&'a self, incoming: &'a Incoming) -> Doing<'a, Opened> {
        Box::pin(async {
            dies_at("before open");
            let opened = leveret::inbox::Inbox::open(&self.0, incoming).await?;
            dies_at("after open");
            Ok(match opened {
                Opened::New(work) => Opened::New(Box::new(DyingWork(work))),
                other => other,
            })
        })
    }
}

impl Work for DyingWork {
    fn lend(&mut self, incoming: &mut Incoming) {
        self.0.lend(incoming);
    }

    fn commit(self: Box<Self>, changes: Changes, reply: Option<&Message>) -> Doing<'_, Report> {
        let reply = reply.cloned();
        Box::pin(async move {
            dies_at("before commit");
            let report = self.0.commit(changes, reply.as_ref()).await?;
            dies_at("after commit");
            waits_at("before the reply").await;
            Ok(report)
        })
    }
}
