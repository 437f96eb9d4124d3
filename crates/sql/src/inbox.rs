//! An inbox in the application's database: what handlers change there, and the record that a message was handled, are committed
//! together.

use std::any::TypeId;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leveret::inbox::{Doing, HighWater, Known, Opened, OpenedBatch, Progress, Remember, Unknown};
use leveret::{BoxError, Incoming};
use sha2::{Digest as _, Sha256};
use sqlx::{Pool, Transaction};
use tokio::sync::{Mutex, OnceCell, OwnedMutexGuard};
use tokio::time::timeout;

use crate::error::Error;
use crate::schema::Schema;

mod batch;
mod cleaner;
mod records;
mod trouble;
mod tx;
mod work;

use cleaner::Cleaner;
pub use records::Records;
use records::{Sender, Statements, reply};
pub use tx::Tx;
use work::{Record, SqlWork};

/// Remembers in a database which messages were handled: handlers get a transaction as an argument [`Tx`], and what they change
/// with it, the record of the message, what they put into an outbox, and the reply are committed together, before the message is
/// acked. So the work is done once, wherever the program, the broker or the database breaks. See
/// [`leveret::inbox`] for what that promises, and [`Remember`] for what is remembered.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// use std::time::Duration;
/// use leveret::inbox::Remember;
/// use leveret::{Client, Failure, Json, Message, Queue, Topology};
/// use leveret_sql::{Inbox, Schema, Tx};
/// use sqlx::{Sqlite, SqlitePool};
///
/// async fn deposit(Json(cents): Json<i64>, mut tx: Tx<Sqlite>) -> Result<(), Failure> {
///     sqlx::query("UPDATE account SET cents = cents + ?").bind(cents).execute(&mut *tx).await?;
///     Ok(())
/// }
///
/// # let folder = std::env::temp_dir().join(format!("leveret-sql-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let url = format!("sqlite://{}?mode=rwc", folder.join("bank.db").display());
/// let pool = SqlitePool::connect(&url).await?; // or a PgPool
/// sqlx::raw_sql("CREATE TABLE account (cents INTEGER); INSERT INTO account VALUES (0)").execute(&pool).await?;
/// Schema::default().migrate(&pool).await?;
///
/// let client = Client::embedded().await?;
/// client.apply(&Topology::new().queue(Queue::quorum("deposits"))).await?;
/// let publisher = client.publisher("").build().await?;
/// for _ in 0..3 {
///     publisher.publish("deposits", Message::new("100").message_id("my savings")).await?;
/// }
/// # let (enough, is_enough) = tokio::sync::oneshot::channel::<()>();
/// # let stop = async {
/// #     let _ = is_enough.await;
/// # };
/// # let watched = client.clone();
/// # tokio::spawn(async move {
/// #     while watched.inspect_queue("deposits").await.unwrap().messages > 0 {
/// #         tokio::time::sleep(Duration::from_millis(10)).await;
/// #     }
/// #     tokio::time::sleep(Duration::from_millis(300)).await;
/// #     drop(enough);
/// # });
/// let remember = Remember::ids_for(Duration::from_secs(7 * 86_400));
/// let summary = client
///     .consumer("deposits")
///     .exactly_once(Inbox::new(pool.clone(), remember))
///     .handle(deposit)
///     .run_until(stop)
///     .await?;
/// assert_eq!((summary.handled, summary.duplicates), (1, 2));
/// let cents: i64 = sqlx::query_scalar("SELECT cents FROM account").fetch_one(&pool).await?;
/// assert_eq!(cents, 100);
/// # pool.close().await;
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok(())
/// # }
/// ```
///
/// Each message that is at work has a connection of the pool, so this should have one for each worker. On SQLite, where only one
/// transaction at a time may write, messages are handled one after the other. With
/// [`Remember::high_water`], those of one sender are.
///
/// # Batches
///
/// With [`handle_batches`](leveret::ConsumerBuilder::handle_batches) several messages have one transaction and one commit, which is
/// faster where commits take long. The handler takes its transaction from the batch, with [`Tx::of`], and does the work for all
/// messages, or fails; then each of them is handled again on its own.
///
/// # Expiry
///
/// What has expired is deleted in the background, a little at a time, once a minute.
pub struct Inbox<D: Records>(Arc<Shared<D>>);

pub(crate) struct Shared<D: Records> {
    pool: Pool<D>,
    remember: Remember,
    statements: Statements,
    schema: Schema,
    checked: OnceCell<()>,
    /// Whose turn it is to write, where only one may.
    turn: Option<Arc<Mutex<()>>>,
    cleaner: Cleaner,
}

impl<D: Records> Inbox<D> {
    /// An inbox in the default [`Schema`], whose tables [have been made](Schema::migrate). As long as they are not those of this
    /// version, messages are held.
    pub fn new(pool: Pool<D>, remember: Remember) -> Self {
        Inbox::in_schema(pool, remember, &Schema::default())
    }

    /// The same in another schema.
    pub fn in_schema(pool: Pool<D>, remember: Remember, schema: &Schema) -> Self {
        Inbox(Arc::new(Shared {
            pool,
            remember,
            statements: D::statements(schema),
            schema: schema.clone(),
            checked: OnceCell::new(),
            turn: D::ONE_WRITER.then(Arc::default),
            cleaner: Cleaner::default(),
        }))
    }

    /// Deletes what has expired now, and says how many rows those were. It is done once a minute anyway, as long as messages
    /// come.
    pub async fn clean(&self) -> Result<u64, Error> {
        self.0.clean().await
    }

    /// The mark of a sender whose messages came over a queue, or within a [scope](Remember::scope), as it was last committed.
    pub async fn high_water(&self, scope: &str, sender: &str) -> Result<HighWater, Error> {
        let (Shared { pool, statements, .. }, sender) = (&*self.0, of(scope, sender));
        let found = in_time("looking up a mark of the inbox", D::peek(pool, statements, &sender));
        Ok(found.await?.unwrap_or_default())
    }

    /// Waits no longer for these numbers of a sender, and says which of them were missing. If messages of this sender are at
    /// work, it waits for those; so a handler cannot do this for the sender of its message, and on SQLite for none.
    pub async fn give_up(
        &self,
        scope: &str,
        sender: &str,
        numbers: std::ops::RangeInclusive<u64>,
    ) -> Result<Vec<std::ops::RangeInclusive<u64>>, Error> {
        let Shared { statements, .. } = &*self.0;
        let changed = async {
            let (mut transaction, _turn) = self.0.begin().await?;
            let sender = of(scope, sender);
            let mut mark = self.0.mark(&mut transaction, &sender).await?;
            let missing = mark.give_up(numbers);
            D::set_mark(&mut transaction, statements, &sender, &mark).await?;
            transaction.commit().await?;
            Ok(missing)
        };
        in_time("giving up numbers of the inbox", changed).await
    }
}

/// What messages are known by is kept up to this many bytes. Message ids are shorter; what an application makes of a message may
/// be as long as that.
const LONGEST_ID: usize = 1024;

/// How long what the application or the cleaner asks for may take, if it is not messages. Then it is given up.
const PATIENCE: Duration = Duration::from_secs(30);

async fn in_time<T>(what: &str, work: impl Future<Output = sqlx::Result<T>>) -> Result<T, Error> {
    match timeout(PATIENCE, work).await {
        Ok(done) => done.map_err(|error| Error::database(what, error)),
        Err(_) => Err(Error::late(what, PATIENCE)),
    }
}

/// Whose turn it is, where only one may write.
pub(crate) type Turn = Option<OwnedMutexGuard<()>>;

impl<D: Records> Shared<D> {
    /// Begins a transaction that is going to write, when it is its turn.
    async fn begin(&self) -> sqlx::Result<(Transaction<'static, D>, Turn)> {
        let turn = self.turn().await;
        Ok((D::begin(&self.pool).await?, turn))
    }

    async fn turn(&self) -> Turn {
        match &self.turn {
            Some(turn) => Some(Arc::clone(turn).lock_owned().await),
            None => None,
        }
    }

    async fn clean(&self) -> Result<u64, Error> {
        let mut rows = 0;
        loop {
            let now = in_milliseconds(SystemTime::now());
            let cleaning = async {
                let _turn = self.turn().await;
                D::clean(&self.pool, &self.statements, now).await
            };
            match in_time("cleaning the inbox", cleaning).await? {
                0 => return Ok(rows),
                some => rows += some,
            }
        }
    }

    /// Once, whether the tables are those that this version works with.
    async fn check(&self) -> Result<(), Error> {
        self.checked.get_or_try_init(|| self.schema.check(&self.pool)).await.map(|_| ())
    }

    /// What a message is known by, as short as it has to be.
    fn read(&self, incoming: &Incoming) -> Known {
        let mut known = self.remember.read(incoming);
        match &mut known {
            Known::Id { id, .. } | Known::Old { id, .. } => shorten(id),
            Known::Release { ids, .. } => ids.iter_mut().for_each(shorten),
            Known::Number { .. } | Known::Nothing | Known::Unknown(_) => {}
        }
        known
    }

    async fn open(self: &Arc<Self>, incoming: &Incoming) -> Result<Opened, BoxError> {
        self.check().await?;
        let record = match self.read(incoming) {
            Known::Unknown(unknown) => return Ok(Opened::Unknown(unknown)),
            Known::Old { scope, id } => return self.open_old((&scope, &id)).await,
            Known::Release { scope, ids } => return self.release(&scope, &ids).await,
            Known::Nothing => Record::Nothing,
            Known::Id { scope, id } => Record::Id { scope, id },
            Known::Number { scope, sender, number, given_up } => {
                Record::Number { scope, sender, number, given_up, mark: HighWater::default() }
            }
        };
        let (mut transaction, turn) = self.begin().await?;
        let (found, record) = self.look_up(&mut transaction, record).await?;
        match found {
            Found::New => Ok(Opened::New(Box::new(SqlWork::new(self, transaction, record, turn)))),
            Found::Done(reply) => Ok(Opened::Done(reply)),
            Found::Unknown(unknown) => Ok(Opened::Unknown(unknown)),
        }
    }

    /// One that is older than what is remembered, but may be all the same.
    async fn open_old(&self, id: (&str, &[u8])) -> Result<Opened, BoxError> {
        let mut connection = self.pool.acquire().await?;
        Ok(match D::reply(&mut connection, &self.statements, id).await? {
            Some(found) => Opened::Done(found.map(reply)),
            None => Opened::Unknown(Unknown::Forgotten),
        })
    }

    /// Looks whether it is new, and if so locks it against copies.
    async fn look_up(
        &self,
        connection: &mut D::Connection,
        mut record: Record,
    ) -> sqlx::Result<(Found, Record)> {
        let statements = &self.statements;
        let found = match &mut record {
            Record::Nothing => Found::New,
            Record::Id { scope, id } => {
                let expires_at = self.remember.keeps_ids_for().map(in_future);
                match D::add(connection, statements, (scope, id), expires_at).await? {
                    true => Found::New,
                    false => {
                        let found = D::reply(connection, statements, (scope, id)).await?;
                        Found::Done(found.flatten().map(reply))
                    }
                }
            }
            Record::Number { scope, sender, number, mark, .. } => {
                *mark = self.mark(connection, &of(scope, sender)).await?;
                match mark.progress_of(*number) {
                    Progress::New if mark.has_room_for(*number) => Found::New,
                    Progress::New => Found::Unknown(Unknown::Gaps),
                    Progress::GivenUp => Found::Unknown(Unknown::GivenUp),
                    Progress::Done => {
                        let sender = (scope.as_str(), sender.as_str());
                        let found = D::number_reply(connection, statements, sender, *number);
                        Found::Done(found.await?.map(reply))
                    }
                }
            }
        };
        Ok((found, record))
    }

    /// The mark of one sender, which nobody else may change until the end of the transaction.
    async fn mark(
        &self,
        connection: &mut D::Connection,
        sender: &Sender,
    ) -> sqlx::Result<HighWater> {
        match D::mark(connection, &self.statements, sender).await? {
            Some(mark) => Ok(mark),
            None => {
                let marks = self.new_marks(connection, std::slice::from_ref(sender)).await?;
                Ok(marks.into_iter().next().unwrap_or_default())
            }
        }
    }

    /// The marks of senders of whom some have none. Nothing may be locked before: two that lock in turns wait for each other.
    async fn new_marks(
        &self,
        connection: &mut D::Connection,
        senders: &[Sender],
    ) -> sqlx::Result<Vec<HighWater>> {
        D::add_marks(connection, &self.statements, senders).await?;
        let marks = D::marks(connection, &self.statements, senders).await?;
        marks.ok_or(sqlx::Error::RowNotFound)
    }

    async fn release(&self, scope: &str, ids: &[Vec<u8>]) -> Result<Opened, BoxError> {
        let Some(linger) = self.remember.lingers_for() else { return Ok(Opened::Released) };
        let _turn = self.turn().await;
        let mut transaction = D::begin_impatient(&self.pool).await?;
        // In order, so that two that release the same do not wait for each other.
        for id in ids.iter().collect::<BTreeSet<_>>() {
            let expires_at = in_future(linger);
            D::release(&mut transaction, &self.statements, (scope, id), expires_at).await?;
        }
        transaction.commit().await?;
        Ok(Opened::Released)
    }
}

/// What is known of a message.
enum Found {
    New,
    Done(Option<leveret::Message>),
    Unknown(Unknown),
}

/// The index takes nothing very long. What is cut off is told apart by a digest, and is longer than what is not.
fn shorten(id: &mut Vec<u8>) {
    if id.len() > LONGEST_ID {
        let digest = Sha256::digest(&id[..]);
        id.truncate(LONGEST_ID);
        id.extend_from_slice(&digest);
    }
}

fn of(scope: &str, sender: &str) -> Sender {
    (scope.to_owned(), sender.to_owned())
}

fn in_milliseconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn in_future(time: Duration) -> i64 {
    let later = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    in_milliseconds(SystemTime::now()).saturating_add(later)
}

impl<D: Records> leveret::inbox::Inbox for Inbox<D> {
    fn open<'a>(&'a self, incoming: &'a Incoming) -> Doing<'a, Opened> {
        Cleaner::start(&self.0);
        let opening = self.0.open(incoming);
        Box::pin(async { opening.await.map_err(|error| trouble::of_opening(error, 1)) })
    }

    fn open_batch<'a>(&'a self, batch: &'a [Incoming]) -> Doing<'a, OpenedBatch> {
        Cleaner::start(&self.0);
        let opening = self.0.open_batch(batch);
        Box::pin(async { opening.await.map_err(|error| trouble::of_opening(error, batch.len())) })
    }

    fn lends(&self, argument: TypeId) -> bool {
        argument == TypeId::of::<Tx<D>>()
    }
}

impl<D: Records> Clone for Inbox<D> {
    fn clone(&self) -> Self {
        Inbox(Arc::clone(&self.0))
    }
}

impl<D: Records> fmt::Debug for Inbox<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("remember", &self.0.remember).finish_non_exhaustive()
    }
}
