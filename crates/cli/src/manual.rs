//! `leveret completions` and `leveret man`: what a shell and a reader of manuals want.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

use crate::failure::Failure;
use crate::output::{print_bytes, say};

/// Writes what a shell needs to complete commands and options, to be sourced by it.
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Writes the manual pages, one for each command.
#[derive(Debug, Args)]
pub(crate) struct Man {
    /// The directory to write them to; without one, the first page goes to the standard output.
    #[arg(value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
}

pub(crate) fn completions(
    arguments: &Completions,
    mut command: clap::Command,
) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "leveret", &mut text);
    print_bytes(text.trim_ascii_end())
}

pub(crate) fn man(arguments: &Man, command: clap::Command) -> Result<(), Failure> {
    match &arguments.directory {
        None => print_bytes(page(command)?.trim_ascii_end()),
        Some(directory) => {
            let failed = |error| Failure::writing(directory, &error);
            std::fs::create_dir_all(directory).map_err(failed)?;
            clap_mangen::generate_to(command, directory).map_err(failed)?;
            say(&format!("written to {}", directory.display()));
            Ok(())
        }
    }
}

fn page(command: clap::Command) -> Result<Vec<u8>, Failure> {
    let mut text = Vec::new();
    clap_mangen::Man::new(command).render(&mut text).map_err(Failure::new)?;
    Ok(text)
}
