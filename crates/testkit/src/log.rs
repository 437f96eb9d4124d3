//! The end of a server's log, for the message of a panic.

use std::path::Path;

/// An Erlang node that fails to start explains why, and then goes on for a hundred lines.
const LINES: usize = 150;

/// The last lines of a file, or why there are none.
pub(crate) fn tail(file: &Path) -> String {
    match std::fs::read(file) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(LINES)..].join("\n")
        }
        Err(error) => format!("({}: {error})", file.display()),
    }
}
