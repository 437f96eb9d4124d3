//! Files: TOML and YAML to read, and results to write.
//!
//! Errors name line and column, and quote nothing of a file: it may have passwords in it.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde::de::DeserializeOwned;
use tempfile::NamedTempFile;

use crate::failure::Failure;
use crate::text::{place, without_value};

/// Reads a file: TOML, or YAML if its name ends in `.yaml` or `.yml`.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let named = |text: String| Failure::wrong(format_args!("{}: {text}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
    let is_yaml = path.extension().is_some_and(|ending| {
        ending.eq_ignore_ascii_case("yaml") || ending.eq_ignore_ascii_case("yml")
    });
    match is_yaml {
        true => serde_saphyr::from_str(&text).map_err(|error| named(yaml_mistake(&error))),
        false => from_toml(&text).map_err(named),
    }
}

/// Writes a file, in place of one that is there. If that fails, the latter stays as it was, and nothing half-written is left,
/// unless the folder lets no file take its place.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    write_beside(path, text).map_err(|error| Failure::writing(path, &error))
}

fn write_beside(path: &Path, text: &str) -> io::Result<()> {
    let old = fs::metadata(path).ok();
    if old.as_ref().is_some_and(|old| !old.is_file()) {
        // A device or a pipe cannot be replaced.
        return fs::write(path, text);
    }
    // Of a symbolic link, the file is replaced.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut beside = match new_beside(&path) {
        // The file may be written to, but not its folder.
        Err(error) if old.is_some() && is_denied(&error) => return fs::write(path, text),
        beside => beside?,
    };
    beside.write_all(text.as_bytes())?;
    if let Some(old) = old {
        beside.as_file().set_permissions(old.permissions())?;
    }
    beside.as_file().sync_all()?;
    match beside.persist(&path) {
        // The file is mounted there.
        Err(error) if error.error.kind() == io::ErrorKind::ResourceBusy => fs::write(path, text),
        persisted => persisted.map(drop).map_err(|error| error.error),
    }
}

fn is_denied(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// A file beside a path, in the same folder, which is to be renamed to it. It is deleted if that does not come to pass.
pub(crate) fn new_beside(path: &Path) -> io::Result<NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    tempfile::Builder::new()
        .prefix(".leveret-")
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(folder.unwrap_or(Path::new(".")))
}

/// Reads a value from TOML.
pub(crate) fn from_toml<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| toml_mistake(text, &error))
}

fn toml_mistake(text: &str, error: &toml::de::Error) -> String {
    let at = place(text, error.span().map_or(0, |span| span.start));
    format!("{at}: {}", without_value(error.message()))
}

fn yaml_mistake(error: &serde_saphyr::Error) -> String {
    without_value(&error.without_snippet().to_string())
}
