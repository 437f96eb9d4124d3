//! What the library and the crates below it log, on the standard error.

use std::env;
use std::io::{self, Write};

use tracing_subscriber::EnvFilter;

use crate::output::note;
use crate::text::escape;

/// The variables that say what is logged, in their order.
const VARIABLES: [&str; 2] = ["LEVERET_LOG", "RUST_LOG"];

/// Logs what a variable says, as in `leveret=debug`, or else by these directives; nothing without either.
pub(crate) fn begin(default: Option<&str>) {
    let given = VARIABLES.into_iter().find_map(|name| {
        let directives = env::var(name).ok().filter(|directives| !directives.is_empty())?;
        match EnvFilter::try_new(directives) {
            Ok(filter) => Some(filter),
            Err(error) => {
                note(&format!("{name} is not used: {error}"));
                None
            }
        }
    });
    let Some(filter) = given.or_else(|| default.map(EnvFilter::new)) else { return };
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogWriter)
        .with_ansi(console::colors_enabled_stderr())
        .try_init();
}

/// Writes each event as one line, whatever texts from elsewhere it has. Of what a terminal obeys, only colours stay.
struct LogWriter;

fn to_line(event: &str, is_coloured: bool) -> String {
    let mut pieces = event.strip_suffix('\n').unwrap_or(event).split('\u{1b}');
    let mut line = escape(pieces.next().unwrap_or_default());
    for piece in pieces {
        let after = piece
            .strip_prefix('[')
            .map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';'));
        let is_colour = is_coloured && after.is_some_and(|after| after.starts_with('m'));
        line += if is_colour { "\u{1b}" } else { "\\u{1b}" };
        line += &escape(piece);
    }
    line + "\n"
}

impl Write for LogWriter {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let line = to_line(&text, console::colors_enabled_stderr());
        // An error would be printed by `eprintln!`, which panics where the standard error is closed.
        let _ = io::stderr().lock().write_all(line.as_bytes());
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_line_keeps_colours_and_nothing_else_that_a_terminal_obeys() {
        let event = "\u{1b}[2mnow\u{1b}[0m a\u{1b}]0;title\u{7}\u{1b}[2J\nforged\n";
        let rest = r"a\u{1b}]0;title\u{7}\u{1b}[2J\nforged";
        assert_eq!(to_line(event, true), format!("\u{1b}[2mnow\u{1b}[0m {rest}\n"));
        assert_eq!(to_line(event, false), format!("{}{rest}\n", r"\u{1b}[2mnow\u{1b}[0m "));
    }
}
