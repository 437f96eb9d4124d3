//! Signals that end the program: Ctrl-C, and the one by which services are stopped.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use crate::failure::{Failure, Status};

/// A signal that asks the program to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Interrupt,
    #[cfg_attr(not(unix), allow(dead_code, reason = "there is none"))]
    Terminate,
}

impl Signal {
    /// As shells report a program that such a signal has ended.
    pub(crate) fn status(self) -> Status {
        match self {
            Signal::Interrupt => Status::Interrupted,
            Signal::Terminate => Status::Terminated,
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Signal::Interrupt => "Ctrl-C",
            Signal::Terminate => "SIGTERM",
        })
    }
}

/// Receives the signals. It misses none that comes while it exists.
#[derive(Debug)]
pub(crate) struct Signals {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    pub(crate) fn new() -> Result<Self, Failure> {
        use tokio::signal::unix::{SignalKind, signal};
        let interrupt = signal(SignalKind::interrupt()).map_err(cannot_wait)?;
        let terminate = signal(SignalKind::terminate()).map_err(cannot_wait)?;
        Ok(Signals { interrupt, terminate })
    }

    #[cfg(not(unix))]
    pub(crate) fn new() -> Result<Self, Failure> {
        Ok(Signals {})
    }

    pub(crate) async fn next(&mut self) -> Signal {
        #[cfg(unix)]
        tokio::select! {
            _ = self.interrupt.recv() => Signal::Interrupt,
            _ = self.terminate.recv() => Signal::Terminate,
        }
        #[cfg(not(unix))]
        match tokio::signal::ctrl_c().await {
            Ok(()) => Signal::Interrupt,
            Err(_) => std::future::pending().await,
        }
    }
}

/// How long a command has to end by itself after a signal.
pub(crate) const GRACE: Duration = Duration::from_millis(1800);

/// How much of that it has to give back what it holds: saying what became of it takes a little, too.
pub(crate) const GIVING_BACK: Duration = Duration::from_millis(1700);

/// From now on a signal ends the process after [`GRACE`], and a second one at once, whatever the command is doing: a write to a
/// terminal that is stopped, or a read from a pipe, blocks the task that would have to notice.
pub(crate) fn enforce() -> Result<(), Failure> {
    enforce_from(Enforced::First)
}

/// The same for a command that lets others finish after a signal, for as long as they may take: only a second one ends the
/// process, at once.
pub(crate) fn enforce_second() -> Result<(), Failure> {
    enforce_from(Enforced::Second)
}

/// Which signal ends the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Enforced {
    First,
    Second,
}

fn enforce_from(enforced: Enforced) -> Result<(), Failure> {
    static ENFORCED: OnceLock<()> = OnceLock::new();
    if ENFORCED.set(()).is_err() {
        return Ok(());
    }
    let runtime = Builder::new_current_thread().enable_all().build().map_err(cannot_wait)?;
    let signals = {
        let _inside = runtime.enter();
        Signals::new()?
    };
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(move || end_process(&runtime, signals, enforced)).map_err(cannot_wait)?;
    Ok(())
}

fn end_process(runtime: &Runtime, mut signals: Signals, enforced: Enforced) -> ! {
    let signal = runtime.block_on(async {
        let first = signals.next().await;
        if enforced == Enforced::Second {
            return signals.next().await;
        }
        let _ = timeout(GRACE, signals.next()).await;
        first
    });
    Failure::stopped(signal, "some work was still under way").exit()
}

fn cannot_wait(error: std::io::Error) -> Failure {
    Failure::new(format_args!("cannot wait for signals: {error}"))
}
