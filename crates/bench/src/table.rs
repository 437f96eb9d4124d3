//! The table of a suite, for a person or in JSON for a program: its columns are the same.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::meter::Measured;
use crate::suite::{Row, Suite};

/// A column: its title in the table, its name in JSON, and what is in it.
pub(crate) struct Column<R> {
    title: &'static str,
    key: &'static str,
    content: Content<R>,
}

enum Content<R> {
    Label(fn(&R) -> String),
    /// Shown with so many decimals, of the row among all rows.
    Figure(usize, fn(&Row<R>, &[Row<R>]) -> Option<f64>),
}

/// What the run is.
pub(crate) fn label<R>(key: &'static str, content: fn(&R) -> String) -> Column<R> {
    Column { title: key, key, content: Content::Label(content) }
}

pub(crate) fn figure<R>(
    title: &'static str,
    key: &'static str,
    decimals: usize,
    content: fn(&Row<R>, &[Row<R>]) -> Option<f64>,
) -> Column<R> {
    Column { title, key, content: Content::Figure(decimals, content) }
}

pub(crate) fn messages<R>() -> Column<R> {
    figure("messages", "messages", 0, |row, _| Some(row.median()?.messages as f64))
}

pub(crate) fn cpu<R>() -> Column<R> {
    figure("CPU µs/msg", "cpu_us_per_message", 3, |row, _| row.cpu())
}

pub(crate) fn rate<R>() -> Column<R> {
    let rate = |row: &Row<R>, _: &[Row<R>]| row.median().map(Measured::messages_per_second);
    figure("messages/s", "messages_per_second", 0, rate)
}

pub(crate) fn seconds<R>() -> Column<R> {
    figure("seconds", "seconds", 2, |row, _| row.median().map(Measured::seconds))
}

pub(crate) fn memory<R>() -> Column<R> {
    figure("MiB", "memory_mib", 1, |row, _| Some(row.median()?.memory_kib as f64 / 1024.0))
}

pub(crate) fn p50<R>() -> Column<R> {
    figure("p50 µs", "p50_us", 0, |row, _| Some(row.median()?.p50_ns? as f64 / 1e3))
}

pub(crate) fn p99<R>() -> Column<R> {
    figure("p99 µs", "p99_us", 0, |row, _| Some(row.median()?.p99_ns? as f64 / 1e3))
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

impl<R> Column<R> {
    fn text(&self, row: &Row<R>, rows: &[Row<R>]) -> String {
        match self.content {
            Content::Label(label) => label(&row.run),
            Content::Figure(decimals, figure) => {
                figure(row, rows).map_or(String::new(), |figure| format!("{figure:.decimals$}"))
            }
        }
    }

    fn json(&self, row: &Row<R>, rows: &[Row<R>]) -> Value {
        match self.content {
            Content::Label(label) => label(&row.run).into(),
            Content::Figure(_, figure) => figure(row, rows).into(),
        }
    }
}

/// The table without the columns in which there is nothing. Behind the last one is why a row failed, or what it is held to.
pub(crate) fn text<S: Suite>(rows: &[Row<S::Run>]) -> String {
    let mut columns = S::columns();
    columns.retain(|column| rows.iter().any(|row| !column.text(row, rows).is_empty()));
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(columns.iter().map(|column| column.title).chain([""]));
    for row in rows {
        let cells = columns.iter().map(|column| column.text(row, rows));
        table.add_row(cells.chain([remark::<S>(row, rows)]));
    }
    for (column, shown) in columns.iter().zip(table.column_iter_mut()) {
        if matches!(column.content, Content::Figure(..)) {
            shown.set_cell_alignment(CellAlignment::Right);
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
        let columns = S::columns().into_iter();
        let mut object: Map<String, Value> =
            columns.map(|column| (column.key.to_owned(), column.json(row, rows))).collect();
        match &row.result {
            Err(reason) => object.insert("failed".to_owned(), reason.as_str().into()),
            Ok(_) => {
                object.insert("targets".to_owned(), json!(S::targets(row, rows)));
                object.insert("median_run".to_owned(), json!(row.median()))
            }
        };
        Value::Object(object)
    };
    rows.iter().map(object).collect()
}
