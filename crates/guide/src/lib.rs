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

        /// Every page of the guide is in the list.
        #[test]
        fn no_page_is_left_out() {
            let listed = [$($path),*];
            let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
            for entry in std::fs::read_dir(docs).expect("there is a guide") {
                let name = entry.expect("it can be read").file_name();
                let path = format!("docs/{}", name.to_string_lossy());
                let is_page = path.ends_with(".md");
                assert!(!is_page || listed.contains(&path.as_str()), "{path} is not tested");
            }
        }
    };
}

pages! {
    consume: "docs/consume.md",
    delay: "docs/delay.md",
    events: "docs/events.md",
    exactly_once: "docs/exactly-once.md",
    failover: "docs/failover.md",
    migrating: "docs/migrating.md",
    operations: "docs/operations.md",
    park_and_replay: "docs/park-and-replay.md",
    publish: "docs/publish.md",
    readme: "docs/README.md",
    retry: "docs/retry.md",
    rpc: "docs/rpc.md",
    testing: "docs/testing.md",
}
