//! What the compiler says about handlers and arguments that are none: which trait is not implemented helps no one, a sentence does.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use leveret_testkit::ScratchFolder;

/// What is wrong, and what the compiler has to say about it.
const WRONG: &[(&str, &[&str])] = &[
    (
        "fn not_async(consumer: ConsumerBuilder) { let _ = consumer.handle(|body: String| drop(body)); }",
        &["is not a handler", "a handler is an `async fn` with at most 6 arguments"],
    ),
    (
        "async fn wait() {} \
         async fn holds(body: String) { let rc = std::rc::Rc::new(body); wait().await; drop(rc); } \
         fn not_send(consumer: ConsumerBuilder) { let _ = consumer.handle(holds); }",
        &["{holds}` is not a handler", "its future has to be `Send`"],
    ),
    (
        "struct Order; \
         async fn takes(order: Order) { drop(order) } \
         fn plain_argument(consumer: ConsumerBuilder) { let _ = consumer.handle(takes); }",
        &["{takes}` is not a handler", "each of which can be picked from a message: `Json<T>`"],
    ),
    (
        "async fn number() -> u32 { 1 } \
         fn wrong_result(consumer: ConsumerBuilder) { let _ = consumer.handle(number); }",
        &["{number}` is not a handler", "it returns nothing or a `Result<(), E>`"],
    ),
    (
        "struct Quote; \
         async fn quote() -> Quote { Quote } \
         fn wrong_reply(service: ServiceBuilder) { let _ = service.method(\"quote\", quote); }",
        &[
            "{quote}` is not a method of a service",
            "it returns what can be published, as `Json<T>`",
        ],
    ),
    (
        "async fn batch(_: Vec<Incoming>) -> i64 { 1 } \
         fn of_batches(consumer: ConsumerBuilder, o: BatchOptions) { let _ = consumer.handle_batches(o, batch); }",
        &[
            "a handler of batches cannot return `i64`",
            "a `BatchOutcome` with a `Result` for each message",
        ],
    ),
    (
        "async fn no_type(rpc: Rpc) -> Result<(), Error> { rpc.call(\"quote\", \"IBM\").await?; Ok(()) }",
        &["let Json(price): Json<f64> = rpc.call(..).await?"],
    ),
    (
        "struct Parcel; \
         async fn no_message(publisher: Publisher) { let _ = publisher.publish(\"q\", Parcel).await; }",
        &["`Parcel` cannot be published", "a value of your own in `Json(..)`"],
    ),
    (
        "async fn no_url() { let _ = Client::connect(5672_u16).await; }",
        &["`u16` is not the address of a broker", "an address is a URL"],
    ),
];

/// The library as it was built for this test, or a build of another feature set: the sentences are the same.
fn library(folder: &Path) -> PathBuf {
    let files = std::fs::read_dir(folder).expect("the folder of this test").flatten();
    let is_library = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("libleveret-") && name.ends_with(".rlib")
    };
    let built = |path: &PathBuf| path.metadata().and_then(|data| data.modified()).ok();
    let libraries = files.map(|file| file.path()).filter(is_library);
    libraries.max_by_key(|path| built(path).unwrap_or(SystemTime::UNIX_EPOCH)).expect("the library")
}

/// What the compiler says. All that is wrong is in one file: to read the library takes the longest.
fn complaints(source: &str) -> String {
    let scratch = ScratchFolder::new();
    let file = scratch.path().join("wrong.rs");
    std::fs::write(&file, source).expect("a file");
    let program = std::env::current_exe().expect("this program");
    let folder = program.parent().expect("its folder");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(compiler)
        .args(["--edition=2024", "--crate-type=lib", "--emit=metadata", "--color=never"])
        .arg("--out-dir")
        .arg(scratch.path())
        .arg("-L")
        .arg(format!("dependency={}", folder.display()))
        .arg("--extern")
        .arg(format!("leveret={}", library(folder).display()))
        .arg(file)
        .output()
        .expect("the compiler that has built this test");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn check(wrong: &[(&str, &[&str])]) {
    let sources: Vec<_> = wrong.iter().map(|(source, _)| *source).collect();
    let head = "#![allow(dead_code)]\nuse leveret::*;\n";
    let said = complaints(&format!("{head}{}\n", sources.join("\n")));
    for (source, sentences) in wrong {
        for sentence in *sentences {
            assert!(said.contains(sentence), "of {source}, {sentence:?} is not said:\n{said}");
        }
    }
}

#[test]
fn the_compiler_says_what_handlers_and_arguments_have_to_be() {
    check(WRONG);
}
