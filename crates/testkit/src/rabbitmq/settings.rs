//! What a node is told: its configuration file and its environment.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::epmd::Epmd;
use super::installation::Installation;
use crate::port::free_ports;

/// The ports of a node. They stay the same when it is started again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    pub(super) amqp: u16,
    pub(super) management: u16,
    distribution: u16,
}

impl Ports {
    pub(super) fn free() -> Ports {
        let [amqp, management, distribution] = free_ports();
        Ports { amqp, management, distribution }
    }
}

/// rabbitmqctl listens too while it talks to a node. By default it does so 10,000 above the node's
/// distribution port, which need not be a port at all; here it finds itself a place in a range of
/// its own.
const CTL_PORTS: (u16, u16) = (5_000, 9_999);

/// Two cores are shared by all nodes, the client and the test: idle schedulers must not spin.
/// Distribution stays on loopback like everything else.
const ERLANG_ARGUMENTS: &str = "+sbwt none +sbwtdcpu none +sbwtdio none -start_epmd false \
    -kernel inet_dist_use_interface {127,0,0,1}";

/// Writes the files a node reads at its start into its folder.
pub(super) fn write_files(
    folder: &Path,
    ports: Ports,
    epmd: &Epmd,
    extra: &[String],
) -> io::Result<()> {
    let cookie = folder.join(".erlang.cookie");
    if !cookie.exists() {
        fs::write(&cookie, &epmd.cookie)?;
        fs::set_permissions(&cookie, fs::Permissions::from_mode(0o400))?;
    }
    fs::write(folder.join("enabled_plugins"), "[rabbitmq_management].\n")?;
    fs::write(folder.join("rabbitmq.conf"), configuration(ports, extra))
}

fn configuration(ports: Ports, extra: &[String]) -> String {
    let Ports { amqp, management, .. } = ports;
    // Counts in the management API are this old at most; the default of 5 s would be felt in tests.
    let mut text = format!(
        "listeners.tcp.1 = 127.0.0.1:{amqp}\n\
         management.tcp.ip = 127.0.0.1\n\
         management.tcp.port = {management}\n\
         loopback_users = none\n\
         disk_free_limit.absolute = 50MB\n\
         collect_statistics_interval = 500\n"
    );
    for line in extra {
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

/// Where the node writes the process id of its Erlang VM.
pub(super) fn pid_file(folder: &Path) -> PathBuf {
    folder.join("pid")
}

/// Where the node writes what it has to say.
pub(super) fn console_log(folder: &Path) -> PathBuf {
    folder.join("console.log")
}
