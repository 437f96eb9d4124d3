//! Whether a queue may be a quorum queue, or deletes itself. Brokers tell no arguments of queues, but which one differs from what is declared.
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

/// What matters about a queue to who looks into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    MayBeQuorum,
    /// It is gone with its last consumer, and its messages with it.
    DeletesItself,
    Other,
}

/// What kind of queue it is. If that cannot be found out, because this user may not declare it, it may be a quorum queue.
pub(super) async fn kind_of(client: &Client, queue: &str, version: (u32, u32)) -> Kind {
    let arguments = Table::from_pairs([(TYPE, Value::from(NO_TYPE))]).unwrap_or_default();
    let mut options = QueueOptions { durable: true, arguments, ..QueueOptions::default() };
    for _ in 0..MAX_ARGUMENTS {
        let Some(conflict) = conflict(client, queue, &options).await else {
            return Kind::MayBeQuorum;
        };
        let name = conflict.argument.as_str();
        let is_quorum = match conflict.found.as_str() {
            // From 3.11 on a virtual host may have a type for queues that name none.
            "none" if name == TYPE => options.durable && version >= (3, 11),
            found if name == TYPE => found == "quorum",
            "true" if name == "auto_delete" => return Kind::DeletesItself,
            "false" if name == "durable" && options.durable => {
                options.durable = false;
                continue;
            }
            _ if !name.starts_with("x-") => false,
            // Only classic queues have it.
            _ if name == "x-max-priority" => false,
            // Told already, and still not alike.
            _ if options.arguments.get(name).is_some() => true,
            found if echo(&mut options.arguments, name, found) => continue,
            _ => true,
        };
        return if is_quorum { Kind::MayBeQuorum } else { Kind::Other };
    }
    Kind::MayBeQuorum
}

/// What the broker finds wrong first.
async fn conflict(client: &Client, queue: &str, options: &QueueOptions) -> Option<Conflict> {
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
