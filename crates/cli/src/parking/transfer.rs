//! Carrying messages away and back: `export`, `import`.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use leveret::Client;

use super::{Lot, Which};
use crate::failure::Failure;
use crate::output::{counted, print, print_json};
use crate::progress::bar;
use crate::reach::Reach;

/// Writes messages as lines of JSON, from which the same messages can be made again. They stay where they are.
#[derive(Debug, Args)]
pub(super) struct Export {
    #[command(flatten)]
    lot: Lot,

    /// The file to write, which must not be there; without one, or with `-`, the standard output.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// At most so many messages.
    #[arg(long, value_name = "COUNT")]
    limit: Option<u64>,

    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    reach: Reach,
}

impl Export {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let to_file = self.file.as_deref().filter(|path| *path != Path::new("-"));
        let mut out: Box<dyn Write + Send> = match to_file {
            None => Box::new(BufWriter::new(io::stdout())),
            Some(path) => Box::new(BufWriter::new(File::create_new(path).map_err(|error| {
                Failure::wrong(format_args!("cannot write {}: {error}", path.display()))
            })?)),
        };
        let bar = bar(0, "looked at");
        let shown = bar.clone();
        let command = async |client: &Client| {
            let lot = client.parking_lot(&self.lot.lot);
            let mut export =
                lot.export(&mut out).filter(self.which.filter()).progress(move |progress| {
                    shown.set_length(progress.total);
                    shown.set_position(progress.seen);
                    shown.set_message(format!("{} written", progress.done));
                });
            if let Some(limit) = self.limit {
                export = export.limit(limit);
            }
            Ok(export.run().await?)
        };
        let exported = self.reach.with_client(command).await;
        bar.finish_and_clear();
        let exported = exported?;
        out.flush().map_err(|error| Failure::new(format_args!("cannot write: {error}")))?;
        match (to_file, self.lot.form.json) {
            (None, _) => eprintln!("leveret: {} exported", counted(exported, "message")),
            (Some(_), true) => print_json(&serde_json::json!({ "exported": exported }))?,
            (Some(_), false) => print(&format!("{} exported", counted(exported, "message")))?,
        }
        Ok(())
    }
}

/// Puts messages into the lot that were exported, each confirmed.
#[derive(Debug, Args)]
pub(super) struct Import {
    #[command(flatten)]
    lot: Lot,

    /// The file to read; without one, or with `-`, the standard input.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// At most so many messages a second.
    #[arg(long, value_name = "PER-SECOND")]
    rate: Option<f64>,

    /// Only tell whether all lines can be read.
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    reach: Reach,
}

impl Import {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let mut from: Box<dyn BufRead + Send> = match self.file.as_deref() {
            Some(path) if path != Path::new("-") => {
                Box::new(BufReader::new(File::open(path).map_err(|error| {
                    Failure::wrong(format_args!("cannot read {}: {error}", path.display()))
                })?))
            }
            _ => Box::new(BufReader::new(io::stdin())),
        };
        let bar = bar(0, "imported");
        let shown = bar.clone();
        let command = async |client: &Client| {
            let lot = client.parking_lot(&self.lot.lot);
            let mut import = lot.import(&mut from).progress(move |imported| {
                shown.set_position(imported.imported);
                shown.set_message(format!("{} failed", imported.failed));
            });
            if let Some(rate) = self.rate {
                import = import.rate(rate);
            }
            if self.dry_run {
                import = import.dry_run();
            }
            Ok(import.run().await?)
        };
        let imported = self.reach.with_client(command).await;
        bar.finish_and_clear();
        let imported = imported?;
        for (line, fault) in &imported.bad_lines {
            eprintln!("leveret: line {line}: {fault}");
        }
        let would = if self.dry_run { "would be " } else { "" };
        match self.lot.form.json {
            true => print_json(&serde_json::json!({
                "dry_run": self.dry_run, "imported": imported.imported, "failed": imported.failed,
            }))?,
            false => print(&format!("{} {would}imported", counted(imported.imported, "message")))?,
        }
        match imported.failed {
            0 => Ok(()),
            failed => Err(Failure::new(format_args!("{} not imported", counted(failed, "line")))),
        }
    }
}
