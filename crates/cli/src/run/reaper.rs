//! Ends the commands of a service that was killed.
//!
//! ```text
//!   leveret run --- a pipe: "+GROUP", "-GROUP" ---> leveret __reap: at its end, kills the process groups that are left
//! ```
//!
//! The kernel closes the pipe however the service ends. The pipe is close-on-exec, so no command keeps it open.
//! A service that is killed between the start of a command and its `+` leaves that one behind: some microseconds.
//! A supervisor task replaces a reaper that ends before the service does. If both are killed at once, the commands survive.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::failure::Failure;
use crate::output::note;

/// The subcommand of this program that is the other end of the pipe.
pub(crate) const SUBCOMMAND: &str = "__reap";

/// From one start of a reaper to the next, so that one which always ends at once does not use up a core.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// The process that outlives this one to kill what is left of its commands.
#[derive(Clone, Debug)]
pub(super) struct Reaper(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    pipe: Pipe,
    /// All that run: a process that replaces another one has to know them.
    groups: HashSet<Pid>,
}

impl Reaper {
    pub(super) async fn start() -> Result<Reaper, Failure> {
        let (process, pipe, failed) =
            spawn().map_err(|error| Failure::new(cannot_start(&error)))?;
        let state = Arc::new(Mutex::new(State { pipe, groups: HashSet::new() }));
        tokio::spawn(supervise(Arc::downgrade(&state), process, failed));
        Ok(Reaper(state))
    }

    /// Has the process group of a command killed if this process dies before the registration is dropped.
    pub(super) fn register(&self, command: Option<u32>) -> Registration {
        let group = command.and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(group) = group {
            self.lock().add(group);
        }
        Registration { reaper: self.clone(), group }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn add(&mut self, group: Pid) {
        self.groups.insert(group);
        self.pipe.send(&line('+', group));
    }

    fn remove(&mut self, group: Pid) {
        self.groups.remove(&group);
        self.pipe.send(&line('-', group));
    }

    fn move_to(&mut self, pipe: Pipe) {
        self.pipe = pipe;
        let lines: String = self.groups.iter().map(|group| line('+', *group)).collect();
        self.pipe.send(&lines);
    }
}

fn line(sign: char, group: Pid) -> String {
    format!("{sign}{}\n", group.as_raw_nonzero())
}

/// The way to one process.
#[derive(Debug)]
struct Pipe {
    /// Never waits. So short a thing as one line is written as a whole, or not at all.
    file: File,
    /// Dropped once a line could not be written.
    failed: Option<oneshot::Sender<()>>,
}

/// Resolves once a line could not be written.
type Failed = oneshot::Receiver<()>;

impl Pipe {
    /// The process has to be replaced if it does not take this: with a line less it could kill a group that is another one by
    /// then.
    fn send(&mut self, lines: &str) {
        if self.file.write_all(lines.as_bytes()).is_err() {
            self.failed = None;
        }
    }
}

/// Replaces the process when it ends, or hangs with a full pipe. Ends with the last owner of the state.
async fn supervise(state: Weak<Mutex<State>>, mut process: Child, mut failed: Failed) {
    let mut started = Instant::now();
    loop {
        tokio::select! {
            _ = process.wait() => {}
            _ = &mut failed => {}
        }
        // Before its pipe is closed, so that it kills no group.
        let _ = process.kill().await;
        let mut is_noted = false;
        (process, failed) = loop {
            sleep_until(started + RESTART_PAUSE).await;
            started = Instant::now();
            let Some(state) = state.upgrade() else { return };
            match spawn() {
                Ok((process, pipe, failed)) => {
                    lock(&state).move_to(pipe);
                    break (process, failed);
                }
                Err(error) if !is_noted => {
                    note(&cannot_start(&error));
                    is_noted = true;
                }
                Err(_) => {}
            }
        };
    }
}

fn cannot_start(error: &io::Error) -> String {
    format!("cannot start the process that ends commands if this one is killed: {error}")
}

fn spawn() -> io::Result<(Child, Pipe, Failed)> {
    let mut command = Command::new(own_program()?);
    command.arg0("leveret").arg(SUBCOMMAND).env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    // What is sent to the group of the service, as by Ctrl-C, is not for this one.
    let mut process = command.process_group(0).spawn()?;
    let file: File = process.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?.into_owned_fd()?.into();
    ioctl_fionbio(&file, true)?;
    let (sender, failed) = oneshot::channel();
    Ok((process, Pipe { file, failed: Some(sender) }, failed))
}

/// On Linux not by its path, which leads to another file, or to none, once the program was upgraded in place.
fn own_program() -> io::Result<PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok(PathBuf::from("/proc/self/exe")),
        false => std::env::current_exe(),
    }
}

/// A process group that is known to the reaper.
#[derive(Debug)]
pub(super) struct Registration {
    reaper: Reaper,
    group: Option<Pid>,
}

impl Registration {
    pub(super) fn kill(&self) {
        if let Some(group) = self.group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(group) = self.group {
            self.reaper.lock().remove(group);
        }
    }
}

/// Waits for the end of the standard input, and kills the process groups that are left then.
pub(crate) async fn reap() -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::new(error);
    // A service that is being stopped may be killed later: until then, these signals are ignored.
    let _ignored = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()]
        .map(|kind| signal(kind));
    let mut groups = HashSet::new();
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await.map_err(failed)? {
        let group = |id: &str| id.parse().ok().filter(|&id| id > 1).and_then(Pid::from_raw);
        match line.split_at_checked(1) {
            Some(("+", id)) => groups.extend(group(id)),
            Some(("-", id)) => drop(group(id).map(|group| groups.remove(&group))),
            _ => {}
        }
    }
    for group in groups {
        let _ = kill_process_group(group, Signal::KILL);
    }
    Ok(())
}
