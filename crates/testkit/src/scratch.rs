//! Temporary folders that are removed even when the test process is killed.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::guardian::Guardian;

/// Removing may fail while a server that is being killed still writes there: try for ten seconds.
const REMOVE: &str = r#"
read -r _
tries=0
until rm -rf -- "$1" || [ $tries -ge 100 ]; do sleep 0.1; tries=$((tries + 1)); done
"#;

/// An empty folder of its own that is removed when this is dropped or the test process dies.
#[derive(Debug)]
pub struct ScratchFolder {
    path: PathBuf,
    _guardian: Guardian,
}

impl ScratchFolder {
    /// Makes a folder among the system's temporary files.
    ///
    /// # Panics
    /// If the folder cannot be made.
    pub fn new() -> ScratchFolder {
        ScratchFolder::inside(&std::env::temp_dir())
    }

    pub(crate) fn inside(parent: &Path) -> ScratchFolder {
        let path = tempfile::Builder::new()
            .prefix("leveret-")
            .tempdir_in(parent)
            // From here on the guardian is the one that removes it.
            .map(tempfile::TempDir::keep)
            .unwrap_or_else(|error| {
                panic!("could not make a temporary folder in {}: {error}", parent.display())
            });
        let guardian = Guardian::start(REMOVE, [&path], Stdio::null(), Stdio::null())
            .unwrap_or_else(|error| {
                panic!("could not start sh to guard {}: {error}", path.display())
            });
        ScratchFolder { path, _guardian: guardian }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Default for ScratchFolder {
    fn default() -> Self {
        ScratchFolder::new()
    }
}
