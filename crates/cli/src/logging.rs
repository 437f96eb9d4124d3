//! What the library and the crates below it log, on the standard error.

use std::env;
use std::io::{self, Write};

use tracing_subscriber::EnvFilter;

use crate::output::note;
use crate::text::escape_except;

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

/// Writes each event as one line, whatever texts from elsewhere it has. The colours stay; what else begins with an escape
/// character, `tracing_subscriber` has escaped.
struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let line = escape_except(text.strip_suffix('\n').unwrap_or(&text), &['\u{1b}']);
        // An error would be printed by `eprintln!`, which panics where the standard error is closed.
        let _ = io::stderr().lock().write_all((line + "\n").as_bytes());
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
