//! What a person or a program reads of the results.

use std::fmt::Write;

use serde_json::{Value, json};

use super::jobs::{Client, Job, Peer};
use super::meter::Measured;
use super::targets::{self, Scaled, Target};

/// One candidate in one setting.
pub(crate) struct Row {
    pub(crate) peer: Peer,
    pub(crate) job: Job,
    pub(crate) size: usize,
    pub(crate) channels: u64,
    pub(crate) client: Client,
    /// The median run, or why a run failed.
    pub(crate) result: Result<Measured, String>,
}

impl Row {
    fn same_setting(&self, other: &Row) -> bool {
        (self.peer, self.job, self.size, self.channels)
            == (other.peer, other.job, other.size, other.channels)
    }

    fn cpu(&self) -> Option<f64> {
        self.result.as_ref().ok().map(Measured::cpu_us_per_message)
    }

    /// How many times the CPU time that this client took in the same setting.
    fn times(&self, client: Client, rows: &[Row]) -> Option<f64> {
        let other = rows.iter().find(|row| row.client == client && self.same_setting(row))?;
        Some(self.cpu()? / other.cpu()?)
    }

    /// How many times the CPU time of this one the best peer took in the same setting, if this is one of ours.
    fn best_peer(&self, rows: &[Row]) -> Option<f64> {
        if !self.client.is_ours() {
            return None;
        }
        let is_peer = |row: &&Row| row.client.is_peer() && self.same_setting(row);
        let peers = rows.iter().filter(is_peer).filter_map(Row::cpu);
        Some(peers.min_by(f64::total_cmp)? / self.cpu()?)
    }

    /// What the limit of this job takes: on one channel, as where the targets were made.
    fn limit(&self, rows: &[Row]) -> Option<f64> {
        let is_limit = |row: &&Row| {
            (row.client, row.channels) == (Client::Limit, 1)
                && (row.peer, row.job, row.size) == (self.peer, self.job, self.size)
        };
        rows.iter().find(is_limit)?.cpu()
    }

    fn target(&self, rows: &[Row]) -> Option<Target> {
        let measured = self.result.as_ref().ok()?;
        match self.client {
            Client::Leveret => {
                let limit = self.limit(rows);
                targets::of_engine(self.job, self.peer, self.size, measured, limit)
            }
            Client::Toolkit => {
                // Where messages differ, the engine that sends the same ones counts.
                let times = self.times(Client::Stamped, rows);
                let times = times.or_else(|| self.times(Client::Leveret, rows))?;
                targets::of_toolkit(self.job, times)
            }
            _ => None,
        }
    }
}

pub(crate) fn print(rows: &[Row]) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:<8}  {:<9} {:>6} {:>3}  {:<10} {:>9} {:>11} {:>11} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8}  target",
        "peer",
        "job",
        "size",
        "ch",
        "client",
        "messages",
        "CPU µs/msg",
        "messages/s",
        "× engine",
        "× toolkit",
        "best/ours",
        "wake-ups",
        "sleeps",
        "allocs",
        "MiB",
    );
    for row in rows {
        print_row(&mut out, row, rows);
    }
    out.push_str(
        "× engine, × toolkit: times the CPU time that leveret, and toolkit, took; best/ours: times ours that the best peer took; wake-ups, sleeps and allocations per 1000 messages; MiB: the most memory that was held; scaled: the target, times what the limit takes here on one channel, through what it took where the target was made\n",
    );
    out
}

fn print_row(out: &mut String, row: &Row, rows: &[Row]) {
    let Row { peer, job, size, channels, client, result } = row;
    let _ = write!(out, "{peer:<8}  {job:<9} {size:>6} {channels:>3}  {client:<10} ");
    let measured = match result {
        Ok(measured) => measured,
        Err(reason) => {
            let _ = writeln!(out, "FAILED: {reason}");
            return;
        }
    };
    let times = |other: Client| {
        let times = row.times(other, rows).filter(|_| *client != other);
        times.map_or(String::new(), |times| format!("{times:.2}"))
    };
    let per_1000 = |count: u64| count as f64 * 1000.0 / measured.messages as f64;
    let allocations =
        measured.allocations.map_or("–".to_owned(), |count| format!("{:.1}", per_1000(count)));
    let _ = write!(
        out,
        "{:>9} {:>11.3} {:>11.0} {:>8} {:>9} {:>9} {:>9.1} {:>9.1} {:>9} {:>8.1}  ",
        measured.messages,
        measured.cpu_us_per_message(),
        measured.messages_per_second(),
        times(Client::Leveret),
        times(Client::Toolkit),
        row.best_peer(rows).map_or(String::new(), |times| format!("{times:.1}")),
        per_1000(measured.polls),
        per_1000(measured.parks),
        allocations,
        measured.memory_kib as f64 / 1024.0,
    );
    if let Some(Target { text, met, scaled }) = row.target(rows) {
        let verdict = |met| if met { "met" } else { "MISSED" };
        let _ = write!(out, "{text} {} ", verdict(met));
        if let Some(Scaled { cpu_us, met }) = scaled {
            let _ = write!(out, "(scaled ≤ {cpu_us:.2} {}) ", verdict(met));
        }
    }
    if let Some(latency) = measured.latency {
        let us = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let _ = write!(out, "p50 {:.0} p99 {:.0} µs", us(latency.p50), us(latency.p99));
    }
    if let Some(wrong) = measured.mislabelled {
        let _ = write!(out, "{wrong} outcomes of {} wrong", measured.messages);
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
}

pub(crate) fn json(rows: &[Row]) -> Value {
    let row_json = |row: &Row| {
        let mut value = json!({
            "peer": row.peer.to_string(),
            "job": row.job.to_string(),
            "size": row.size,
            "channels": row.channels,
            "client": row.client.to_string(),
        });
        match &row.result {
            Err(reason) => value["failed"] = json!(reason),
            Ok(measured) => {
                value["cpu_us_per_message"] = json!(measured.cpu_us_per_message());
                value["messages_per_second"] = json!(measured.messages_per_second());
                value["median_run"] = measured.to_json();
                value["times_engine"] = json!(row.times(Client::Leveret, rows));
                value["times_best_peer"] = json!(row.best_peer(rows));
                value["times_toolkit"] = json!(row.times(Client::Toolkit, rows));
                if let Some(Target { text, met, scaled }) = row.target(rows) {
                    let scaled = scaled.map(|Scaled { cpu_us, met }| {
                        json!({ "cpu_us_per_message": cpu_us, "met": met })
                    });
                    value["target"] = json!({ "text": text, "met": met, "scaled": scaled });
                }
            }
        }
        value
    };
    rows.iter().map(row_json).collect()
}
