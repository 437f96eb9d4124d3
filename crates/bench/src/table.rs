//! The table of a suite, for a reader or in JSON for a program: the columns are the same.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::meter::Measured;
use crate::suite::{Row, Suite, name};

/// What every reader of a table has to know.
pub(crate) const NOTES: &str = "Each row is the median run. CPU is that of the candidate's process, MiB the most memory that it \
    held. Wake-ups, sleeps and allocations are per 1000 messages. Cost vs best peer: below 1 is cheaper.";

/// Title, name in JSON, decimals, and the figure itself.
type Figure = (&'static str, &'static str, usize, fn(&Measured) -> Option<f64>);

/// The figures of the median run that all suites show.
const FIGURES: [Figure; 14] = [
    ("messages", "messages", 0, |took| Some(took.messages as f64)),
    ("CPU µs/msg", "cpu_us_per_message", 3, |took| positive(took.cpu_us_per_message())),
    ("server CPU µs/msg", "server_cpu_us_per_message", 3, Measured::server_us_per_message),
    ("msg/s", "messages_per_second", 0, Measured::messages_per_second),
    ("p50 µs", "p50_us", 0, |took| Some(took.p50_ns? as f64 / 1e3)),
    ("p99 µs", "p99_us", 0, |took| Some(took.p99_ns? as f64 / 1e3)),
    ("wake-ups/1000", "wake_ups_per_1000", 1, |took| per_1000(took, took.polls)),
    ("sleeps/1000", "sleeps_per_1000", 1, |took| per_1000(took, took.parks)),
    ("allocations/1000", "allocations_per_1000", 1, |took| per_1000(took, took.allocations?)),
    ("MiB", "memory_mib", 1, |took| positive(took.memory_kib as f64 / 1024.0)),
    ("held B/msg", "held_bytes_per_message", 0, Measured::held_bytes_per_message),
    ("wrong outcomes", "mislabelled", 0, |took| Some(took.mislabelled? as f64)),
    ("rows", "rows", 0, |took| Some(took.rows? as f64)),
    ("disk KiB", "kib_on_disk", 0, |took| Some(took.bytes_on_disk? as f64 / 1024.0)),
];

fn positive(figure: f64) -> Option<f64> {
    (figure > 0.0).then_some(figure)
}

fn per_1000(took: &Measured, count: u64) -> Option<f64> {
    positive(count as f64 * 1000.0 / took.messages as f64)
}

/// What a row is held to, and whether it keeps that.
#[derive(Serialize)]
pub(crate) struct Target {
    pub(crate) text: String,
    pub(crate) met: bool,
}

impl Target {
    pub(crate) fn at_least(what: &str, least: f64, value: f64) -> Target {
        Target { text: format!("{} {what} ≥ {least:.0}", short(value)), met: value >= least }
    }

    pub(crate) fn at_most(what: &str, most: f64, value: f64) -> Target {
        Target { text: format!("{} {what} ≤ {most:.0}", short(value)), met: value <= most }
    }
}

fn short(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

struct Cell {
    title: String,
    key: &'static str,
    value: Value,
    decimals: usize,
}

impl Cell {
    fn text(&self) -> String {
        match &self.value {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            Value::Number(figure) if figure.is_f64() => {
                format!("{:.*}", self.decimals, figure.as_f64().unwrap_or(0.0))
            }
            other => other.to_string(),
        }
    }
}

/// What the run is, what it took, and how that compares.
fn cells<S: Suite>(row: &Row<S>, rows: &[Row<S>]) -> Vec<Cell> {
    let cell = |title: &str, key, decimals, value| {
        let title = title.replace('_', " ");
        Cell { title, key, value, decimals }
    };
    let label = |(key, value)| cell(key, key, 0, value);
    let figure = |(title, key, decimals, figure): Figure| {
        cell(title, key, decimals, row.median().and_then(figure).into())
    };
    let mut cells = vec![label(("job", name(row.run.job)))];
    cells.extend(S::labels(&row.run.setting).into_iter().map(label));
    cells.push(label(("candidate", name(row.run.candidate))));
    cells.extend(FIGURES.map(figure));
    let times = row.times_best_peer(rows);
    cells.push(cell("cost vs best peer", "times_best_peer", 2, times.into()));
    cells
}

/// The table without the columns in which there is nothing. Behind the last one is why a row failed, or what it is held to.
pub(crate) fn text<S: Suite>(rows: &[Row<S>]) -> String {
    let mut cells: Vec<Vec<Cell>> = rows.iter().map(|row| cells(row, rows)).collect();
    let mut used: Vec<bool> = Vec::new();
    for at in 0..cells.first().map_or(0, Vec::len) {
        used.push(cells.iter().any(|row| !row[at].value.is_null()));
    }
    for row in &mut cells {
        let mut used = used.iter();
        row.retain(|_| *used.next().unwrap_or(&true));
    }
    let mut table = Table::new();
    table.load_style(NOTHING);
    let titles = cells.first().into_iter().flatten().map(|cell| cell.title.as_str());
    table.set_header(titles.chain(["targets"]));
    for (row, cells) in rows.iter().zip(&cells) {
        table.add_row(cells.iter().map(Cell::text).chain([remark(row, rows)]));
    }
    for (at, column) in table.column_iter_mut().enumerate() {
        let is_number = |row: &Vec<Cell>| row.get(at).is_some_and(|cell| cell.value.is_number());
        if cells.iter().any(is_number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

fn remark<S: Suite>(row: &Row<S>, rows: &[Row<S>]) -> String {
    if let Err(reason) = &row.result {
        return format!("FAILED: {reason}");
    }
    let verdict = |target: Target| {
        let verdict = if target.met { "met" } else { "MISSED" };
        format!("{} {verdict}", target.text)
    };
    S::targets(row, rows).into_iter().map(verdict).collect::<Vec<_>>().join(", ")
}

pub(crate) fn json<S: Suite>(rows: &[Row<S>]) -> Value {
    let object = |row: &Row<S>| {
        let cells = cells(row, rows).into_iter().filter(|cell| !cell.value.is_null());
        let mut object: Map<_, _> = cells.map(|cell| (cell.key.to_owned(), cell.value)).collect();
        match &row.result {
            Err(reason) => object.insert("failed".to_owned(), json!(reason)),
            Ok(_) => object.insert("targets".to_owned(), json!(S::targets(row, rows))),
        };
        object.insert("median_run".to_owned(), json!(row.median()));
        Value::Object(object)
    };
    rows.iter().map(object).collect()
}
