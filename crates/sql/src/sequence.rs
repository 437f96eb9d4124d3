//! Counting the messages of a sender in the application's database.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use leveret::inbox::{Doing, KeepNumbers, Numbers, numbered};
use leveret::{IntoMessage, Message};
use sqlx::{Pool, SqlStr};

use crate::backend::{Backend, Sealed, unique};
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
pub struct Sequence {
    sender: Arc<str>,
    statements: Arc<Statements>,
}

impl Sequence {
    /// Counts for a sender of this name, in the default [`Schema`]. Names are unique among all that send to a queue.
    pub fn new(sender: impl Into<String>) -> Self {
        Sequence::in_schema(sender, &Schema::default())
    }

    /// The same in another schema.
    pub fn in_schema(sender: impl Into<String>, schema: &Schema) -> Self {
        let statements = Arc::new(Statements::new(schema));
        Sequence { sender: sender.into().into(), statements }
    }

    /// The sender's name.
    pub fn sender(&self) -> &str {
        &self.sender
    }

    /// Gives a message the next number, with this sender, and where it has none an id and a timestamp. The connection is that of a
    /// transaction, in which the message is written into an outbox: `&mut *transaction`.
    pub async fn stamp<C: CountingConnection>(
        &self,
        connection: &mut C,
        message: impl IntoMessage,
    ) -> Result<Message, Error> {
        let mut stamped = self.stamp_all(connection, [message]).await?;
        Ok(stamped.remove(0))
    }

    /// The same for several, in order and with one statement.
    pub async fn stamp_all<C: CountingConnection, M: IntoMessage>(
        &self,
        connection: &mut C,
        messages: impl IntoIterator<Item = M>,
    ) -> Result<Vec<Message>, Error> {
        // What is wrong with them shows before a number is taken.
        let messages: Result<Vec<Message>, _> =
            messages.into_iter().map(IntoMessage::into_message).collect();
        let messages = messages.map_err(|error| Error::broker(format!("{self:?}"), error))?;
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let first = self.take(connection, messages.len()).await?;
        let numbered = |(message, number)| self.numbered(message, number);
        messages.into_iter().zip(first..).map(numbered).collect()
    }

    /// Takes so many numbers, and says the first of them.
    async fn take<C: CountingConnection>(
        &self,
        connection: &mut C,
        count: usize,
    ) -> Result<u64, Error> {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        let next = connection.take_numbers(&self.statements, &self.sender, count).await;
        let next = next.map_err(|error| self.failed("taking a number", error))?;
        Ok(unsigned(next - count))
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
    pub async fn ahead<D: Counting>(
        &self,
        pool: &Pool<D>,
    ) -> Result<leveret::inbox::Sequence, Error> {
        let holder = unique();
        let held = D::hold_numbers(pool, &self.statements, &self.sender, &holder).await;
        let (next, reserved) = held.map_err(|error| self.failed("taking over", error))?;
        let numbers = Numbers { next: unsigned(next), reserved: unsigned(reserved) };
        let keeper = Keeper { sequence: self.clone(), pool: pool.clone(), holder };
        Ok(leveret::inbox::Sequence::kept_by(self.sender(), numbers, keeper))
    }

    fn failed(&self, what: &str, error: sqlx::Error) -> Error {
        Error::database(format!("{what} of {self:?}"), error)
    }
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sequence({:?})", self.sender)
    }
}

/// There are no negative numbers in the table.
fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

/// Writes down what is reserved, as long as nobody else has taken over.
struct Keeper<D: Counting> {
    sequence: Sequence,
    pool: Pool<D>,
    holder: String,
}

impl<D: Counting> KeepNumbers for Keeper<D> {
    fn write(&self, numbers: Numbers) -> Doing<'_, ()> {
        let Keeper { sequence, pool, holder } = self;
        Box::pin(async move {
            let Sequence { sender, statements } = sequence;
            match D::keep_numbers(pool, statements, (sender, holder), numbers).await? {
                1 => Ok(()),
                _ => Err(format!("somebody else counts for the sender {sender:?} by now").into()),
            }
        })
    }
}

#[derive(Debug)]
#[doc(hidden)]
pub struct Statements {
    #[cfg(feature = "postgres")]
    postgres: Texts,
    #[cfg(feature = "sqlite")]
    sqlite: Texts,
}

#[derive(Debug)]
struct Texts {
    take: SqlStr,
    hold: SqlStr,
    keep: SqlStr,
}

/// Behind what is reserved, if anything is: nobody knows what was used of it, and who has reserved it can reserve no more.
const TAKE: &str = "INSERT INTO {sequences} AS s (sender, next, reserved) VALUES ($1, 1 + $2, $2) \
     ON CONFLICT (sender) DO UPDATE SET holder = NULL, \
         next = (CASE WHEN s.next > s.reserved THEN s.next ELSE s.reserved + 1 END) + $2, \
         reserved = (CASE WHEN s.next > s.reserved THEN s.next ELSE s.reserved + 1 END) + $2 - 1 \
     RETURNING next";
const HOLD: &str = "INSERT INTO {sequences} AS s (sender, next, reserved, holder) VALUES ($1, 1, 0, $2) \
     ON CONFLICT (sender) DO UPDATE SET holder = $2 RETURNING next, reserved";
const KEEP: &str =
    "UPDATE {sequences} SET next = $3, reserved = $4 WHERE sender = $1 AND holder = $2";

impl Statements {
    fn new(schema: &Schema) -> Self {
        macro_rules! texts {
            ($name:ident) => {
                Texts {
                    take: schema.$name(TAKE),
                    hold: schema.$name(HOLD),
                    keep: schema.$name(KEEP),
                }
            };
        }
        Statements {
            #[cfg(feature = "postgres")]
            postgres: texts!(postgres),
            #[cfg(feature = "sqlite")]
            sqlite: texts!(sqlite),
        }
    }
}

/// A connection that numbers are taken with: [`sqlx::PgConnection`] and [`sqlx::SqliteConnection`].
pub trait CountingConnection: Sealed + Send {
    /// Says the number after them.
    #[doc(hidden)]
    fn take_numbers<'a>(
        &'a mut self,
        statements: &'a Statements,
        sender: &'a str,
        count: i64,
    ) -> BoxFuture<'a, sqlx::Result<i64>>;
}

/// A database with a table of numbers.
#[doc(hidden)]
pub trait Counting: Backend {
    /// Takes over, and says which numbers were used and which may have been.
    fn hold_numbers<'a>(
        pool: &'a Pool<Self>,
        statements: &'a Statements,
        sender: &'a str,
        holder: &'a str,
    ) -> BoxFuture<'a, sqlx::Result<(i64, i64)>>;

    /// Says how many rows have changed: none, if somebody else has taken over.
    fn keep_numbers<'a>(
        pool: &'a Pool<Self>,
        statements: &'a Statements,
        sender_and_holder: (&'a str, &'a str),
        numbers: Numbers,
    ) -> BoxFuture<'a, sqlx::Result<u64>>;
}

macro_rules! counting {
    ($feature:literal: $database:ty, $connection:ty, $name:ident) => {
        #[cfg(feature = $feature)]
        impl CountingConnection for $connection {
            fn take_numbers<'a>(
                &'a mut self,
                statements: &'a Statements,
                sender: &'a str,
                count: i64,
            ) -> BoxFuture<'a, sqlx::Result<i64>> {
                let take = sqlx::query_scalar(statements.$name.take.clone());
                Box::pin(take.bind(sender).bind(count).fetch_one(self))
            }
        }

        #[cfg(feature = $feature)]
        impl Counting for $database {
            fn hold_numbers<'a>(
                pool: &'a Pool<Self>,
                statements: &'a Statements,
                sender: &'a str,
                holder: &'a str,
            ) -> BoxFuture<'a, sqlx::Result<(i64, i64)>> {
                let hold = sqlx::query_as(statements.$name.hold.clone());
                Box::pin(hold.bind(sender).bind(holder).fetch_one(pool))
            }

            fn keep_numbers<'a>(
                pool: &'a Pool<Self>,
                statements: &'a Statements,
                (sender, holder): (&'a str, &'a str),
                numbers: Numbers,
            ) -> BoxFuture<'a, sqlx::Result<u64>> {
                let signed = |number| i64::try_from(number).unwrap_or(i64::MAX);
                let keep = sqlx::query(statements.$name.keep.clone()).bind(sender).bind(holder);
                let keep = keep.bind(signed(numbers.next)).bind(signed(numbers.reserved));
                Box::pin(async move { Ok(keep.execute(pool).await?.rows_affected()) })
            }
        }
    };
}

counting!("postgres": sqlx::Postgres, sqlx::PgConnection, postgres);
counting!("sqlite": sqlx::Sqlite, sqlx::SqliteConnection, sqlite);
