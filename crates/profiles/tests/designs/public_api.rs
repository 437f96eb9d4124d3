//! The designs use what any design can use: no item of `leveret` that its documentation hides.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path) -> Vec<String> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: PathBuf| match path.is_dir() {
        true => sources(&path),
        false => vec![fs::read_to_string(path).unwrap()],
    };
    paths.flat_map(read).collect()
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// The name of an item: `pub use a::b;`, `pub fn b(`, `pub struct b<`, `pub const b: `.
fn name(item: &str) -> &str {
    let end = item.find([';', '(', '{', '=', '<']).unwrap_or(item.len());
    let item = item[..end].split(": ").next().unwrap_or_default();
    words(item).last().unwrap_or_default()
}

#[test]
fn the_designs_use_no_item_that_the_documentation_hides() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let of = |name: &str| sources(&crates.join(name).join("src"));
    let libraries = [of("leveret"), of("amqp")].concat();
    let hidden = |source: &String| -> Vec<String> {
        let items = source.split("\n#[doc(hidden)]\npub ").skip(1);
        items.map(|item| name(item).to_owned()).collect()
    };
    let hidden: Vec<String> = libraries.iter().flat_map(hidden).collect();
    for known in ["seam", "text", "Given", "look_behind_errors"] {
        assert!(hidden.iter().any(|name| name == known), "{known} is not in {hidden:?}");
    }
    for source in of("profiles") {
        let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code = lines.collect::<Vec<_>>().join("\n");
        // The module `text` has a common name: it is used by a path.
        let is_used = |name: &&String| match name.as_str() {
            "text" => code.contains("::text::") || code.contains("leveret::text"),
            name => words(&code).any(|word| word == name),
        };
        let used: Vec<_> = hidden.iter().filter(is_used).collect();
        assert!(used.is_empty(), "{used:?} in:\n{code}");
    }
}
