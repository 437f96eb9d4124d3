//! Work by a command: the message is its input, facts are in its environment, and its exit status decides.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use leveret::Failure;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::reaper::{Reaper, Registration};
use super::work::{Answer, Output, took_too_long};

/// The message cannot be worked on, now or later: `EX_DATAERR`.
const PARK: i32 = 65;
/// It may go better later: `EX_TEMPFAIL`.
const RETRY: i32 = 75;

/// How much of what a command writes is a reply.
const MAX_REPLY: usize = 16 * 1024 * 1024;
/// How much of its standard error is kept.
const MAX_COMPLAINT: usize = 2000;
/// How long its output may stay open once it has ended: a process that it has left behind may hold it. The time is only for what
/// is in the pipe already.
const OUTPUT_GRACE: Duration = Duration::from_secs(1);

/// The program's own variables hold passwords, and could be taken for facts of the message.
static OWN_VARIABLES: LazyLock<Vec<OsString>> = LazyLock::new(|| {
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.as_encoded_bytes().starts_with(b"LEVERET_")).collect()
});

/// Whether a program is there: at its path, or in one of the directories of `PATH` if it is only a name.
pub(super) fn check_program(program: &str) -> Result<(), String> {
    let is_program = |path: &Path| {
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    if program.contains('/') {
        return match is_program(Path::new(program)) {
            true => Ok(()),
            false => Err(format!("there is no program at {program:?}, or it is not executable")),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    match std::env::split_paths(&path).any(|directory| is_program(&directory.join(program))) {
        true => Ok(()),
        false => Err(format!("there is no program {program:?} in the directories of PATH")),
    }
}

/// Runs a command to its end, for `within` at most. Processes that it leaves behind end with it.
pub(super) async fn run(
    command: &[String],
    facts: &[(&'static str, String)],
    body: &[u8],
    output: Output,
    within: Duration,
    reaper: &Reaper,
) -> Result<Answer, Failure> {
    let [program, arguments @ ..] = command else {
        return Err(Failure::retry("there is no command").kind("command"));
    };
    let mut group = Group::start(prepare(program, arguments, facts, output), reaper)
        .map_err(|error| cannot_start(program, &error))?;
    let (stdin, stdout, stderr) =
        (group.child.stdin.take(), group.child.stdout.take(), group.child.stderr.take());
    let (mut reply, mut complaint) = (Vec::new(), Vec::new());
    let status = {
        let feeding = feed(stdin, body);
        let (replying, complaining) =
            (read_reply(stdout, &mut reply), read_complaint(stderr, &mut complaint));
        let mut piping = pin!(async { tokio::join!(feeding, replying, complaining) });
        let mut is_piped = false;
        let waiting = async {
            tokio::select! {
                status = group.child.wait() => status,
                _ = &mut piping => {
                    is_piped = true;
                    group.child.wait().await
                }
            }
        };
        let status = timeout(within, waiting).await.map_err(|_| took_too_long(within))?;
        if !is_piped && timeout(OUTPUT_GRACE, &mut piping).await.is_err() {
            group.kill();
            let _ = timeout(OUTPUT_GRACE, &mut piping).await;
        }
        status.map_err(|error| Failure::retry(error).kind("command"))?
    };
    drop(group);
    judge(program, status, reply, &complaint)
}

fn prepare(
    program: &str,
    arguments: &[String],
    facts: &[(&'static str, String)],
    output: Output,
) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.stdout(match output {
        Output::Reply => Stdio::piped(),
        Output::Discarded => Stdio::null(),
    });
    command.process_group(0);
    for name in &*OWN_VARIABLES {
        command.env_remove(name);
    }
    for (name, value) in facts {
        let name = format!("LEVERET_{}", name.replace('-', "_").to_uppercase());
        command.env(name, value.replace('\0', ""));
    }
    command
}

fn cannot_start(program: &str, error: &io::Error) -> Failure {
    Failure::retry(format!("{program:?} cannot be started: {error}")).kind("command")
}

/// A command and the processes that it has started. They are killed when it is dropped.
struct Group {
    child: Child,
    /// Known by the id of the command, which `Child` forgets when the command has ended.
    registration: Registration,
}

impl Group {
    fn start(mut command: Command, reaper: &Reaper) -> io::Result<Group> {
        let child = command.spawn()?;
        let registration = reaper.register(child.id());
        Ok(Group { child, registration })
    }

    fn kill(&self) {
        self.registration.kill();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What the exit status says.
fn judge(
    program: &str,
    status: ExitStatus,
    reply: Vec<u8>,
    complaint: &[u8],
) -> Result<Answer, Failure> {
    let said = match String::from_utf8_lossy(complaint).trim() {
        "" => format!("{program:?} ended with {status}"),
        text => text.to_owned(),
    };
    match status.code() {
        Some(0) if reply.len() > MAX_REPLY => {
            let most = MAX_REPLY / 1024 / 1024;
            let text = format!("{program:?} wrote more than {most} MiB, which is no reply");
            Err(Failure::permanent(text).kind("reply"))
        }
        Some(0) => Ok(Answer { body: reply.into(), content_type: None }),
        Some(PARK) => Err(Failure::permanent(said).kind("exit-65")),
        Some(RETRY) => Err(Failure::retry(said).kind("exit-75")),
        Some(code) => Err(Failure::retry(said).kind(format!("exit-{code}"))),
        None => Err(Failure::retry(said).kind("signal")),
    }
}

/// Writes the body. The command need not read all of it, or any.
async fn feed(stdin: Option<impl AsyncWriteExt + Unpin>, body: &[u8]) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(body).await;
        let _ = stdin.shutdown().await;
    }
}

/// Reads the reply, and discards what is too long for one, so that the command is not left waiting for a reader.
async fn read_reply(from: Option<impl AsyncRead + Unpin>, reply: &mut Vec<u8>) {
    let Some(from) = from else { return };
    let mut from = from.take(MAX_REPLY as u64 + 1);
    let _ = from.read_to_end(reply).await;
    let _ = tokio::io::copy(&mut from.into_inner(), &mut tokio::io::sink()).await;
}

/// Reads the standard error, and keeps its end.
async fn read_complaint(from: Option<impl AsyncRead + Unpin>, kept: &mut Vec<u8>) {
    let Some(mut from) = from else { return };
    let mut piece = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut piece).await {
        kept.extend_from_slice(&piece[..read]);
        let surplus = kept.len().saturating_sub(MAX_COMPLAINT);
        kept.drain(..surplus);
    }
}
