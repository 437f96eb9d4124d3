//! A PostgreSQL server of a test's own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use super::programs::{self, command, run};
use super::{Database, database};
use crate::eventually;
use crate::log::tail;
use crate::port::free_ports;
use crate::process::{Ending, GuardedProcess, children, has_ended, signal, suspend};
use crate::scratch::ScratchFolder;

const BOOT_DEADLINE: Duration = Duration::from_secs(60);
const END_DEADLINE: Duration = Duration::from_secs(60);

/// Shared memory in files of the data folder goes away with it.
const SETTINGS: [&str; 2] = ["dynamic_shared_memory_type=mmap", "listen_addresses=127.0.0.1"];

/// What the data of a test has to survive is a killed server, not a power failure, so nothing needs
/// to reach the disk.
const NOT_TO_DISK: [&str; 2] = ["fsync=off", "full_page_writes=off"];

/// A running PostgreSQL server with its own data and port. It ends, and its data with it, when it
/// is dropped or the test process dies.
///
/// It listens on 127.0.0.1 and trusts everybody; the superuser is `postgres`. Port and data stay
/// the same from one start to the next.
#[derive(Debug)]
pub struct Postgres {
    // In the order of dropping: the server ends before its folder goes.
    server: Option<GuardedProcess>,
    port: u16,
    programs: PathBuf,
    folder: ScratchFolder,
    waits_for_disk: bool,
}

impl Postgres {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    /// If PostgreSQL is not installed, or does not start; the message ends with its log.
    pub async fn start() -> Postgres {
        Postgres::try_to_start(false).await
    }

    /// The same, but a commit waits until it is on the disk, as it does outside of tests: for
    /// measurements.
    ///
    /// # Panics
    /// As [`start`](Self::start) does.
    pub async fn start_on_disk() -> Postgres {
        Postgres::try_to_start(true).await
    }

    async fn try_to_start(waits_for_disk: bool) -> Postgres {
        const TRIES: usize = 3;
        let mut tries = 1;
        loop {
            let [port] = free_ports();
            let mut postgres = Postgres {
                server: None,
                port,
                programs: programs::newest(),
                folder: ScratchFolder::new(),
                waits_for_disk,
            };
            postgres.make_data().await;
            match postgres.boot().await {
                Ok(()) => return postgres,
                // Somebody else took the port between the moment it was found free and the server's
                // start.
                Err(failure) if tries < TRIES && failure.contains("in use") => tries += 1,
                Err(failure) => panic!("{failure}"),
            }
        }
    }

    /// The URL of its database `postgres`.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Makes a fresh database.
    pub async fn database(&self) -> Database {
        database::create(&self.url()).await
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether it was started and not ended since. A suspended server counts as running.
    pub fn is_running(&self) -> bool {
        self.server.is_some()
    }

    /// The process id of its postmaster.
    ///
    /// # Panics
    /// If the server is down.
    pub fn pid(&self) -> u32 {
        self.running_pid().unwrap_or_else(|| {
            panic!("this PostgreSQL is down and has no process\n{}", self.log_tail())
        })
    }

    fn running_pid(&self) -> Option<u32> {
        self.server.as_ref()?;
        let text = fs::read_to_string(self.data().join("postmaster.pid")).ok()?;
        text.lines().next()?.trim().parse().ok()
    }

    /// Where it keeps its data and log for as long as this value lives.
    pub fn data_folder(&self) -> &Path {
        self.folder.path()
    }

    /// Stops the server in good order, without waiting for its clients. Its data stays.
    pub async fn stop(&mut self) {
        self.resume();
        self.signal(self.pid(), Signal::INT);
        self.await_end().await;
    }

    /// Kills the server and all its backends with SIGKILL. Its data stays.
    pub async fn kill(&mut self) {
        let postmaster = self.pid();
        // It is halted first: then there are no new backends to be missed.
        let halted = suspend(postmaster).await;
        halted.unwrap_or_else(|error| panic!("could not halt PostgreSQL ({postmaster}): {error}"));
        let all: Vec<u32> = with_children(postmaster).collect();
        all.iter().for_each(|process| self.signal(*process, Signal::KILL));
        self.await_end().await;
        // A backend that has just begun holds the port, too.
        eventually(END_DEADLINE, "the backends of PostgreSQL to end", async || {
            all.iter().all(|process| has_ended(*process))
        })
        .await;
    }

    async fn await_end(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.ended(END_DEADLINE).await;
        }
    }

    /// Starts a server that was stopped or killed, with the same data and port, and waits until it
    /// answers.
    ///
    /// # Panics
    /// If it does not start, or is running.
    pub async fn start_again(&mut self) {
        assert!(self.server.is_none(), "this PostgreSQL is running");
        if let Err(failure) = self.boot().await {
            panic!("{failure}");
        }
    }

    /// Stops the server in good order and starts it again.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start_again().await;
    }

    /// Halts the server and its backends (SIGSTOP): connections stay open, and nothing answers.
    pub async fn suspend(&self) {
        let postmaster = self.pid();
        // The postmaster first: then there are no new backends to be missed.
        let mut halted = suspend(postmaster).await;
        for backend in children(postmaster) {
            halted = halted.and(suspend(backend).await);
        }
        halted
            .unwrap_or_else(|error| panic!("could not suspend PostgreSQL ({postmaster}): {error}"));
    }

    /// Lets a suspended server go on (SIGCONT).
    pub fn resume(&self) {
        let postmaster = self.pid();
        with_children(postmaster).for_each(|process| self.signal(process, Signal::CONT));
    }

    fn signal(&self, pid: u32, which: Signal) {
        signal(pid, which).unwrap_or_else(|error| {
            panic!("could not send {which:?} to PostgreSQL ({pid}): {error}")
        });
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        format!("the log of PostgreSQL ends with:\n{}", tail(&self.log()))
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("postgres.log")
    }

    async fn make_data(&self) {
        let folder = self.folder.path();
        if rustix::process::geteuid().is_root() {
            let chown =
                ["chown", programs::USER].map(Into::into).into_iter().chain([folder.into()]);
            run(&chown.collect::<Vec<_>>()).await.unwrap_or_else(|error| panic!("{error}"));
        }
        let data = self.data().display().to_string();
        let arguments = [
            "--auth=trust",
            "--no-sync",
            "--encoding=UTF8",
            "--username=postgres",
            "--pgdata",
            &data,
        ];
        let made = run(&command(folder, &self.programs.join("initdb"), &arguments)).await;
        made.unwrap_or_else(|error| {
            panic!("could not make the data of a PostgreSQL server: {error}")
        });
    }

    async fn boot(&mut self) -> Result<(), String> {
        let folder = self.folder.path();
        let log = File::options().create(true).append(true).open(self.log());
        let log =
            log.unwrap_or_else(|error| panic!("could not write {}: {error}", self.log().display()));
        let (data, port) = (self.data().display().to_string(), self.port.to_string());
        let sockets = format!("unix_socket_directories={}", folder.display());
        let mut arguments = vec!["-D", &data, "-p", &port, "-c", &sockets];
        let not_to_disk = if self.waits_for_disk { &[][..] } else { &NOT_TO_DISK };
        arguments.extend(SETTINGS.iter().chain(not_to_disk).flat_map(|setting| ["-c", setting]));
        let start = command(folder, &self.programs.join("postgres"), &arguments);
        let mut server = GuardedProcess::start(start, Ending::Quit, log);

        let probe = command(
            folder,
            &self.programs.join("pg_isready"),
            &["--host=127.0.0.1", "--port", &port],
        );
        let what = format!("PostgreSQL on port {port} to answer");
        let ready = server.ready(BOOT_DEADLINE, what, || async {
            let answer = run(&probe).await.map(drop);
            answer.map_err(|error| format!("{error}\n{}", self.log_tail()))
        });
        match ready.await {
            Ok(()) => {
                self.server = Some(server);
                Ok(())
            }
            Err(status) => {
                Err(format!("PostgreSQL ended while starting: {status}\n{}", self.log_tail()))
            }
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // The postmaster would wait five seconds for suspended backends before it kills them.
        if let Some(postmaster) = self.running_pid() {
            with_children(postmaster).for_each(|process| drop(signal(process, Signal::CONT)));
        }
    }
}

/// A postmaster and its backends, in this order: once it is gone it replaces none of those that go
/// after it.
fn with_children(postmaster: u32) -> impl Iterator<Item = u32> {
    let backends = children(postmaster);
    std::iter::once(postmaster).chain(backends)
}
