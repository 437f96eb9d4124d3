//! The table of a suite, for a reader or in JSON for a program: the columns are the same.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::meter::Measured;
use crate::suite::{Row, Suite};

/// Title, name in JSON, decimals, and the figure itself.
type Figure = (&'static str, &'static str, usize, fn(&Measured) -> Option<f64>);

/// The figures of the median run that all suites show.
const FIGURES: [Figure; 15] = [
    ("messages", "messages", 0, |took| Some(took.messages as f64)),
    ("CPU µs/msg", "cpu_us_per_message", 3, |took| took.us_per_message(Some(took.cpu_ns))),
    ("CPU of server", "server_cpu_us_per_message", 3, Measured::server_us_per_message),
    ("CPU of broker", "broker_cpu_us_per_message", 3, |took| {
        took.us_per_message(took.broker_cpu_ns)
    }),
    ("messages/s", "messages_per_second", 0, Measured::messages_per_second),
    ("seconds", "seconds", 2, |took| positive(took.seconds())),
    ("p50 µs", "p50_us", 0, |took| Some(took.p50_ns? as f64 / 1e3)),
    ("p99 µs", "p99_us", 0, |took| Some(took.p99_ns? as f64 / 1e3)),
    ("wake-ups", "wake_ups_per_1000", 1, |took| per_1000(took, took.polls)),
    ("sleeps", "sleeps_per_1000", 1, |took| per_1000(took, took.parks)),
    ("allocs", "allocations_per_1000", 1, |took| per_1000(took, took.allocations?)),
    ("MiB", "memory_mib", 1, |took| positive(took.memory_kib as f64 / 1024.0)),
    ("wrong outcomes", "mislabelled", 0, |took| Some(took.mislabelled? as f64)),
    ("rows", "rows", 0, |took| Some(took.rows? as f64)),
    ("KiB on disk", "kib_on_disk", 0, |took| Some(took.bytes_on_disk? as f64 / 1024.0)),
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
    pub(crate) fn at_least(least: f64, value: f64) -> Target {
        Target { text: format!("≥ {least:.0}"), met: value >= least }
    }

    pub(crate) fn at_most(most: f64, value: f64) -> Target {
        Target { text: format!("≤ {most:.0}"), met: value <= most }
    }
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
fn cells<S: Suite>(row: &Row<S::Run>, rows: &[Row<S::Run>]) -> Vec<Cell> {
    let named =
        |key: &'static str, value| Cell { title: key.replace('_', " "), key, value, decimals: 2 };
    let mut cells: Vec<Cell> =
        S::labels(&row.run).into_iter().map(|(key, label)| named(key, label)).collect();
    cells.extend(FIGURES.map(|(title, key, decimals, figure)| {
        let value = row.median().and_then(figure).into();
        Cell { title: title.to_owned(), key, value, decimals }
    }));
    cells.extend(
        S::comparisons(row, rows).into_iter().map(|(key, figure)| named(key, figure.into())),
    );
    cells
}

/// The table without the columns in which there is nothing. Behind the last one is why a row failed, or what it is held to.
pub(crate) fn text<S: Suite>(rows: &[Row<S::Run>]) -> String {
    let mut cells: Vec<Vec<Cell>> = rows.iter().map(|row| cells::<S>(row, rows)).collect();
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
    table.set_header(titles.chain([""]));
    for (row, cells) in rows.iter().zip(&cells) {
        table.add_row(cells.iter().map(Cell::text).chain([remark::<S>(row, rows)]));
    }
    for (at, column) in table.column_iter_mut().enumerate() {
        let is_number = |row: &Vec<Cell>| row.get(at).is_some_and(|cell| cell.value.is_number());
        if cells.iter().any(is_number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

fn remark<S: Suite>(row: &Row<S::Run>, rows: &[Row<S::Run>]) -> String {
    if let Err(reason) = &row.result {
        return format!("FAILED: {reason}");
    }
    let verdict = |target: Target| {
        let verdict = if target.met { "met" } else { "MISSED" };
        format!("{} {verdict}", target.text)
    };
    S::targets(row, rows).into_iter().map(verdict).collect::<Vec<_>>().join(", ")
}

pub(crate) fn json<S: Suite>(rows: &[Row<S::Run>]) -> Value {
    let object = |row: &Row<S::Run>| {
        let cells = cells::<S>(row, rows).into_iter().filter(|cell| !cell.value.is_null());
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
