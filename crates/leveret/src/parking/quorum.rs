//! Whether a queue may be a quorum queue. Brokers tell no arguments of queues, but which one differs from what is declared.
//!
//! ```text
//!  declare with a type that there is not --> 406: the type is another one, namely ...
//!          ^                             +-> 406: some other argument is there, with this value
//!          +------------- with it -------------------------+
//! ```
//!
//! No queue is ever made by that, even if it is gone meanwhile: there is no such type.

use crate::amqp::{Channel, QueueOptions, Table, Value};
use crate::client::Client;
use crate::topology::Conflict;

const TYPE: &str = "x-queue-type";
const NO_TYPE: &str = "leveret-asks-for-the-type";

/// How many arguments are gone through: queues have no more of them.
const MAX_ARGUMENTS: usize = 24;

/// Whether it may be one. If it cannot be found out, because this user may not declare it, it may.
pub(super) async fn may_be_quorum(client: &Client, queue: &str, version: (u32, u32)) -> bool {
    let mut arguments = Table::from_pairs([(TYPE, Value::from(NO_TYPE))]).unwrap_or_default();
    for _ in 0..MAX_ARGUMENTS {
        let Some(conflict) = conflict(client, queue, &arguments).await else { return true };
        let name = conflict.argument.as_str();
        match conflict.found.as_str() {
            // From 3.11 on a virtual host may have a type for queues that name none.
            "none" if name == TYPE => return version >= (3, 11),
            found if name == TYPE => return found == "quorum",
            // What is not durable, exclusive or deletes itself is none.
            _ if !name.starts_with("x-") => return false,
            found if arguments.get(name).is_some() || !echo(&mut arguments, name, found) => {
                return true;
            }
            _ => {}
        }
    }
    true
}

/// What the broker finds wrong first.
async fn conflict(client: &Client, queue: &str, arguments: &Table<'static>) -> Option<Conflict> {
    let options =
        QueueOptions { durable: true, arguments: arguments.clone(), ..QueueOptions::default() };
    let declare = move |channel: Channel| {
        let options = options.clone();
        async move {
            match channel.declare_queue(queue, options).await {
                Err(error) if error.is_connection_error() => Err(error),
                Err(error) => Ok(Conflict::read(queue, &error.to_string())),
                Ok(_) => Ok(None),
            }
        }
    };
    client.on_channel("asking for the type of a queue", declare).await.ok().flatten()
}

/// Whether the argument could be added with the value that the broker has.
fn echo(arguments: &mut Table<'static>, name: &str, found: &str) -> bool {
    let added = match found.parse::<i64>() {
        Ok(number) => arguments.insert(name, number),
        Err(_) => match found {
            "true" => arguments.insert(name, true),
            "false" => arguments.insert(name, false),
            text => arguments.insert(name, text),
        },
    };
    added.is_ok()
}
