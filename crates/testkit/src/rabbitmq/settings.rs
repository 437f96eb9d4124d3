//! What a node is told: its configuration file and its environment.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::epmd::Epmd;
use super::installation::Installation;
use crate::certificates::Identity;
use crate::port::free_ports;

/// The ports of a node. They stay the same when it is started again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    pub(super) amqp: u16,
    pub(super) management: u16,
    distribution: u16,
    /// Listened on only by a node that was given [`Certificates`].
    pub(super) tls: u16,
}

impl Ports {
    pub(super) fn free() -> Ports {
        let [amqp, management, distribution, tls] = free_ports();
        Ports { amqp, management, distribution, tls }
    }
}

/// What a node is to be besides the usual.
#[derive(Clone, Debug, Default)]
pub(super) struct Extras {
    /// Lines for its `rabbitmq.conf`.
    pub(super) config: Vec<String>,
    pub(super) plugins: Vec<String>,
    pub(super) certificates: Option<Certificates>,
}

/// What a node shows and believes on its TLS port, as PEM.
#[derive(Clone, Debug)]
pub(super) struct Certificates {
    /// Who issues the certificates of clients.
    pub(super) authority: String,
    pub(super) server: Identity,
}

impl Certificates {
    /// Each file by its option in `rabbitmq.conf`, with its name in the node's folder.
    fn files(&self) -> [(&'static str, &'static str, &str); 3] {
        [
            ("cacertfile", "authority.pem", &self.authority),
            ("certfile", "certificate.pem", &self.server.certificate),
            ("keyfile", "key.pem", &self.server.key),
        ]
    }
}

/// rabbitmqctl listens too while it talks to a node. By default it does so 10,000 above the node's
/// distribution port, which need not be a port at all; here it finds itself a place in a range of
/// its own.
const CTL_PORTS: (u16, u16) = (5_000, 9_999);

/// Two cores are shared by all nodes, the client and the test: idle schedulers must not spin.
/// Distribution stays on loopback like everything else. `rabbitmq.conf` has no key for the rest: quorum queues count when they
/// tick, as often as all others; and they resend an unconfirmed dead letter after half a minute, not after three.
const ERLANG_ARGUMENTS: &str = "+sbwt none +sbwtdcpu none +sbwtdio none -start_epmd false \
    -kernel inet_dist_use_interface {127,0,0,1} -rabbit quorum_tick_interval 500 \
    -rabbit dead_letter_worker_publisher_confirm_timeout 30000";

/// The folder of the plugins that a node finds.
const OFFERED: &str = "plugins";

/// Writes the files a node reads at its start into its folder.
pub(super) fn write_files(
    installation: &Installation,
    folder: &Path,
    ports: Ports,
    epmd: &Epmd,
    extras: &Extras,
) -> io::Result<()> {
    let cookie = folder.join(".erlang.cookie");
    if !cookie.exists() {
        fs::write(&cookie, &epmd.cookie)?;
        fs::set_permissions(&cookie, fs::Permissions::from_mode(0o400))?;
    }
    if let Some(certificates) = &extras.certificates {
        for (_, name, pem) in certificates.files() {
            fs::write(folder.join(name), pem)?;
        }
    }
    offer_plugins(installation, folder, &extras.plugins)?;
    fs::write(folder.join("enabled_plugins"), enabled_plugins(&extras.plugins))?;
    let configuration = configuration(&installation.inside(folder), ports, extras);
    fs::write(folder.join("rabbitmq.conf"), configuration)
}

/// The plugin of every node, and those of RabbitMQ's that it stands on.
const PLUGINS: [&str; 4] = [
    "rabbitmq_management",
    "rabbitmq_management_agent",
    "rabbitmq_web_dispatch",
    "rabbitmq_prelaunch",
];

/// Makes the folder in which the node looks for plugins, with none that it does not need.
///
/// A node reads all that are there, enabled or not, and is occupied with that for up to half of its start. What is not
/// called `rabbitmq_` is a library, and plugins stand on those.
fn offer_plugins(installation: &Installation, folder: &Path, extra: &[String]) -> io::Result<()> {
    let offered = folder.join(OFFERED);
    if offered.exists() {
        return Ok(());
    }
    fs::create_dir(&offered)?;
    for found in fs::read_dir(installation.plugins()?)? {
        let found = found?;
        let name = found.file_name();
        let plugin = name.to_string_lossy();
        let plugin = plugin.split_once('-').map_or(&*plugin, |(plugin, _version)| plugin);
        let needed = PLUGINS.contains(&plugin) || extra.iter().any(|extra| extra == plugin);
        if needed || !plugin.starts_with("rabbitmq_") {
            symlink(installation.inside(&found.path()), offered.join(name))?;
        }
    }
    Ok(())
}

/// The plugins that run, as an Erlang term, which is the file's format.
fn enabled_plugins(extra: &[String]) -> String {
    let mut plugins = vec![PLUGINS[0]];
    plugins.extend(extra.iter().map(String::as_str));
    format!("[{}].\n", plugins.join(","))
}

/// `inside` is the node's folder as the node sees it.
fn configuration(inside: &Path, ports: Ports, extras: &Extras) -> String {
    let Ports { amqp, management, tls, .. } = ports;
    // Counts in the management API are half a second old at most, and its lists of connections a second; the default of
    // 5 s for both would be felt in tests.
    let mut text = format!(
        "listeners.tcp.1 = 127.0.0.1:{amqp}\n\
         management.tcp.ip = 127.0.0.1\n\
         management.tcp.port = {management}\n\
         loopback_users = none\n\
         disk_free_limit.absolute = 50MB\n\
         collect_statistics_interval = 500\n\
         management.sample_retention_policies.global.minute = 1\n\
         management.sample_retention_policies.basic.minute = 1\n\
         management.sample_retention_policies.detailed.minute = 1\n"
    );
    if let Some(certificates) = &extras.certificates {
        text.push_str(&format!("listeners.ssl.1 = 127.0.0.1:{tls}\n"));
        for (option, name, _) in certificates.files() {
            text.push_str(&format!("ssl_options.{option} = {}\n", inside.join(name).display()));
        }
    }
    for line in &extras.config {
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// The environment in which the server and rabbitmqctl of one node run.
pub(super) fn environment(
    installation: &Installation,
    folder: &Path,
    name: &str,
    ports: Ports,
    epmd: &Epmd,
) -> Vec<(&'static str, String)> {
    let inside = installation.inside(folder);
    let path = |name: &str| inside.join(name).display().to_string();
    vec![
        ("HOME", inside.display().to_string()),
        // No crash dump: it takes seconds, says nothing to us and lands in the working folder of
        // the test.
        ("ERL_CRASH_DUMP_SECONDS", "0".into()),
        ("ERL_EPMD_ADDRESS", "127.0.0.1".into()),
        ("ERL_EPMD_PORT", epmd.port.to_string()),
        ("RABBITMQ_NODENAME", name.into()),
        ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1".into()),
        ("RABBITMQ_NODE_PORT", ports.amqp.to_string()),
        ("RABBITMQ_DIST_PORT", ports.distribution.to_string()),
        ("RABBITMQ_CTL_DIST_PORT_MIN", CTL_PORTS.0.to_string()),
        ("RABBITMQ_CTL_DIST_PORT_MAX", CTL_PORTS.1.to_string()),
        ("RABBITMQ_MNESIA_BASE", path("data")),
        ("RABBITMQ_SCHEMA_DIR", path("schema")),
        ("RABBITMQ_LOG_BASE", path("log")),
        // To standard output, that is into console_log.
        ("RABBITMQ_LOGS", "-".into()),
        ("RABBITMQ_PID_FILE", path("pid")),
        ("RABBITMQ_PLUGINS_DIR", path(OFFERED)),
        ("RABBITMQ_ENABLED_PLUGINS_FILE", path("enabled_plugins")),
        ("RABBITMQ_CONFIG_FILE", path("rabbitmq.conf")),
        // Neither exists: what is configured for the whole machine is not for the tests.
        ("RABBITMQ_CONF_ENV_FILE", path("rabbitmq-env.conf")),
        ("RABBITMQ_ADVANCED_CONFIG_FILE", path("advanced.config")),
        // The start script then turns into the Erlang VM, rather than waiting for it: who waits for
        // the one process waits for the other.
        ("RUNNING_UNDER_SYSTEMD", "true".into()),
        ("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", ERLANG_ARGUMENTS.into()),
    ]
}

/// Where the node keeps what it knows.
pub(super) fn data(folder: &Path) -> PathBuf {
    folder.join("data")
}

/// Where the node writes the process id of its Erlang VM.
pub(super) fn pid_file(folder: &Path) -> PathBuf {
    folder.join("pid")
}

/// Where the node writes what it has to say.
pub(super) fn console_log(folder: &Path) -> PathBuf {
    folder.join("console.log")
}
