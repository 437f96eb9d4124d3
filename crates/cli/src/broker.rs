//! `leveret broker`: the embedded broker on a port.

mod file;
mod rates;

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use leveret_broker::{Broker, Profile};
use tokio::time::timeout;

use crate::failure::Failure;
use crate::output::say;
use crate::signals::{self, GRACE, Signals};
use file::{Definitions, User};
use rates::Rates;

/// Serves AMQP 0-9-1 from memory, as RabbitMQ would, to any client.
///
/// Without users it lets in `guest` with the password `guest`. As with RabbitMQ, `guest` may connect from this machine alone,
/// wherever the broker listens: clients elsewhere need a --user, or `loopback_users = []` in the --file. Nothing is written to
/// disk.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where to listen; may be given more than once. Port 0 has one chosen.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:5672")]
    listen: Vec<String>,

    /// Which RabbitMQ to behave like.
    #[arg(long, value_enum, default_value_t)]
    like: Like,

    /// A user and the password; may be given more than once.
    #[arg(long, value_name = "NAME:PASSWORD")]
    user: Vec<String>,

    /// A virtual host; may be given more than once. `/` if none is given.
    #[arg(long, value_name = "NAME")]
    vhost: Vec<String>,

    /// A TOML or YAML file with users, virtual hosts and permissions, in addition to those given here. Its `loopback_users`
    /// may connect from this machine alone: `["guest"]` unless it says otherwise.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// How much memory messages may take before publishers are stopped, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    memory_limit: usize,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Like {
    #[value(name = "3.10")]
    RabbitMq3_10,
    #[default]
    #[value(name = "4.3")]
    RabbitMq4_3,
}

impl From<Like> for Profile {
    fn from(like: Like) -> Self {
        match like {
            Like::RabbitMq3_10 => Profile::RabbitMq3_10,
            Like::RabbitMq4_3 => Profile::RabbitMq4_3,
        }
    }
}

/// Not by clap, whose error would show the password.
fn parse_user(text: &str) -> Result<User, Failure> {
    match text.split_once(':') {
        Some((name, password)) if !name.is_empty() => Ok(User::new(name, password)),
        _ => Err(Failure::wrong(
            "--user: a name and a password are needed, with a colon between them",
        )),
    }
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let mut definitions = match &arguments.file {
        Some(file) => Definitions::read(file)?,
        None => Definitions::default(),
    };
    let users: Result<_, _> = arguments.user.iter().map(|user| parse_user(user)).collect();
    definitions.add(users?, arguments.vhost);
    let builder = Broker::builder()
        .profile(arguments.like.into())
        .memory_limit(arguments.memory_limit.saturating_mul(1024 * 1024));
    let broker = definitions.give_to(builder)?.start().map_err(Failure::wrong)?;

    signals::enforce_second()?;
    let mut signals = Signals::new()?;
    let mut bound_to = Vec::new();
    for address in &arguments.listen {
        let bound = broker.listen(address).await;
        let bound = bound.map_err(|error| Failure::listening(address, &error))?;
        say(&format!("listening on {bound}, as RabbitMQ {}", broker.profile()));
        bound_to.push(bound);
    }
    if let Some(address) = bound_to.first() {
        let user = definitions.example_user();
        say(&format!("connect to amqp://{user}{address}; stop with Ctrl-C"));
    }
    if bound_to.iter().any(|bound| !bound.ip().is_loopback()) && definitions.are_all_local() {
        say("clients on other machines are refused: add a user for them by --user");
    }

    let rates = io::stderr().is_terminal().then(|| Rates::show(broker.clone()));
    signals.next().await;
    if let Some(rates) = rates {
        rates.stop().await;
    }
    let clients = broker.statistics().connections;
    if clients > 0 {
        say(&format!("stopping: {clients} connections are told"));
    }
    let _ = timeout(GRACE, broker.shutdown()).await;
    let tally = broker.statistics().tally;
    say(&format!(
        "stopped: {} messages published, {} delivered, {} acked",
        tally.published, tally.delivered, tally.acked
    ));
    Ok(())
}
