//! Messages that are written down with the changes they tell of, and sent once those are committed.
//!
//! ```text
//!  application's transaction: its own changes, and outbox.publish(…) --> a row in {outbox}
//!                                                                           |  committed
//!  Relay: lanes taken --> rows, in order --> published, confirmed --> rows deleted, lanes given back
//! ```

mod aside;
mod row;
pub(crate) mod store;

use std::time::Duration;

use leveret::{Client, IntoMessage};
use sqlx::{Connection, Database, Pool};

pub use aside::{Aside, SetAside};
pub use row::Outgoing;

use crate::dialect::{BuiltIn, Dialect, NewRow};
use crate::error::Error;
use crate::relay::RelayBuilder;
use crate::schema::Schema;
use store::store;

/// Messages that are sent if, and only if, the transaction is committed that they were written in.
///
/// A [`relay`](Self::relay) sends them: at least once each, so a consumer may see one twice, with the same message id. The
/// outbox clones cheaply, and has no connection of its own.
///
/// SQLite lets one transaction at a time write, and relays write, too. One that reads before it writes should begin with
/// `pool.begin_with("BEGIN IMMEDIATE")`: otherwise it fails if somebody else has written in between.
///
/// ```
/// use leveret::{Client, Queue, Topology};
/// use leveret_sql::{Outbox, Outgoing, Schema};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Any pool of the application's; Schema::default().migrate(&pool) at its start.
/// let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// Schema::default().migrate(&pool).await?;
/// sqlx::query("CREATE TABLE orders (number INTEGER)").execute(&pool).await?;
///
/// let outbox = Outbox::default();
/// let mut transaction = pool.begin().await?;
/// sqlx::query("INSERT INTO orders VALUES (7)").execute(&mut *transaction).await?;
/// outbox.publish(&mut *transaction, "", "billing", "order 7").await?;
/// // Messages with the same key are sent in the order in which they were written, one after the other.
/// let paid = Outgoing::new("", "billing", "order 7 is paid").ordered_by("order 7");
/// outbox.write(&mut *transaction, paid).await?;
/// transaction.commit().await?;
///
/// // In every instance of the program, or in a program of its own: whoever is there does the work.
/// let client = Client::embedded().await?;
/// client.apply(&Topology::new().queue(Queue::quorum("billing"))).await?;
/// let relay = outbox.relay(&client, &pool).build().await?;
/// let summary = relay.drain().await?; // or relay.run_until(stop), which goes on
/// assert_eq!(summary.sent, 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Outbox<L = BuiltIn> {
    schema: Schema<L>,
    notify: bool,
}

impl<L> Outbox<L> {
    /// The one in this schema.
    pub fn new(schema: Schema<L>) -> Self {
        Outbox { schema, notify: true }
    }

    /// Relays are not told of new messages, and find them when they look, by default once a second.
    ///
    /// PostgreSQL lets only one transaction at a time commit that tells others of something (`NOTIFY`). With thousands of commits
    /// a second that may be what they wait for.
    #[must_use]
    pub fn without_notify(mut self) -> Self {
        self.notify = false;
        self
    }

    /// The schema it is in.
    pub fn schema(&self) -> &Schema<L> {
        &self.schema
    }

    /// Writes down a message to be published to an exchange. The connection is that of the transaction: `&mut *transaction`.
    ///
    /// It gets an id now, unless it has one, and belongs to the trace that the caller is in.
    pub async fn publish<C>(
        &self,
        connection: &mut C,
        exchange: &str,
        routing_key: &str,
        message: impl IntoMessage,
    ) -> Result<(), Error>
    where
        C: Connection<Database: Database<Connection = C>>,
        L: Dialect<C::Database>,
    {
        self.write(connection, Outgoing::new(exchange, routing_key, message)).await
    }

    /// Writes down a message with what else there is to say of it.
    pub async fn write<C>(&self, connection: &mut C, outgoing: Outgoing) -> Result<(), Error>
    where
        C: Connection<Database: Database<Connection = C>>,
        L: Dialect<C::Database>,
    {
        self.write_all(connection, [outgoing]).await
    }

    /// Writes down many messages, in order: at once on PostgreSQL.
    pub async fn write_all<C>(
        &self,
        connection: &mut C,
        outgoing: impl IntoIterator<Item = Outgoing>,
    ) -> Result<(), Error>
    where
        C: Connection<Database: Database<Connection = C>>,
        L: Dialect<C::Database>,
    {
        let rows: Result<Vec<NewRow>, Error> =
            outgoing.into_iter().map(Outgoing::into_row).collect();
        let (rows, tables) = (rows?, self.schema.tables());
        let written = self.schema.dialect().write(connection, tables, &rows, self.notify).await;
        written.map_err(|error| self.failed("writing a message", error))
    }

    /// A relay that sends what is written here.
    pub fn relay<DB: Database>(&self, client: &Client, pool: &Pool<DB>) -> RelayBuilder
    where
        L: Dialect<DB>,
    {
        RelayBuilder::new(client.clone(), store(pool, &self.schema))
    }

    /// The messages that could not be sent.
    pub fn aside<DB: Database>(&self, pool: &Pool<DB>) -> Aside
    where
        L: Dialect<DB>,
    {
        Aside::new(store(pool, &self.schema), self.notify)
    }

    /// How much there is to be sent. It counts rows, so it takes the longer the more there are.
    pub async fn backlog<DB: Database>(&self, pool: &Pool<DB>) -> Result<Backlog, Error>
    where
        L: Dialect<DB>,
    {
        let backlog = self.schema.dialect().backlog(pool, self.schema.tables()).await;
        backlog.map_err(|error| self.failed("counting the messages", error))
    }

    fn failed(&self, what: &str, error: sqlx::Error) -> Error {
        failed(what, self.schema.name(), error)
    }
}

impl Default for Outbox {
    fn default() -> Self {
        Outbox::new(Schema::default())
    }
}

/// How much an outbox holds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Backlog {
    /// Messages that are to be sent.
    pub waiting: u64,
    /// Those among them that the broker has refused at least once.
    pub refused: u64,
    /// Messages that are no longer tried.
    pub set_aside: u64,
    /// How long the oldest one has been waiting.
    pub oldest: Option<Duration>,
}

fn failed(what: &str, schema: &str, error: sqlx::Error) -> Error {
    Error::database(format!("{what} of the outbox in schema {schema:?}"), error)
}

/// A time from the past, in seconds, which clocks that are set may make negative.
pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
