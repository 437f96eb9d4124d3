//! Processes that end with the test process, whatever happens to it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::eventually;
use crate::guardian::Guardian;

/// `$1` is the signal that ends the program, the rest the program and its arguments.
///
/// The program gets a session of its own, so that one kill reaches whatever it starts in its
/// process group, and a terminal's Ctrl-C does not. A shell takes standard input away from what it
/// runs in the background, hence the lifeline moves to descriptor 3, and has it ignore two signals,
/// hence the `env`.
const GUARD: &str = r#"
exec 3<&0
signal=$1
shift
setsid env --default-signal=INT,QUIT "$@" </dev/null 3<&- &
program=$!
(
  read -r _ <&3
  exec 2>/dev/null
  kill -CONT "-$program" "$program"
  kill "-$signal" "$program"
  tries=0
  while kill -0 "$program" && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
  kill -KILL "-$program" "$program"
) &
watcher=$!
wait "$program"
status=$?
exec 2>/dev/null
kill "$watcher"
kill -KILL "-$program"
exit $status
"#;

/// How a program is ended when its [`GuardedProcess`] is dropped or the test process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// SIGKILL, at once. For programs that leave nothing but files behind.
    Kill,
    /// SIGQUIT, and SIGKILL ten seconds later. For PostgreSQL, which frees shared memory on its way
    /// out.
    Quit,
}

/// A running program that ends when this is dropped or the test process dies, even by SIGKILL.
#[derive(Debug)]
pub struct GuardedProcess {
    guardian: Guardian,
    program: OsString,
}

impl GuardedProcess {
    /// Starts a program (a name and its arguments) that writes its output and errors to `log`.
    ///
    /// # Panics
    /// If no process can be started. A program that does not exist shows in the log and in
    /// [`exit_status`](Self::exit_status).
    pub fn start<I>(command: I, ending: Ending, log: File) -> GuardedProcess
    where
        I: IntoIterator<Item: AsRef<OsStr>>,
    {
        let signal = match ending {
            Ending::Kill => "KILL",
            Ending::Quit => "QUIT",
        };
        let mut arguments = vec![OsString::from(signal)];
        arguments.extend(command.into_iter().map(|part| part.as_ref().to_owned()));
        let program = arguments.get(1).expect("a command has at least a program").clone();
        let guardian = log
            .try_clone()
            .and_then(|errors| Guardian::start(GUARD, arguments, log.into(), Stdio::from(errors)))
            .unwrap_or_else(|error| panic!("could not start sh to guard {program:?}: {error}"));
        GuardedProcess { guardian, program }
    }

    /// How the program ended, if it did. One that was killed by signal `n` shows as exit code `128
    /// + n`.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.guardian.exit_status().unwrap_or_else(|error| {
            panic!("could not ask for the state of {:?}: {error}", self.program)
        })
    }

    /// Polls `probe` until it succeeds, or tells how the program ended if it did so before.
    ///
    /// # Panics
    /// After `deadline`, with what the probe said last.
    pub(crate) async fn ready<F>(
        &mut self,
        deadline: Duration,
        what: String,
        probe: impl Fn() -> F,
    ) -> Result<(), ExitStatus>
    where
        F: Future<Output = Result<(), String>>,
    {
        eventually(deadline, what, || {
            let exited = self.exit_status();
            let ready = probe();
            async move {
                match exited {
                    Some(status) => Ok(Err(status)),
                    None => ready.await.map(Ok),
                }
            }
        })
        .await
    }

    /// Waits until the program has ended by itself or by a signal sent to it.
    ///
    /// # Panics
    /// After `deadline`.
    pub async fn ended(&mut self, deadline: Duration) -> ExitStatus {
        let what = format!("{} to end", self.program.display());
        eventually(deadline, what, || std::future::ready(self.exit_status())).await
    }
}

/// Suspends a process (SIGSTOP) and waits until each of its threads has come to a halt.
pub(crate) async fn suspend(pid: u32) -> io::Result<()> {
    signal(pid, Signal::STOP)?;
    let what = format!("every thread of process {pid} to halt");
    eventually(Duration::from_secs(60), what, || std::future::ready(threads_have_halted(pid)))
        .await;
    Ok(())
}

fn threads_have_halted(pid: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return true; // The whole process has ended.
    };
    threads.flatten().all(|thread| match fs::read_to_string(thread.path().join("stat")) {
        // "12 (name) T …": stopped, or a zombie. The name may hold anything, parentheses
        // included.
        Ok(stat) => stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" T") || rest.starts_with(" Z")),
        // The thread has ended meanwhile.
        Err(_) => true,
    })
}

/// Whether a process has ended; nobody need have asked for its status yet.
pub(crate) fn has_ended(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z")),
        Err(_) => true,
    }
}

/// Sends a signal to one process; one that is gone already is fine.
pub(crate) fn signal(pid: u32, signal: Signal) -> io::Result<()> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::other(format!("{pid} is no process id")))?;
    match kill_process(pid, signal) {
        Err(rustix::io::Errno::SRCH) => Ok(()),
        other => Ok(other?),
    }
}

/// The processes that a process has started and that have not ended.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}
