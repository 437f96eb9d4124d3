//! One RabbitMQ node of a test's own.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;

use super::epmd::Epmd;
use super::installation::{CTL, Installation, SERVER};
use super::readiness::{has_started, serves_clients};
use super::settings::{self, Certificates, Extras, Ports};
use super::{Broker, Management, Version, Vhost};
use crate::certificates::{Authority, Identity};
use crate::eventually;
use crate::log::{tail, tail_of};
use crate::process::{Ending, GuardedProcess, signal, suspend};
use crate::scratch::ScratchFolder;

/// A node is ready in 5 to 10 s; three at once on two busy cores take longer.
const BOOT_DEADLINE: Duration = Duration::from_secs(120);
const STOP_DEADLINE: Duration = Duration::from_secs(60);
const KILL_DEADLINE: Duration = Duration::from_secs(60);
const CTL_DEADLINE: Duration = Duration::from_secs(60);
const ALARM_DEADLINE: Duration = Duration::from_secs(60);

/// A running RabbitMQ node with its own data, ports and name. It ends, and its data with it, when
/// it is dropped or the test process dies.
///
/// The node listens on 127.0.0.1 and has the user `guest` with the password `guest`. Ports and data
/// stay the same from one start to the next.
#[derive(Debug)]
pub struct RabbitNode {
    // In the order of dropping: the server ends before its name server, and both before their
    // folder goes.
    server: Option<GuardedProcess>,
    name: String,
    ports: Ports,
    extras: Extras,
    broker: Broker,
    installation: Installation,
    epmd: Arc<Epmd>,
    folder: ScratchFolder,
}

/// A node to be started: see [`RabbitNode::builder`].
#[derive(Clone, Debug)]
pub struct Builder {
    version: Version,
    extras: Extras,
}

impl Builder {
    /// Adds a line to the node's `rabbitmq.conf`.
    pub fn config(mut self, line: impl Into<String>) -> Builder {
        self.extras.config.push(line.into());
        self
    }

    /// Enables a plugin that comes with RabbitMQ.
    pub fn plugin(mut self, name: impl Into<String>) -> Builder {
        self.extras.plugins.push(name.into());
        self
    }

    /// Makes the node listen for TLS, too, on [`RabbitNode::tls_port`], showing the server's
    /// certificate there and believing clients of the authority. Whether it asks them at all is for
    /// [`config`](Self::config): `ssl_options.verify` and `ssl_options.fail_if_no_peer_cert`.
    pub fn tls(mut self, authority: &Authority, server: Identity) -> Builder {
        let authority = authority.certificate();
        self.extras.certificates = Some(Certificates { authority, server });
        self
    }

    /// Starts the node and waits until it serves clients.
    ///
    /// # Panics
    /// If this version is not installed, or the node does not start; the message ends with the
    /// node's log.
    pub async fn start(self) -> RabbitNode {
        let installation = Installation::find(self.version);
        let epmd = Arc::new(Epmd::start(&installation).await);
        self.start_among(installation, epmd, "rabbit@localhost").await
    }

    /// Starts the node among others that use the same epmd.
    pub(super) async fn start_among(
        self,
        installation: Installation,
        epmd: Arc<Epmd>,
        name: &str,
    ) -> RabbitNode {
        const TRIES: usize = 3;
        let mut tries = 1;
        loop {
            let mut node =
                RabbitNode::new(installation.clone(), epmd.clone(), name, self.extras.clone());
            match node.boot().await {
                Ok(()) => return node,
                Err(failure) if tries < TRIES && failure.port_was_taken() => tries += 1,
                Err(failure) => panic!("{}", failure.0),
            }
        }
    }
}

impl RabbitNode {
    /// Starts a node and waits until it serves clients.
    ///
    /// # Panics
    /// As [`Builder::start`].
    pub async fn start(version: Version) -> RabbitNode {
        RabbitNode::builder(version).start().await
    }

    /// Prepares a node with a configuration of its own.
    pub fn builder(version: Version) -> Builder {
        Builder { version, extras: Extras::default() }
    }

    fn new(installation: Installation, epmd: Arc<Epmd>, name: &str, extras: Extras) -> RabbitNode {
        let ports = Ports::free();
        let management =
            Management::at(&format!("http://guest:guest@127.0.0.1:{}", ports.management));
        RabbitNode {
            server: None,
            name: name.to_owned(),
            ports,
            extras,
            broker: Broker::new(
                &format!("amqp://guest:guest@127.0.0.1:{}", ports.amqp),
                management,
            ),
            folder: ScratchFolder::inside(&installation.temporary_files()),
            installation,
            epmd,
        }
    }

    /// Its AMQP and management addresses, to be passed on.
    pub fn broker(&self) -> &Broker {
        &self.broker
    }

    /// The AMQP URL of its default virtual host.
    pub fn url(&self) -> String {
        self.broker.url()
    }

    /// The AMQP URL of one of its virtual hosts.
    pub fn url_for(&self, vhost: &str) -> String {
        self.broker.url_for(vhost)
    }

    /// Its management API.
    pub fn management(&self) -> &Management {
        self.broker.management()
    }

    /// Makes a fresh virtual host.
    pub async fn vhost(&self) -> Vhost {
        self.broker.vhost().await
    }

    /// The port of its AMQP listener on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.ports.amqp
    }

    /// The port of its TLS listener on 127.0.0.1.
    ///
    /// # Panics
    /// If the node was not built with [`Builder::tls`].
    pub fn tls_port(&self) -> u16 {
        assert!(self.extras.certificates.is_some(), "{} was given no certificates", self.name);
        self.ports.tls
    }

    /// Its Erlang node name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Which RabbitMQ it runs.
    pub fn version(&self) -> Version {
        self.installation.version
    }

    /// Whether it was started and not ended since. A suspended node counts as running.
    pub fn is_running(&self) -> bool {
        self.server.is_some()
    }

    /// The process id of its Erlang VM.
    ///
    /// # Panics
    /// If the node is down.
    pub fn pid(&self) -> u32 {
        assert!(self.server.is_some(), "{} is down and has no process", self.name);
        let file = settings::pid_file(self.folder.path());
        fs::read_to_string(&file)
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or_else(|| panic!("{} of {} holds no process id", file.display(), self.name))
    }

    /// Where it keeps its data, configuration and log for as long as this value lives.
    pub fn data_folder(&self) -> &Path {
        self.folder.path()
    }

    /// Stops the node in good order. Its data stays.
    pub async fn stop(&mut self) {
        self.end(Signal::TERM, STOP_DEADLINE).await;
    }

    /// Waits until what was declared is on disk. A RabbitMQ that keeps it in Mnesia may have agreed to a durable queue a few seconds
    /// before, and not know of it any more when it is killed and started again: the messages are gone with the queue, also those
    /// that it had confirmed. (Seen with 3.10 under load, in two of three hundred runs. Its log says then that it recovered 0 queues.)
    pub async fn write_down_declarations(&self) {
        if self.version() < Version::V4_3 {
            self.ctl(&["eval", "mnesia:dump_log()."]).await;
        }
    }

    /// Kills the node's Erlang VM with SIGKILL. Its data stays, see
    /// [`write_down_declarations`](Self::write_down_declarations).
    pub async fn kill(&mut self) {
        self.end(Signal::KILL, KILL_DEADLINE).await;
    }

    async fn end(&mut self, how: Signal, deadline: Duration) {
        // Asked once: a node that is quick to stop takes the file with its process id along.
        let pid = self.pid();
        self.signal_to(pid, how);
        // A suspended VM does not see a SIGTERM before it runs again.
        self.signal_to(pid, Signal::CONT);
        if let Some(mut server) = self.server.take() {
            server.ended(deadline).await;
        }
    }

    /// Starts a node that was stopped or killed, with the same data and ports, and waits until it
    /// serves clients.
    ///
    /// # Panics
    /// If it does not start, or is running.
    pub async fn start_again(&mut self) {
        assert!(self.server.is_none(), "{} is running", self.name);
        if let Err(failure) = self.boot().await {
            panic!("{}", failure.0);
        }
    }

    /// Deletes the data of a node that is down: what starts again knows nothing of what was before.
    ///
    /// # Panics
    /// If it is running, or the data cannot be deleted.
    pub fn forget_data(&self) {
        assert!(self.server.is_none(), "{} is running", self.name);
        let data = settings::data(self.folder.path());
        fs::remove_dir_all(&data)
            .unwrap_or_else(|error| panic!("could not delete {}: {error}", data.display()));
    }

    /// Stops the node in good order and starts it again.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start_again().await;
    }

    /// Halts the node (SIGSTOP): its connections stay open, and nothing answers.
    pub async fn suspend(&self) {
        let pid = self.pid();
        let halted = suspend(pid).await;
        halted.unwrap_or_else(|error| panic!("could not suspend {} ({pid}): {error}", self.name));
    }

    /// Lets a suspended node go on (SIGCONT).
    pub fn resume(&self) {
        self.signal_to(self.pid(), Signal::CONT);
    }

    fn signal_to(&self, pid: u32, which: Signal) {
        signal(pid, which).unwrap_or_else(|error| {
            panic!("could not send {which:?} to {} ({pid}): {error}", self.name)
        });
    }

    /// Makes the node believe that its memory is used up, so that it blocks publishers, and waits
    /// until it does.
    pub async fn raise_memory_alarm(&self) {
        self.ctl(&["set_vm_memory_high_watermark", "0.00000001"]).await;
        eventually(ALARM_DEADLINE, "the memory alarm to be raised", || self.in_alarm()).await;
    }

    /// Takes the memory alarm back and waits until publishers are no longer blocked.
    pub async fn clear_memory_alarm(&self) {
        self.ctl(&["set_vm_memory_high_watermark", "0.6"]).await;
        eventually(ALARM_DEADLINE, "the memory alarm to be cleared", || async {
            !self.in_alarm().await
        })
        .await;
    }

    async fn in_alarm(&self) -> bool {
        match self.management().get(&["health", "checks", "local-alarms"]).await {
            Ok(_) => false,
            Err(error) if error.status() == Some(503) => true,
            Err(error) => panic!("could not ask {} for its alarms: {error}", self.name),
        }
    }

    /// Runs `rabbitmqctl` on this node and returns what it printed.
    ///
    /// # Panics
    /// If rabbitmqctl fails.
    pub async fn ctl(&self, arguments: &[&str]) -> String {
        let attempted = format!("rabbitmqctl {} on {}", arguments.join(" "), self.name);
        let command = self.installation.command(&self.environment(), CTL, arguments);
        let output = tokio::process::Command::new(&command[0])
            .args(&command[1..])
            .current_dir(self.folder.path())
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(CTL_DEADLINE, output)
            .await
            .unwrap_or_else(|_| {
                panic!("{attempted} did not end within {CTL_DEADLINE:?}\n{}", self.log_tail())
            })
            .unwrap_or_else(|error| panic!("{attempted} could not be run: {error}"));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{attempted}: {}\n{said}{complained}\n{}",
            output.status,
            self.log_tail()
        );
        said
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        format!(
            "the log of {} ends with:\n{}",
            self.name,
            tail(&settings::console_log(self.folder.path()))
        )
    }

    /// What it says of a queue that it had to restart, and of messages that it lost: it may do so when it was killed.
    pub fn confessions(&self) -> String {
        let is_one = |line: &str| {
            let line = line.to_lowercase();
            ["crash", "dropped", "unclean", "corrupt", "recover", "discard"]
                .iter()
                .any(|word| line.contains(word))
        };
        format!(
            "the log of {} says of crashes and losses:\n{}",
            self.name,
            tail_of(&settings::console_log(self.folder.path()), is_one)
        )
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        settings::environment(
            &self.installation,
            self.folder.path(),
            &self.name,
            self.ports,
            &self.epmd,
        )
    }

    async fn boot(&mut self) -> Result<(), BootFailure> {
        let log = self.prepare_files().unwrap_or_else(|error| {
            let folder = self.folder.path().display();
            panic!("could not write the files of {} to {folder}: {error}", self.name)
        });
        let said_before = log.metadata().map_or(0, |metadata| metadata.len());
        let command = self.installation.command(&self.environment(), SERVER, &[]);
        let mut server = GuardedProcess::start(command, Ending::Kill, log);

        let node = format!("RabbitMQ {} ({})", self.version(), self.name);
        let ready = server.ready(BOOT_DEADLINE, format!("{node} to serve clients"), || async {
            let log = settings::console_log(self.folder.path());
            let ready = async {
                has_started(&log, said_before)?;
                serves_clients(&self.broker, self.ports.amqp).await
            };
            ready.await.map_err(|error| format!("{error}\n{}", self.log_tail()))
        });
        match ready.await {
            Ok(()) => {
                self.server = Some(server);
                Ok(())
            }
            Err(status) => Err(BootFailure(format!(
                "{node} ended while starting: {status}\n{}",
                self.log_tail()
            ))),
        }
    }

    fn prepare_files(&self) -> std::io::Result<File> {
        let folder = self.folder.path();
        settings::write_files(&self.installation, folder, self.ports, &self.epmd, &self.extras)?;
        File::options().create(true).append(true).open(settings::console_log(folder))
    }
}

/// A node that ended before it was ready, as told by itself.
struct BootFailure(String);

impl BootFailure {
    /// Somebody else took one of its ports between the moment it was found free and the node's
    /// start.
    fn port_was_taken(&self) -> bool {
        ["eaddrinuse", "in use"].iter().any(|sign| self.0.contains(sign))
    }
}
