//! The guide and the README: every Rust example in them is compiled, and run unless it says `no_run`, by `cargo test --doc`.
//!
//! There is nothing else in here.

macro_rules! pages {
    ($($name:ident: $path:literal,)*) => {
        $(
            #[cfg(doctest)]
            #[doc = include_str!(concat!("../../../", $path))]
            mod $name {}
        )*

        /// Where they are, from the root of the repository.
        #[cfg(test)]
        const PAGES: &[&str] = &[$($path),*];
    };
}

pages! {
    broker: "crates/broker/README.md",
    cli: "crates/cli/README.md",
    consume: "docs/consume.md",
    delay: "docs/delay.md",
    events: "docs/events.md",
    exactly_once: "docs/exactly-once.md",
    failover: "docs/failover.md",
    leveret: "crates/leveret/README.md",
    map: "docs/README.md",
    migrating: "docs/migrating.md",
    on_the_wire: "docs/on-the-wire.md",
    operations: "docs/operations.md",
    park_and_replay: "docs/park-and-replay.md",
    profiles: "crates/profiles/README.md",
    publish: "docs/publish.md",
    rabbitmq_notes: "docs/rabbitmq-notes.md",
    readme: "README.md",
    retry: "docs/retry.md",
    rpc: "docs/rpc.md",
    sql: "crates/sql/README.md",
    testing: "docs/testing.md",
    wire: "crates/wire/README.md",
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::PAGES;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    #[test]
    fn no_page_of_the_guide_is_left_out() {
        for entry in fs::read_dir(root().join("docs")).expect("there is a guide") {
            let name = entry.expect("it can be read").file_name();
            let path = format!("docs/{}", name.to_string_lossy());
            assert!(PAGES.contains(&path.as_str()), "{path} is not tested");
        }
    }

    #[test]
    fn no_link_leads_nowhere() {
        for page in PAGES {
            let page = root().join(page);
            let text = fs::read_to_string(&page).expect("a page");
            let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            for link in links.filter(|link| !link.contains("://")) {
                // To a heading of the same page.
                if link.starts_with('#') {
                    continue;
                }
                let link = link.split('#').next().unwrap_or(link);
                let target = page.parent().expect("a folder").join(link);
                assert!(target.exists(), "{link} of {}", page.display());
            }
        }
    }
}
