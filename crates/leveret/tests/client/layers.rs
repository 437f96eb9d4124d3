//! The modules of the crate import downward only: each file its own folder, and what stands above it in this list.

use std::fs;
use std::path::{Path, PathBuf};

const LAYERS: [&str; 28] = [
    // What everything may use.
    "clock",
    "duration",
    "random",
    "text",
    "amqp",
    "deaths",
    "error",
    "trace",
    // Messages.
    "delivery",
    "message",
    "payload",
    "telemetry",
    // Objects on the broker, and connections to it.
    "topology",
    "connection",
    "forwarder",
    "pool",
    "publisher",
    // Features.
    "retry",
    "consumer",
    "inbox",
    "rpc",
    "delay",
    "parking",
    "events",
    "removal",
    // The facade.
    "client",
    "prelude",
    "lib",
];

/// Imports that go up, each with its reason.
const EXCEPTIONS: [(&str, &str, &str); 3] = [
    ("delivery", "consumer", "a delivery hands its handler what the consumer knows of it"),
    ("consumer", "inbox", "a consumer handles exactly once if it is given an inbox"),
    ("consumer", "rpc", "a handler may answer the request that it was given"),
];

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == module)
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(sources(&path)),
            false => files.push(path),
        }
    }
    files
}

/// The modules of the crate that a file imports. Unit tests stand at its end, and may import anything.
fn imports(source: &str) -> impl Iterator<Item = &str> {
    let code = source.split("\n#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code = code.split("\n#[cfg(all(test").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| line.split("crate::").skip(1)).map(|rest| {
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        &rest[..end]
    })
}

#[test]
fn modules_import_downward_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = sources(&root);
    let (mut upward, mut used) = (Vec::new(), Vec::new());
    for path in &files {
        let file = path.strip_prefix(&root).unwrap();
        let module = file.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        let layer = layer_of(module).unwrap_or_else(|| panic!("{module:?} has no layer"));
        for imported in imports(&fs::read_to_string(path).unwrap()) {
            // What is no module is a macro or a name that the crate exports.
            let Some(other) = layer_of(imported).filter(|other| *other > layer) else { continue };
            let exception = (module, LAYERS[other]);
            match EXCEPTIONS.iter().any(|(from, to, _)| (*from, *to) == exception) {
                true => used.push(exception),
                false => upward.push(format!("{} imports {imported}", file.display())),
            }
        }
    }
    assert!(upward.is_empty(), "{upward:#?}");
    for (from, to, _) in EXCEPTIONS {
        assert!(used.contains(&(from, to)), "{from} does not import {to} any more");
    }
}
