//! Ends the commands of a service that was killed.
//!
//! ```text
//!   leveret run --- a pipe: "+GROUP", "-GROUP" ---> leveret __reap: at its end, kills the process groups that are left
//! ```
//!
//! The kernel closes the pipe however the service ends. The pipe is close-on-exec, so no command keeps it open.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe::Sender;
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// The subcommand of this program that is the other end of the pipe.
pub(crate) const SUBCOMMAND: &str = "__reap";

/// The process that outlives this one to kill what is left of its commands.
#[derive(Clone, Debug)]
pub(super) struct Reaper(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pipe: Sender,
    is_lost: AtomicBool,
    /// It ends by itself, after this process.
    _process: Child,
}

impl Reaper {
    pub(super) async fn start() -> Result<Reaper, Failure> {
        let failed = |error: io::Error| {
            let text = "cannot start the process that ends commands if this one is killed";
            Failure::new(format_args!("{text}: {error}"))
        };
        let mut process = spawn().map_err(failed)?;
        let stdin = process.stdin.take().map(OwnedFd::from);
        let stdin = stdin.ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let pipe = Sender::from_owned_fd(stdin).map_err(failed)?;
        // Before that, the runtime takes it for not ready.
        pipe.writable().await.map_err(failed)?;
        let is_lost = AtomicBool::new(false);
        Ok(Reaper(Arc::new(Inner { pipe, is_lost, _process: process })))
    }

    /// Has the process group of a command killed if this process dies before the registration is dropped.
    pub(super) fn register(&self, command: Option<u32>) -> Registration {
        let group = command.and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(group) = group {
            self.send('+', group);
        }
        Registration { reaper: self.clone(), group }
    }

    fn send(&self, sign: char, group: Pid) {
        let line = format!("{sign}{}\n", group.as_raw_nonzero());
        // So short a line is written as a whole, or not at all.
        if let Err(error) = self.0.pipe.try_write(line.as_bytes())
            && !self.0.is_lost.swap(true, Ordering::Relaxed)
        {
            eprintln!(
                "leveret: the process that ends commands if this one is killed does not listen: {error}"
            );
        }
    }
}

fn spawn() -> io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(SUBCOMMAND).env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    // What is sent to the group of the service, as by Ctrl-C, is not for this one.
    command.process_group(0).spawn()
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
            self.reaper.send('-', group);
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
