//! Work by a command: the message is its input, facts are in its environment, and its exit status decides.

use std::process::{ExitStatus, Stdio};

use leveret::Failure;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::work::Answer;

/// The message cannot be worked on, now or later: `EX_DATAERR`.
const PARK: i32 = 65;
/// It may go better later: `EX_TEMPFAIL`.
const RETRY: i32 = 75;

/// How much of what a command writes is a reply.
const MAX_REPLY: u64 = 16 * 1024 * 1024;
/// How much of what it complains about is kept.
const MAX_COMPLAINT: usize = 2000;

pub(super) async fn run(
    command: &[String],
    facts: &[(&'static str, String)],
    body: &[u8],
) -> Result<Answer, Failure> {
    let [program, arguments @ ..] = command else {
        return Err(Failure::retry("there is no command").kind("command"));
    };
    let mut prepared = Command::new(program);
    prepared.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // What it starts itself ends with it.
    prepared.process_group(0).kill_on_drop(true);
    for (name, value) in facts {
        let name = format!("LEVERET_{}", name.replace('-', "_").to_uppercase());
        prepared.env(name, value.replace('\0', ""));
    }
    let child = prepared.spawn().map_err(|error| {
        Failure::retry(format!("{program:?} cannot be started: {error}")).kind("command")
    })?;
    let mut group = Group(child);
    let child = &mut group.0;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let feeding = async {
        if let Some(mut stdin) = stdin {
            // Nobody has to read all of it, or any.
            let _ = stdin.write_all(body).await;
            let _ = stdin.shutdown().await;
        }
    };
    let (waited, (), reply, complaint) =
        tokio::join!(child.wait(), feeding, reply(stdout), complaint(stderr));
    let status = waited.map_err(|error| Failure::retry(error).kind("command"))?;
    judge(program, status, reply, &complaint)
}

/// A command that is no longer waited for ends, and all that it has started.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        let id = self.0.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(group) = id {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// What the exit status says.
fn judge(
    program: &str,
    status: ExitStatus,
    reply: Result<Vec<u8>, Failure>,
    complaint: &str,
) -> Result<Answer, Failure> {
    let said = match complaint.trim() {
        "" => format!("{program:?} ended with {status}"),
        text => text.to_owned(),
    };
    match status.code() {
        Some(0) => Ok(Answer { body: reply?.into(), content_type: None }),
        Some(PARK) => Err(Failure::permanent(said).kind("exit-65")),
        Some(RETRY) => Err(Failure::retry(said).kind("exit-75")),
        Some(code) => Err(Failure::retry(said).kind(format!("exit-{code}"))),
        None => Err(Failure::retry(said).kind("signal")),
    }
}

async fn reply(from: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, Failure> {
    let Some(from) = from else { return Ok(Vec::new()) };
    let mut reply = Vec::new();
    let mut from = from.take(MAX_REPLY + 1);
    from.read_to_end(&mut reply).await.map_err(|error| Failure::retry(error).kind("command"))?;
    if reply.len() as u64 > MAX_REPLY {
        // It is not left waiting for a reader.
        let _ = tokio::io::copy(&mut from.into_inner(), &mut tokio::io::sink()).await;
        let text = format!("it wrote more than {} MiB, which is no reply", MAX_REPLY / 1024 / 1024);
        return Err(Failure::permanent(text).kind("reply"));
    }
    Ok(reply)
}

/// The end of what it complained about.
async fn complaint(from: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut from) = from else { return String::new() };
    let mut kept = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut piece).await {
        kept.extend_from_slice(&piece[..read]);
        let surplus = kept.len().saturating_sub(MAX_COMPLAINT);
        kept.drain(..surplus);
    }
    String::from_utf8_lossy(&kept).into_owned()
}
