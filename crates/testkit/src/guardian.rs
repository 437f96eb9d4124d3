//! A shell that outlives the test process just long enough to clean up after it.
//!
//! ```text
//!   test process ──lifeline (a pipe)──▶ sh: waits for end of file, then cleans up and exits
//! ```
//!
//! The kernel closes the pipe however the test process ends, so there is no way to end it without
//! the clean-up: neither a panic, nor `exit`, nor SIGKILL. The pipe is close-on-exec, hence no
//! other child keeps it open.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};

/// A running guardian. Dropping it closes the lifeline and waits until the clean-up is done.
#[derive(Debug)]
pub(crate) struct Guardian {
    shell: Child,
}

impl Guardian {
    /// Starts `script`, which finds the lifeline as its standard input and `arguments` as `$1`,
    /// `$2`…
    pub(crate) fn start<I>(
        script: &str,
        arguments: I,
        stdout: Stdio,
        stderr: Stdio,
    ) -> io::Result<Guardian>
    where
        I: IntoIterator<Item: AsRef<OsStr>>,
    {
        let shell = Command::new("sh")
            .args(["-c", script, "leveret-guardian"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(stdout)
            .stderr(stderr)
            // A test runner that ends a test by killing its process group must not reach the
            // guardian.
            .process_group(0)
            .spawn()?;
        Ok(Guardian { shell })
    }

    /// The script's exit status, if it has ended by itself.
    pub(crate) fn exit_status(&mut self) -> io::Result<Option<ExitStatus>> {
        self.shell.try_wait()
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        // Fails only if the shell has been reaped already.
        let _ = self.shell.wait();
    }
}
