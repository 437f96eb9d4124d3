//! The program, and a broker for it: the program's own, or RabbitMQ.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use leveret::{Client, Topology};
use leveret_testkit::eventually;
use leveret_testkit::rabbitmq::{self, Vhost};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;

/// A broker of a test's own.
pub(crate) struct Place {
    url: String,
    /// What ends with it.
    _broker: Broker,
}

enum Broker {
    Program { _child: Killed },
    RabbitMq { _vhost: Vhost },
}

/// A process that ends with the test.
pub(crate) struct Killed(pub(crate) Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a command said, and how it ended.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) status: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let status = output.status.code().unwrap_or(-1);
        Said { status, out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Said {
    /// What it said, if all went well.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.status, 0, "{self:?}");
        self.out
    }

    /// What it said, line by line.
    #[track_caller]
    pub(crate) fn json(self) -> Vec<Value> {
        self.ok().lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }
}

/// The program with these arguments, and nothing from the environment that would change what it does.
pub(crate) fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leveret"));
    command.args(arguments).env_remove("LEVERET_URL").stdin(Stdio::null());
    command
}

/// Runs it to its end.
pub(crate) fn leveret(arguments: &[&str]) -> Said {
    program(arguments).output().expect("the program runs").into()
}

/// Runs a command on a pseudo-terminal, answers it, and gives what was shown.
pub(crate) fn on_a_terminal(mut command: Command, answer: &str) -> (String, i32) {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
    let other_end = || File::options().read(true).write(true).open(&name).unwrap();
    let (stdin, stdout, stderr) = (other_end(), other_end(), other_end());
    let child = command.stdin(stdin).stdout(stdout).stderr(stderr).spawn().unwrap();
    // Its ends of the terminal are the child's alone, so that reading ends with it.
    drop(command);
    let mut child = Killed(child);
    let mut terminal = File::from(terminal);
    terminal.write_all(answer.as_bytes()).unwrap();
    let mut shown = Vec::new();
    // A terminal whose other end is gone reports an error, which is its end.
    let _ = terminal.read_to_end(&mut shown);
    let status = child.0.wait().unwrap().code().unwrap();
    (String::from_utf8_lossy(&shown).into_owned(), status)
}

impl Place {
    pub(crate) async fn new() -> Place {
        if crate::ON_RABBITMQ {
            let vhost = rabbitmq::vhost().await;
            return Place { url: vhost.url(), _broker: Broker::RabbitMq { _vhost: vhost } };
        }
        let mut command = program(&["broker", "--listen", "127.0.0.1:0"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut child = Killed(child.expect("the program runs"));
        let out = child.0.stdout.take().expect("it is piped");
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).expect("it says where it listens");
        let address = line.strip_prefix("listening on ").and_then(|rest| rest.split(',').next());
        let url = format!("amqp://{}", address.expect("it says where it listens"));
        Place { url, _broker: Broker::Program { _child: child } }
    }

    /// A broker with these objects, and a client.
    pub(crate) async fn with(topology: Topology) -> (Place, Client) {
        let place = Place::new().await;
        let client = place.client().await;
        client.apply(&topology).await.expect("the broker takes them");
        (place, client)
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The program, to work on this broker.
    pub(crate) fn program(&self, arguments: &[&str]) -> Command {
        let mut command = program(arguments);
        command.env("LEVERET_URL", &self.url);
        command
    }

    /// Runs a command here.
    pub(crate) fn run(&self, arguments: &[&str]) -> Said {
        self.program(arguments).output().expect("the program runs").into()
    }

    /// The same, with something to read.
    pub(crate) fn run_with_input(&self, arguments: &[&str], input: &str) -> Said {
        let mut command = self.program(arguments);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().expect("the program runs");
        let mut stdin = child.stdin.take().expect("it is piped");
        stdin.write_all(input.as_bytes()).expect("it reads");
        drop(stdin);
        child.wait_with_output().expect("it ends").into()
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.url).await.expect("the broker is there")
    }

    /// Waits until a queue has so many messages.
    pub(crate) async fn until_has(&self, client: &Client, queue: &str, messages: u32) {
        eventually(Duration::from_secs(60), format!("{messages} messages in {queue}"), || async {
            match client.inspect_queue(queue).await {
                Ok(info) if info.messages == messages => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }
}
