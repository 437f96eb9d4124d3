//! Where a RabbitMQ lies on this machine and how its programs are run.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::Version;

/// The scripts that run in the foreground, as the user who calls them. (Those in `/usr/sbin` change
/// the user.)
pub(super) const SERVER: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";
pub(super) const CTL: &str = "/usr/lib/rabbitmq/bin/rabbitmqctl";
/// What the scripts start is in a folder of its own in here.
const HOMES: &str = "/usr/lib/rabbitmq/lib";
pub(super) const EPMD: &str = "/usr/bin/epmd";

/// `$1` is the folder to enter, the rest the command to run there.
///
/// The mounts live in a namespace of the command's own and vanish with it. On the host they never
/// appear in the folder, so that removing it can never reach the host's devices.
const ENTER: &str =
    r#"mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && exec chroot "$@""#;

/// An installed RabbitMQ.
#[derive(Clone, Debug)]
pub(super) struct Installation {
    pub(super) version: Version,
    /// The folder that looks like `/` to this RabbitMQ, if it has one of its own.
    root: Option<PathBuf>,
}

impl Installation {
    /// # Panics
    /// If this version is not installed, or not usable by this user.
    pub(super) fn find(version: Version) -> Installation {
        let root = match version {
            Version::V3_10 => None,
            Version::V4_0 | Version::V4_3 => Some(cache().join(format!("rabbitmq-{version}"))),
        };
        let installation = Installation { version, root };
        assert!(
            installation.outside(Path::new(SERVER)).exists(),
            "there is no RabbitMQ {version} here ({} is missing): run ./test, or scripts/install-servers \
             --rabbitmq {version}; or set LEVERET_RABBITMQ_URL and LEVERET_RABBITMQ_MANAGEMENT_URL to one that runs",
            installation.outside(Path::new(SERVER)).display(),
        );
        assert!(
            installation.root.is_none() || rustix::process::geteuid().is_root(),
            "RabbitMQ {version} lies in a folder of its own, which only root can enter: run the tests as root, or \
             set LEVERET_RABBITMQ_URL and LEVERET_RABBITMQ_MANAGEMENT_URL to one that runs",
        );
        installation
    }

    /// Where nodes of this installation keep their files, as seen from here.
    pub(super) fn temporary_files(&self) -> PathBuf {
        match &self.root {
            None => std::env::temp_dir(),
            Some(root) => root.join("tmp"),
        }
    }

    /// Where its plugins lie, as seen from here.
    pub(super) fn plugins(&self) -> io::Result<PathBuf> {
        // The name of the folder in between has the version in full.
        let homes = fs::read_dir(self.outside(Path::new(HOMES)))?;
        let plugins: Vec<_> = homes
            .filter_map(|home| Some(home.ok()?.path().join("plugins")))
            .filter(|plugins| plugins.is_dir())
            .collect();
        match plugins.as_slice() {
            [only] => Ok(only.clone()),
            _ => Err(io::Error::other(format!(
                "one folder of plugins in {HOMES} was expected, not {plugins:?}"
            ))),
        }
    }

    /// A path as this RabbitMQ sees it.
    pub(super) fn inside(&self, path: &Path) -> PathBuf {
        match &self.root {
            None => path.to_owned(),
            Some(root) => {
                Path::new("/").join(path.strip_prefix(root).expect("the path is inside the root"))
            }
        }
    }

    /// A path of this RabbitMQ's as seen from here.
    fn outside(&self, path: &Path) -> PathBuf {
        match &self.root {
            None => path.to_owned(),
            Some(root) => root.join(path.strip_prefix("/").expect("the path is absolute")),
        }
    }

    /// A command that runs one of this RabbitMQ's programs with exactly these environment
    /// variables.
    pub(super) fn command(
        &self,
        environment: &[(&str, String)],
        program: &str,
        arguments: &[&str],
    ) -> Vec<OsString> {
        let mut command: Vec<OsString> = Vec::new();
        if let Some(root) = &self.root {
            command.extend(["unshare", "--mount", "--propagation", "private"].map(OsString::from));
            command.extend(["sh", "-c", ENTER, "enter"].map(OsString::from));
            command.push(root.into());
        }
        command.extend(["env", "--ignore-environment"].map(OsString::from));
        command.extend(["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"].map(OsString::from));
        command.extend(
            environment.iter().map(|(name, value)| OsString::from(format!("{name}={value}"))),
        );
        command.push(program.into());
        command.extend(arguments.iter().map(OsString::from));
        command
    }
}

/// Where `scripts/install-servers` puts what has a folder of its own.
fn cache() -> PathBuf {
    std::env::var_os("LEVERET_CACHE")
        .map_or_else(|| PathBuf::from("/var/cache/leveret"), PathBuf::from)
}
