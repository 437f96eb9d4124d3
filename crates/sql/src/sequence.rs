//! Counting the messages of a sender in the application's database.

use std::fmt;
use std::sync::Arc;

use leveret::inbox::{Doing, KeepNumbers, Numbers, numbered};
use leveret::{IntoMessage, Message};
use sqlx::{Connection, Database, Pool};

use crate::dialect::{BuiltIn, Dialect, SequenceNumbers};
use crate::error::Error;
use crate::schema::Schema;

/// Numbers the messages of a sender from 1 on, so that whoever gets them needs to remember no more than a
/// [mark](leveret::inbox::Remember::high_water). What was used is in the database, and no number is given out twice, whatever ends
/// or starts again.
///
/// With an [`Outbox`](crate::Outbox), numbers are taken in the transaction that the messages are written in. Then there are no gaps:
/// what is rolled back has used none.
///
/// ```
/// use leveret_sql::{Outbox, Schema, Sequence};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?; // or a PgPool
/// Schema::default().migrate(&pool).await?;
/// let jobs = Sequence::new("shop 1");
///
/// let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
/// let message = jobs.stamp(&mut *transaction, "first").await?;
/// Outbox::default().publish(&mut *transaction, "", "jobs", message).await?;
/// transaction.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// Transactions that number messages of one sender wait for each other, from the first number to the commit. Where messages
/// are published without an outbox, or that takes too long, numbers are [reserved ahead](Self::ahead).
#[derive(Clone)]
pub struct Sequence<L = BuiltIn> {
    sender: Arc<str>,
    schema: Schema<L>,
}

impl Sequence {
    /// Counts for a sender of this name, in the default [`Schema`]. Names are unique among all that send to a queue.
    pub fn new(sender: impl Into<String>) -> Self {
        Sequence::in_schema(sender, &Schema::default())
    }
}

impl<L: Clone> Sequence<L> {
    /// The same in another schema.
    pub fn in_schema(sender: impl Into<String>, schema: &Schema<L>) -> Self {
        Sequence { sender: sender.into().into(), schema: schema.clone() }
    }

    /// The sender's name.
    pub fn sender(&self) -> &str {
        &self.sender
    }

    /// Gives a message the next number, with this sender, and where it has none an id and a timestamp. The connection is that of a
    /// transaction, in which the message is written into an outbox: `&mut *transaction`.
    pub async fn stamp<C>(
        &self,
        connection: &mut C,
        message: impl IntoMessage,
    ) -> Result<Message, Error>
    where
        C: Connection<Database: Database<Connection = C>>,
        L: Dialect<C::Database>,
    {
        let mut stamped = self.stamp_all(connection, [message]).await?;
        Ok(stamped.remove(0))
    }

    /// The same for several, in order and with one statement.
    pub async fn stamp_all<C, M: IntoMessage>(
        &self,
        connection: &mut C,
        messages: impl IntoIterator<Item = M>,
    ) -> Result<Vec<Message>, Error>
    where
        C: Connection<Database: Database<Connection = C>>,
        L: Dialect<C::Database>,
    {
        // What is wrong with them shows before a number is taken.
        let messages: Result<Vec<Message>, _> =
            messages.into_iter().map(IntoMessage::into_message).collect();
        let messages = messages.map_err(|error| Error::broker(format!("{self:?}"), error))?;
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let count = signed(messages.len() as u64);
        let taken = self.schema.dialect().take_numbers(
            connection,
            self.schema.tables(),
            &self.sender,
            count,
        );
        let next = taken.await.map_err(|error| self.failed("taking a number", error))?;
        let first = unsigned(next - count);
        let numbered = |(message, number)| self.numbered(message, number);
        messages.into_iter().zip(first..).map(numbered).collect()
    }

    fn numbered(&self, message: Message, number: u64) -> Result<Message, Error> {
        let numbered = numbered(message, &self.sender, number);
        numbered.map_err(|error| Error::broker(format!("message {number} of {self:?}"), error))
    }

    /// Numbers for messages that are published without an outbox: a thousand at a time are reserved, each time by a
    /// transaction of its own. A program that ends without closing it does not know how many of them it has used; whoever counts
    /// next goes on behind them, and they are [uncertain](leveret::inbox::Sequence::uncertain).
    ///
    /// One at a time counts for a sender: who is there already goes on until what it has reserved is used up, and then
    /// fails.
    ///
    /// ```
    /// # use leveret::{Client, Queue, Topology};
    /// # use leveret_sql::{Schema, Sequence};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # Schema::default().migrate(&pool).await?;
    /// # let client = Client::embedded().await?;
    /// # client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
    /// # let publisher = client.publisher("").build().await?;
    /// let jobs = Sequence::new("shop 1").ahead(&pool).await?;
    /// let message = jobs.stamp("first").await?; // the same message may be sent again, and is then a copy
    /// publisher.publish("jobs", message).await?;
    /// jobs.close().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ahead<DB: Database>(
        &self,
        pool: &Pool<DB>,
    ) -> Result<leveret::inbox::Sequence, Error>
    where
        L: Dialect<DB>,
    {
        let (holder, tables) = (crate::unique_name(), self.schema.tables());
        let held = self.schema.dialect().hold_numbers(pool, tables, &self.sender, &holder).await;
        let held = held.map_err(|error| self.failed("taking over", error))?;
        let numbers = Numbers { next: unsigned(held.next), reserved: unsigned(held.reserved) };
        let keeper = Keeper { sequence: self.clone(), pool: pool.clone(), holder };
        Ok(leveret::inbox::Sequence::kept_by(self.sender(), numbers, keeper))
    }

    fn failed(&self, what: &str, error: sqlx::Error) -> Error {
        Error::database(format!("{what} of {self:?}"), error)
    }
}

impl<L> fmt::Debug for Sequence<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sequence({:?})", self.sender)
    }
}

/// There are no negative numbers in the table.
fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Notes what is reserved, as long as there is no other holder.
struct Keeper<DB: Database, L> {
    sequence: Sequence<L>,
    pool: Pool<DB>,
    holder: String,
}

impl<DB: Database, L: Dialect<DB>> KeepNumbers for Keeper<DB, L> {
    fn write(&self, numbers: Numbers) -> Doing<'_, ()> {
        let Keeper { sequence: Sequence { sender, schema }, pool, holder } = self;
        let Numbers { next, reserved } = numbers;
        let numbers = SequenceNumbers { next: signed(next), reserved: signed(reserved) };
        Box::pin(async move {
            match schema
                .dialect()
                .keep_numbers(pool, schema.tables(), sender, holder, numbers)
                .await?
            {
                true => Ok(()),
                false => {
                    Err(format!("somebody else counts for the sender {sender:?} by now").into())
                }
            }
        })
    }
}
