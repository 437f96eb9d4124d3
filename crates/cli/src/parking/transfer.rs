//! Carrying messages away and back: `export`, `import`.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use leveret::Client;
use tempfile::NamedTempFile;

use super::{Lot, Returns, SoFar, Which};
use crate::failure::Failure;
use crate::files::new_beside;
use crate::output::{counted, fault, note, print, print_json, unbuffered, unless_unread};
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
    #[arg(short = 'n', long, alias = "count", value_name = "COUNT")]
    limit: Option<u64>,

    #[command(flatten)]
    returns: Returns,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    reach: Reach,
}

impl Export {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let to_file = self.file.as_deref().filter(|path| *path != Path::new("-"));
        let mut out = match to_file {
            None => Out::Standard(BufWriter::new(unbuffered()?)),
            Some(path) => Out::create(path)?,
        };
        let bar = bar(0, "looked at");
        let shown = bar.clone();
        let command = async |client: &Client| {
            let lot = self.returns.lot(client, &self.lot.lot);
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
        out.finish()?;
        match (to_file, self.lot.form.json) {
            (None, _) => note(&format!("{} exported", counted(exported, "message"))),
            (Some(_), true) => print_json(&serde_json::json!({ "exported": exported }))?,
            (Some(_), false) => print(&format!("{} exported", counted(exported, "message")))?,
        }
        Ok(())
    }
}

/// Where an export goes. A file appears under its name when it is complete, so that one that could not be finished leaves
/// nothing behind and is no obstacle to the next try.
enum Out<'a> {
    Standard(BufWriter<File>),
    File { path: &'a Path, beside: BufWriter<NamedTempFile> },
}

impl<'a> Out<'a> {
    fn create(path: &'a Path) -> Result<Self, Failure> {
        if path.exists() {
            return Err(exists(path));
        }
        let beside = new_beside(path).map_err(|error| Failure::writing(path, &error))?;
        Ok(Out::File { path, beside: BufWriter::new(beside) })
    }

    fn finish(mut self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::new(format_args!("cannot write: {error}"));
        self.flush().map_err(failed)?;
        let Out::File { path, beside } = self else { return Ok(()) };
        let beside = beside.into_inner().map_err(|error| failed(error.into_error()))?;
        beside.as_file().sync_all().map_err(failed)?;
        beside.persist_noclobber(path).map(drop).map_err(|error| match error.error.kind() {
            io::ErrorKind::AlreadyExists => exists(path),
            _ => failed(error.error),
        })
    }
}

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Out::Standard(out) => out.write(bytes),
            Out::File { beside, .. } => beside.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Out::Standard(out) => out.flush(),
            Out::File { beside, .. } => beside.flush(),
        }
    }
}

fn exists(path: &Path) -> Failure {
    Failure::wrong(format_args!(
        "{} exists already, and an export overwrites nothing: choose another name, or delete the file",
        path.display()
    ))
}

/// Publish exported messages into the parking lot, with confirms.
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
        let (bar, so_far) = (bar(0, "imported"), SoFar::default());
        let (shown, counting) = (bar.clone(), &so_far);
        let command = async |client: &Client| {
            let lot = client.parking_lot(&self.lot.lot);
            // Without it, every line would fail for the same reason.
            lot.depth().await?;
            let mut import = lot.import(&mut from).progress(move |imported| {
                counting.set(if self.dry_run { 0 } else { imported.imported }, 0);
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
        let imported = imported.map_err(|failure| so_far.told_with(failure, "imported"))?;
        for (line, why) in &imported.bad_lines {
            fault(&format!("line {line}: {why}"));
        }
        let would = if self.dry_run { "would be " } else { "" };
        unless_unread(match self.lot.form.json {
            true => print_json(&serde_json::json!({
                "dry_run": self.dry_run, "imported": imported.imported, "failed": imported.failed,
            })),
            false => print(&format!("{} {would}imported", counted(imported.imported, "message"))),
        })?;
        match imported.failed {
            0 => Ok(()),
            failed => Err(Failure::new(format_args!("{} not imported", counted(failed, "line")))),
        }
    }
}
