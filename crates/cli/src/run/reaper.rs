//! Ends the commands of a service that was killed.
//!
//! ```text
//!   leveret run --- a pipe: "+GROUP", "-GROUP" ---> leveret __reap: at its end, kills the process groups that are left
//! ```
//!
//! The kernel closes the pipe however the service ends. The pipe is close-on-exec, so no command keeps it open.
//! A service that is killed between the start of a command and its `+` leaves that one behind: some microseconds.

use std::collections::HashSet;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;
use crate::output::note;

/// The subcommand of this program that is the other end of the pipe.
pub(crate) const SUBCOMMAND: &str = "__reap";

/// The process that outlives this one to kill what is left of its commands.
#[derive(Clone, Debug)]
pub(super) struct Reaper(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// It ends by itself, after this process.
    process: Child,
    /// All that run: a process that replaces another one has to know them.
    groups: HashSet<Pid>,
    is_lost: bool,
}

impl Reaper {
    pub(super) async fn start() -> Result<Reaper, Failure> {
        let process = spawn().map_err(|error| {
            let text = "cannot start the process that ends commands if this one is killed";
            Failure::new(format_args!("{text}: {error}"))
        })?;
        let state = State { process, groups: HashSet::new(), is_lost: false };
        Ok(Reaper(Arc::new(Mutex::new(state))))
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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add(&mut self, group: Pid) {
        self.groups.insert(group);
        self.send(&line('+', group));
    }

    fn remove(&mut self, group: Pid) {
        self.groups.remove(&group);
        self.send(&line('-', group));
    }

    /// Replaces the process if it does not take this: it has died, or hangs with a full pipe. With a line less it could kill a
    /// group that is another one by then.
    fn send(&mut self, lines: &str) {
        let Err(error) = write(&self.process, lines).or_else(|_| self.replace()) else {
            self.is_lost = false;
            return;
        };
        if !self.is_lost {
            note(&format!("the process that ends commands if this one is killed: {error}"));
        }
        self.is_lost = true;
    }

    fn replace(&mut self) -> io::Result<()> {
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.process = spawn()?;
        let lines: String = self.groups.iter().map(|group| line('+', *group)).collect();
        write(&self.process, &lines)
    }
}

fn line(sign: char, group: Pid) -> String {
    format!("{sign}{}\n", group.as_raw_nonzero())
}

/// Never waits. So short a thing as one line is written as a whole, or not at all.
fn write(process: &Child, lines: &str) -> io::Result<()> {
    let mut pipe = process.stdin.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
    pipe.write_all(lines.as_bytes())
}

fn spawn() -> io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(SUBCOMMAND).env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    // What is sent to the group of the service, as by Ctrl-C, is not for this one.
    let process = command.process_group(0).spawn()?;
    if let Some(pipe) = &process.stdin {
        ioctl_fionbio(pipe, true)?;
    }
    Ok(process)
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
