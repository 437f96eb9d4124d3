//! PostgreSQL's programs on this machine and how they are run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

/// Where Debian keeps them, one folder per major version.
const DEBIAN: &str = "/usr/lib/postgresql";
/// PostgreSQL refuses to run as root; Debian's package makes this user for it.
pub(super) const USER: &str = "postgres";

/// The folder of the newest PostgreSQL's programs.
///
/// # Panics
/// If there is none.
pub(super) fn newest() -> PathBuf {
    installed().unwrap_or_else(|| {
        panic!(
            "there is no PostgreSQL here (nothing in {DEBIAN}): run ./test, or scripts/install-servers --postgres; or \
             set LEVERET_POSTGRES_URL to one that runs"
        )
    })
}

fn installed() -> Option<PathBuf> {
    let versions = std::fs::read_dir(DEBIAN).ok()?.flatten();
    let programs = versions.filter_map(|entry| {
        let version: u32 = entry.file_name().to_str()?.parse().ok()?;
        let programs = entry.path().join("bin");
        programs.join("postgres").exists().then_some((version, programs))
    });
    programs.max().map(|(_, programs)| programs)
}

/// A command that runs in a folder, with nothing of the caller's environment, and not as root.
pub(super) fn command(folder: &Path, program: &Path, arguments: &[&str]) -> Vec<OsString> {
    let mut command: Vec<OsString> = Vec::new();
    if rustix::process::geteuid().is_root() {
        command.push("setpriv".into());
        command.extend([format!("--reuid={USER}"), format!("--regid={USER}")].map(OsString::from));
        command.push("--clear-groups".into());
    }
    command.extend(["env", "--ignore-environment", "--chdir"].map(OsString::from));
    command.push(folder.into());
    command.extend(["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"].map(OsString::from));
    command.push(program.into());
    command.extend(arguments.iter().map(OsString::from));
    command
}

/// Runs a program to its end; what it printed, or why it failed.
pub(super) async fn run(command: &[OsString]) -> Result<String, String> {
    let attempted =
        || command.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let output = Command::new(&command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|error| format!("{} could not be run: {error}", attempted()))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(format!(
            "{}: {}\n{}{}",
            attempted(),
            output.status,
            text(&output.stdout),
            text(&output.stderr)
        ))
    }
}

/// A command that runs SQL on the server at a URL and prints bare values.
pub(super) fn psql(url: &str, sql: &str) -> Vec<OsString> {
    // Who named a server of their own may have the client only, in some place of their own.
    let program =
        installed().map_or_else(|| PathBuf::from("psql"), |programs| programs.join("psql"));
    let mut command: Vec<OsString> =
        vec!["env".into(), "PGCONNECT_TIMEOUT=3".into(), program.into()];
    command.extend(["--no-psqlrc", "--tuples-only", "--no-align", "--quiet"].map(OsString::from));
    command
        .extend(["--set=ON_ERROR_STOP=1", "--dbname", url, "--command", sql].map(OsString::from));
    command
}
