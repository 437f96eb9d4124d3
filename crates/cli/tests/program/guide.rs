//! The guide's files and commands, as they are written there.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use leveret::{Queue, Topology};
use leveret_testkit::eventually;

use crate::support::{Killed, Place, Said, program};

/// A fenced block of a page.
struct Block {
    /// `toml`, `sh`.
    language: String,
    /// What is said before it: `` `shop.toml`: ``.
    before: String,
    text: String,
}

impl Block {
    /// The name of the file that it is to be saved as.
    fn file(&self) -> Option<&str> {
        self.before.rsplit(' ').find(|word| word.contains('`'))?.split('`').nth(1)
    }
}

fn without_comment(line: &str) -> &str {
    line.split(" #").next().unwrap_or_default()
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn blocks(page: &str) -> Vec<Block> {
    let (mut blocks, mut before, mut open) = (Vec::new(), String::new(), None::<Block>);
    for line in page.lines() {
        match (line.strip_prefix("```"), open.take()) {
            (Some(_), Some(block)) => blocks.push(block),
            (Some(language), None) => {
                let language = language.to_owned();
                open = Some(Block { language, before: before.clone(), text: String::new() });
            }
            (None, Some(mut block)) => {
                block.text.push_str(line);
                block.text.push('\n');
                open = Some(block);
            }
            (None, None) if !line.is_empty() => before = line.to_owned(),
            (None, None) => {}
        }
    }
    blocks
}

/// The blocks in these languages, with the names of the files that they are; those that have none get one.
fn files(blocks: &[Block], languages: &[&str]) -> Vec<(String, String)> {
    let chosen = blocks.iter().filter(|block| languages.contains(&block.language.as_str()));
    let named = chosen.enumerate().map(|(number, block)| {
        let name = block.file().map(str::to_owned);
        (name.unwrap_or_else(|| format!("block-{number}.{}", block.language)), block.text.clone())
    });
    named.collect()
}

#[test]
fn every_file_in_the_guide_is_right() {
    let mut checked = 0;
    for entry in fs::read_dir(docs()).unwrap() {
        let path = entry.unwrap().path();
        let page = fs::read_to_string(&path).unwrap();
        let folder = tempfile::tempdir().unwrap();
        // One may name another, and the programs of the page.
        let programs = files(&blocks(&page), &["bash"]);
        for (name, text) in files(&blocks(&page), &["toml", "yaml"]).into_iter().chain(programs) {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        for (name, text) in files(&blocks(&page), &["toml", "yaml"]) {
            // This one is a part of a Cargo.toml.
            if text.contains("dependencies]") {
                continue;
            }
            let arguments = match text.contains("consumer") || text.contains("service") {
                true => ["run", &name, "--check"],
                false => ["topology", "graph", &name],
            };
            let output = program(&arguments).current_dir(folder.path()).output();
            let said = Said::from(output.unwrap());
            assert_eq!(said.status, 0, "{name} of {}: {said:?}", path.display());
            checked += 1;
        }
    }
    assert!(checked >= 4, "the guide has only {checked} files");
}

/// A terminal in a folder, in which `leveret` is the program and the broker is this test's.
struct Terminal<'a> {
    place: &'a Place,
    folder: tempfile::TempDir,
}

impl<'a> Terminal<'a> {
    /// With the files of the page on operations.
    fn new(place: &'a Place) -> Terminal<'a> {
        let folder = tempfile::tempdir().unwrap();
        let page = fs::read_to_string(docs().join("operations.md")).unwrap();
        for (name, text) in files(&blocks(&page), &["toml", "bash"]) {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let bin = folder.path().join("bin");
        fs::create_dir(&bin).unwrap();
        symlink(env!("CARGO_BIN_EXE_leveret"), bin.join("leveret")).unwrap();
        Terminal { place, folder }
    }

    /// Has `cargo run --release --` be the program, which is built already.
    fn with_cargo(self) -> Terminal<'a> {
        let cargo = self.folder.path().join("bin/cargo");
        let script = "#!/bin/sh\n[ \"$1 $2 $3\" = 'run --release --' ] || exit 99\nshift 3\nexec leveret \"$@\"\n";
        fs::write(&cargo, script).unwrap();
        fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    fn shell(&self, line: &str) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(self.folder.path()).stdin(Stdio::null());
        command.env("PATH", format!("{}:{path}", self.folder.path().join("bin").display()));
        command.env("LEVERET_URL", self.place.url());
        command
    }

    fn run(&self, line: &str) {
        let mut said = Said::from(self.shell(line).output().unwrap());
        // On a broker that counts returns the program says what to add.
        let flag = "--allow-counted-returns";
        if said.status == 77 && said.err.contains(flag) {
            let line = format!("{} {flag}", without_comment(line));
            said = Said::from(self.shell(&line).output().unwrap());
        }
        assert_eq!(said.status, 0, "{line}: {said:?}");
    }

    /// Starts what goes on, and waits until it says so. It listens where nobody else does.
    fn start(&self, line: &str, begin: &str) -> Killed {
        let line = format!("exec {} 2>&1", without_comment(line).replace(":9000", ":0"));
        let mut child = Killed(self.shell(&line).stdout(Stdio::piped()).spawn().unwrap());
        let mut said = BufReader::new(child.0.stdout.take().unwrap()).lines();
        assert!(said.any(|line| line.unwrap().starts_with(begin)), "{line}: it does not run");
        child
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_page_on_operations_do_what_it_says() {
    let page = fs::read_to_string(docs().join("operations.md")).unwrap();
    let blocks = blocks(&page);
    let place = Place::new().await;
    let client = place.client().await;
    let terminal = Terminal::new(&place);
    let mut running = None;
    let lines =
        blocks.iter().filter(|block| block.language == "sh").flat_map(|block| block.text.lines());
    for line in lines {
        if line.starts_with("leveret run ") && line.contains("--listen") {
            running = Some(terminal.start(line, "running: "));
            // It declares what it needs when it has said so.
            for queue in ["billing.parked", "shout"] {
                place.until_has(&client, queue, 0).await;
            }
            continue;
        }
        if line.starts_with("leveret get ") {
            // What a person would see before they look.
            place.until_has(&client, "billing.parked", 1).await;
        }
        terminal.run(line);
    }
    assert!(running.is_some(), "the page runs a service");

    let bills = eventually(Duration::from_secs(60), "three bills", || async {
        let bills = terminal.read("bills.txt");
        (bills.lines().count() >= 3).then_some(bills)
    })
    .await;
    for bill in [
        r#"billed order.created: {"number": 1}, attempt 1"#,
        r#"billed order.created: {"number": 2, "card": "good"}, attempt 1"#,
        r#"billed billing: {"number": 3}, attempt 1"#,
    ] {
        assert!(bills.contains(bill), "{bill} is not in {bills}");
    }
    assert!(terminal.read("topology.svg").contains("<svg"));
    assert_eq!(terminal.read("parked.jsonl").lines().count(), 1);
    assert_eq!(client.inspect_queue("billing.parked").await.unwrap().messages, 0);
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_readme_are_as_they_are_written() {
    let readme = fs::read_to_string(docs().join("../README.md")).unwrap();
    let place = Place::new().await;
    let client = place.client().await;
    let terminal = Terminal::new(&place).with_cargo();
    terminal.run("chmod +x bill");
    // What it takes for granted.
    let lot = Queue::quorum("jobs.parked").argument("x-delivery-limit", 1_000_000_000i64);
    client.apply(&Topology::new().queue(lot)).await.unwrap();
    let prices = "[[service]]\nname = \"prices\"\ncommand = [\"echo\", \"142.5\"]\n";
    fs::write(terminal.folder.path().join("prices.toml"), prices).unwrap();
    let mut running = vec![terminal.start("leveret run prices.toml", "running: ")];

    let all = blocks(&readme);
    let lines =
        all.iter().filter(|block| block.language == "sh").flat_map(|block| block.text.lines());
    let mut run = 0;
    for line in lines {
        // The program of the tests is built already, with all features.
        let line = &line.replace(" --features demo-bank", "");
        let words: Vec<&str> = line.split_whitespace().collect();
        match &words[..] {
            ["cargo", "run", "--release", "--", command, ..] => {
                match *command {
                    // These go on until they are stopped. Another one may have the broker's usual port.
                    "broker" => {
                        let line = format!("{} --listen 127.0.0.1:0", without_comment(line));
                        running.push(terminal.start(&line, "listening on "));
                    }
                    // As it is written, but for its size: this is no release build, and not alone on the machine.
                    "demo" => terminal.run(&format!("{} --messages 2000", without_comment(line))),
                    "run" => running.push(terminal.start(line, "running: ")),
                    "tail" => {
                        running.push(terminal.start(line, "leveret: listening"));
                    }
                    _ => terminal.run(line),
                }
                run += 1;
            }
            // These need a build, or servers; they are run elsewhere.
            ["cargo", "run", "--release", "-p", "leveret-bench", ..] | ["./test", ..] => {}
            _ => panic!("what is {line:?}?"),
        }
    }
    assert!(run >= 10, "the README has only {run} commands");
    client.close().await;
}
