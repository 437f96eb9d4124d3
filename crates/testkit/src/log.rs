//! The end of a server's log, for the message of a panic.

use std::path::Path;

/// An Erlang node that fails to start explains why, and then goes on for a hundred lines.
const LINES: usize = 150;

/// The last lines of a file, or why there are none.
pub(crate) fn tail(file: &Path) -> String {
    tail_of(file, |_| true)
}

/// The last of those lines of a file that are of interest, or why there are none.
pub(crate) fn tail_of(file: &Path, is_of_interest: impl Fn(&str) -> bool) -> String {
    match std::fs::read(file) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text.lines().filter(|line| is_of_interest(line)).collect();
            lines[lines.len().saturating_sub(LINES)..].join("\n")
        }
        Err(error) => format!("({}: {error})", file.display()),
    }
}
