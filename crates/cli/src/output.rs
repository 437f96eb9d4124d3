//! What a command says: results on the standard output, for a person or for a program.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use clap::Args;
use console::{measure_text_width, style, truncate_str};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::text::{escape, escape_json, escape_lines};

/// In which form results are told.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Form {
    /// Tell results as lines of JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Says something on the standard output. Nobody listening is no error.
pub(crate) fn say(text: &str) {
    let _ = print(text);
}

/// Whether the standard error has lines of JSON, as the results have. The thread that ends a process which hangs asks, too.
static JSON_ERRORS: AtomicBool = AtomicBool::new(false);

/// From now on, notes and errors are lines of JSON.
pub(crate) fn use_json_errors() {
    JSON_ERRORS.store(true, Ordering::Relaxed);
}

/// Says something beside the results.
pub(crate) fn note(text: &str) {
    say_beside(text, json!({ "note": text }));
}

/// Says that a part of the work failed: one message, one line. The command goes on.
pub(crate) fn fault(text: &str) {
    say_beside(text, json!({ "error": text }));
}

/// Says something on the standard error: what it is about is named by others, and is escaped.
pub(crate) fn say_beside(text: &str, form: Value) {
    let _ = io::stderr().lock().write_all(line_beside(text, form).as_bytes());
}

/// The same unless it would have to wait: for a full pipe, for a terminal that is stopped, or for others that do.
pub(crate) fn say_beside_at_once(text: &str, form: Value) {
    let stderr = rustix::stdio::stderr();
    let mut wanted = [PollFd::new(&stderr, PollFlags::OUT)];
    if matches!(poll(&mut wanted, Some(&Timespec::default())), Ok(1)) {
        let _ = rustix::io::write(stderr, line_beside(text, form).as_bytes());
    }
}

fn line_beside(text: &str, form: Value) -> String {
    match JSON_ERRORS.load(Ordering::Relaxed) {
        true => format!("{}\n", escape_json(&form.to_string())),
        false => format!("leveret: {}\n", escape_lines(text)),
    }
}

/// Says a result. If nobody reads any more, there is no use in going on.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_bytes(text.as_bytes())
}

/// The same, whatever the bytes are.
pub(crate) fn print_bytes(text: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written =
        out.write_all(text).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush());
    written.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::nobody_reads(),
        _ => Failure::new(format_args!("cannot write to the standard output: {error}")),
    })
}

/// The standard output without the buffer of this process, which would be flushed at the end, and block it.
pub(crate) fn unbuffered() -> Result<File, Failure> {
    let out = io::stdout().as_fd().try_clone_to_owned();
    out.map(File::from)
        .map_err(|error| Failure::new(format_args!("cannot write to the standard output: {error}")))
}

/// A result whose reader has gone does not replace the verdict.
pub(crate) fn unless_unread(printed: Result<(), Failure>) -> Result<(), Failure> {
    match printed {
        Err(failure) if failure.is_unread() => Ok(()),
        printed => printed,
    }
}

/// Says a result as a line of JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print(&escape_json(&serde_json::to_string(value).map_err(Failure::new)?))
}

/// Rows under headings. On a terminal the last column is cut to what has room.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(headings: &[&str]) -> Self {
        Table { rows: vec![headings.iter().map(|&heading| heading.to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        // A cell is a line.
        self.rows.push(cells.into_iter().map(|cell| escape(&cell)).collect());
    }

    pub(crate) fn print(&self) -> Result<(), Failure> {
        let width =
            io::stdout().is_terminal().then(|| usize::from(console::Term::stdout().size().1));
        let text = self.to_text(width);
        // Plain where the output is no terminal, or NO_COLOR is set.
        match text.split_once('\n') {
            Some((headings, rows)) => print(&format!("{}\n{rows}", style(headings).bold())),
            None => print(&text),
        }
    }

    fn to_text(&self, width: Option<usize>) -> String {
        let columns = self.rows[0].len();
        let width_of = |column: usize| {
            self.rows.iter().map(|row| measure_text_width(&row[column])).max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..columns).map(width_of).collect();
        let before: usize = widths[..columns - 1].iter().map(|width| width + 2).sum();
        let mut lines = Vec::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row[..columns - 1].iter().zip(&widths) {
                let padding = width + 2 - measure_text_width(cell);
                line.push_str(cell);
                line.extend(std::iter::repeat_n(' ', padding));
            }
            let last = &row[columns - 1];
            match width {
                Some(width) => {
                    line.push_str(&truncate_str(last, width.saturating_sub(before).max(10), "…"))
                }
                None => line.push_str(last),
            }
            lines.push(line.trim_end().to_owned());
        }
        lines.join("\n")
    }
}

/// The last line of an error with several: that of a stack trace says what went wrong.
pub(crate) fn last_line(text: &str) -> String {
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim().to_owned()
}

/// How long ago something was, for a person: `3 min`.
pub(crate) fn ago(time: Option<SystemTime>) -> String {
    let Some(time) = time else { return "–".to_owned() };
    rough(SystemTime::now().duration_since(time).unwrap_or_default())
}

/// A time, in its largest unit.
pub(crate) fn rough(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds @ 1..=119 => format!("{seconds} s"),
        seconds @ 120..=7199 => format!("{} min", seconds / 60),
        seconds @ 7200..=172_799 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86400),
    }
}

/// A time, for a program.
pub(crate) fn timestamp(time: Option<SystemTime>) -> Option<String> {
    time.map(|time| humantime::format_rfc3339_millis(time).to_string())
}

/// How many bytes, for a person.
pub(crate) fn size(bytes: usize) -> String {
    match bytes {
        0..=1023 => format!("{bytes} B"),
        1024..=1_048_575 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}

/// `1 message`, `2 messages`.
pub(crate) fn counted(count: u64, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&["#", "id", "error"]);
        table.row(vec!["1".into(), "order-17".into(), "no such customer:\n17".into()]);
        table.row(vec!["12".into(), "é".into(), String::new()]);
        table
    }

    #[test]
    fn columns_stand_below_each_other() {
        let expected = "#   id        error\n1   order-17  no such customer:\\n17\n12  é";
        assert_eq!(table().to_text(None), expected);
    }

    #[test]
    fn on_a_terminal_the_last_column_is_cut() {
        let expected = "#   id        error\n1   order-17  no such c…\n12  é";
        assert_eq!(table().to_text(Some(24)), expected);
        // There is always room for a little.
        assert_eq!(table().to_text(Some(1)), expected);
    }

    #[test]
    fn of_a_stack_trace_the_last_line_is_shown() {
        let trace =
            "Traceback (most recent call last):\n  File \"bill.py\", line 3\nKeyError: 'total'\n\n";
        assert_eq!(last_line(trace), "KeyError: 'total'");
        assert_eq!(last_line("one line"), "one line");
        assert_eq!(last_line(""), "");
    }

    #[test]
    fn times_and_sizes_are_rough() {
        let times =
            [(0, "0 ms"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172_800, "2 days")];
        for (seconds, text) in times {
            assert_eq!(rough(Duration::from_secs(seconds)), text);
        }
        let sizes = [(1023, "1023 B"), (1024, "1.0 KiB"), (1_572_864, "1.5 MiB")];
        for (bytes, text) in sizes {
            assert_eq!(size(bytes), text);
        }
    }
}
