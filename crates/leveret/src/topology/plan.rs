//! What applying a topology would do, found out without changing anything.
//!
//! The broker is asked for each object whether it is there. If it is, it is declared once more, which changes nothing either: the
//! broker says whether it is the same. Bindings cannot be asked for in AMQP; to make one that is there changes nothing.

use std::collections::HashMap;
use std::fmt;

use super::declare::{Declaring, Naming, Object};
use super::{Destination, Topology};
use crate::amqp::{Channel, Connection, ReplyCode};
use crate::error::{Conflict, Error, ErrorKind};

/// What applying a topology would do. From [`Client::plan`](crate::Client::plan).
#[derive(Clone, Debug)]
pub struct Plan {
    steps: Vec<Step>,
}

/// What would become of one object.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Step {
    /// Which: `queue "billing"`.
    pub object: String,
    /// What would be done.
    pub change: Change,
}

/// What applying a topology would do with one object.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Change {
    /// It is not there, and would be made.
    Create,
    /// It is there, and as it should be.
    Same,
    /// A binding of objects that are there: it would be made, or is there already. AMQP has no way to ask.
    Bind,
    /// It is there with other parameters, and would stay as it is.
    Conflict(Conflict),
    /// The broker would refuse it, for this reason.
    Refused(Error),
}

impl Plan {
    /// The objects, in the order in which they are declared.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Whether everything can be applied.
    pub fn is_possible(&self) -> bool {
        self.steps
            .iter()
            .all(|step| !matches!(step.change, Change::Conflict(_) | Change::Refused(_)))
    }

    pub(crate) async fn make(connection: &Connection, topology: &Topology) -> Result<Plan, Error> {
        let mut planning = Planning {
            connection,
            channel: None,
            declaring: Declaring::new(connection, Default::default(), Naming::Anew),
            known: HashMap::new(),
            steps: Vec::new(),
        };
        for exchange in topology.exchanges() {
            planning.plan(Object::Exchange(exchange), exchange.name()).await?;
        }
        for queue in topology.queues() {
            match queue.is_named_by_broker() {
                true => {
                    planning.known.insert(("queue", queue.name().to_owned()), Known::New);
                    planning.add(Object::Queue(queue), Change::Create);
                }
                false => planning.plan(Object::Queue(queue), queue.name()).await?,
            }
        }
        for binding in topology.bindings() {
            let (kind, name) = match binding.destination() {
                Destination::Queue(name) => ("queue", name),
                Destination::Exchange(name) => ("exchange", name),
            };
            let mut change = Change::Bind;
            for (kind, name) in [("exchange", binding.source()), (kind, name)] {
                match planning.knows(kind, name).await? {
                    Known::There => {}
                    Known::New => change = Change::Create,
                    Known::Nowhere(error) => {
                        change = Change::Refused(error);
                        break;
                    }
                }
            }
            planning.add(Object::Binding(binding), change);
        }
        planning.declaring.finish().await;
        Ok(Plan { steps: planning.steps })
    }
}

/// What is known of an exchange or queue that bindings may name.
#[derive(Clone)]
enum Known {
    There,
    /// It is part of the topology, and would be made.
    New,
    /// A binding cannot be made.
    Nowhere(Error),
}

struct Planning<'a> {
    connection: &'a Connection,
    /// To ask on. The broker closes it when something is not there.
    channel: Option<Channel>,
    declaring: Declaring<'a>,
    known: HashMap<(&'static str, String), Known>,
    steps: Vec<Step>,
}

impl Planning<'_> {
    async fn plan(&mut self, object: Object<'_>, name: &str) -> Result<(), Error> {
        let kind = if matches!(object, Object::Queue(_)) { "queue" } else { "exchange" };
        let change = match self.is_there(object, name).await {
            Ok(true) => match self.declaring.declare(object).await {
                Ok(_) => Change::Same,
                Err(error) => refused(error),
            },
            Ok(false) => Change::Create,
            Err(error) => refused(error),
        };
        let known = if matches!(change, Change::Create) { Known::New } else { Known::There };
        self.known.insert((kind, name.to_owned()), known);
        let is_lost = matches!(&change, Change::Refused(error) if error.kind() == ErrorKind::Lost);
        if is_lost || !self.connection.is_usable() {
            let text = "the connection was lost while the topology was planned";
            return Err(Error::new(ErrorKind::Lost, text));
        }
        self.add(object, change);
        Ok(())
    }

    /// What becomes of an end of a binding: part of the topology, or on the broker, or nowhere.
    async fn knows(&mut self, kind: &'static str, name: &str) -> Result<Known, Error> {
        let key = (kind, name.to_owned());
        if let Some(known) = self.known.get(&key) {
            return Ok(known.clone());
        }
        let known = match self.finds(kind, name).await {
            Ok(true) => Known::There,
            Ok(false) => Known::Nowhere(Error::new(
                ErrorKind::Missing,
                format!("there is no {kind} {name:?}, on the broker or in this topology"),
            )),
            Err(error) if error.kind() == ErrorKind::Lost => return Err(error),
            Err(error) => Known::Nowhere(error),
        };
        self.known.insert(key, known.clone());
        Ok(known)
    }

    async fn is_there(&mut self, object: Object<'_>, name: &str) -> Result<bool, Error> {
        let kind = if matches!(object, Object::Queue(_)) { "queue" } else { "exchange" };
        self.finds(kind, name).await
    }

    async fn finds(&mut self, kind: &str, name: &str) -> Result<bool, Error> {
        let what = || format!("cannot inspect {kind} {name:?}");
        let channel = match self.channel.take() {
            Some(channel) => channel,
            None => {
                let opened = self.connection.open_channel().await;
                opened.map_err(|error| Error::from_amqp(what(), error))?
            }
        };
        let answer = match kind {
            "queue" => channel.inspect_queue(name).await.map(drop),
            _ => channel.inspect_exchange(name).await,
        };
        match answer {
            Ok(()) => {
                self.channel = Some(channel);
                Ok(true)
            }
            Err(error) if error.reply_code() == Some(ReplyCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(Error::from_amqp(what(), error)),
        }
    }

    fn add(&mut self, object: Object<'_>, change: Change) {
        self.steps.push(Step { object: object.to_string(), change });
    }
}

fn refused(error: Error) -> Change {
    match error.conflicts() {
        [conflict, ..] => Change::Conflict(conflict.clone()),
        [] => Change::Refused(error),
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.change {
            Change::Create => write!(f, "create    {}", self.object),
            Change::Same => write!(f, "same      {}", self.object),
            Change::Bind => write!(f, "bind      {}", self.object),
            Change::Conflict(conflict) => write!(f, "conflict  {conflict}"),
            Change::Refused(error) => write!(f, "refused   {}: {error}", self.object),
        }
    }
}
