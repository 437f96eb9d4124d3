//! What a person or a program reads of the results.

use std::fmt::Write;

use crate::measure::Measured;

/// The first candidate of a job is Leveret; the others are compared with it.
fn jobs(results: &[Measured]) -> impl Iterator<Item = &[Measured]> {
    results.chunk_by(|a, b| a.job == b.job)
}

pub(crate) fn table(results: &[Measured]) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:<34} {:<46} {:>12} {:>10} {:>12}",
        "job", "candidate", "ns/message", "least", "times ours"
    );
    for job in jobs(results) {
        for (row, measured) in job.iter().enumerate() {
            let title = if row == 0 { measured.job.as_str() } else { "" };
            let ratio = match row {
                0 => String::new(),
                _ => format!("{:.1}", measured.median_ns / job[0].median_ns),
            };
            let _ = writeln!(
                out,
                "{title:<34} {:<46} {:>12.1} {:>10.1} {ratio:>12}",
                measured.candidate, measured.median_ns, measured.least_ns
            );
        }
    }
    out
}

pub(crate) fn json(results: &[Measured]) -> serde_json::Value {
    jobs(results)
        .flat_map(|job| {
            job.iter().map(|measured| {
                serde_json::json!({
                    "job": measured.job,
                    "candidate": measured.candidate,
                    "cpu_ns_per_message": { "median": measured.median_ns, "least": measured.least_ns },
                    "times_ours": measured.median_ns / job[0].median_ns,
                })
            })
        })
        .collect()
}
