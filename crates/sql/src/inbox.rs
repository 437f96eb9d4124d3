//! An inbox in the application's database: what handlers change there, and the record that a message was handled, are committed
//! together.

use std::any::TypeId;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leveret::amqp::RawProperties;
use leveret::inbox::{
    Doing, HighWater, Known, Opened, OpenedBatch, Progress, Remember, Report, Unknown,
};
use leveret::{BoxError, Incoming, Message};
use sha2::{Digest as _, Sha256};
use sqlx::{Database, Pool, Transaction};
use tokio::sync::{Mutex, OnceCell, OwnedMutexGuard};
use tokio::time::timeout;

use crate::dialect::{BuiltIn, Dialect, Record, Reply, Sender};
use crate::error::Error;
use crate::schema::Schema;

mod batch;
mod cleaner;
mod trouble;
mod tx;
mod work;

use cleaner::Cleaner;
pub use tx::Tx;
use work::SqlWork;

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
pub struct Inbox<DB: Database, L = BuiltIn>(Arc<Shared<DB, L>>);

pub(crate) struct Shared<DB: Database, L> {
    pool: Pool<DB>,
    remember: Remember,
    schema: Schema<L>,
    checked: OnceCell<()>,
    /// Whose turn it is to write, where only one may.
    turn: Option<Arc<Mutex<()>>>,
    cleaner: Cleaner,
}

impl<DB: Database> Inbox<DB>
where
    BuiltIn: Dialect<DB>,
{
    /// An inbox in the default [`Schema`], whose tables [have been made](Schema::migrate). As long as they are not those of this
    /// version, messages are held.
    pub fn new(pool: Pool<DB>, remember: Remember) -> Self {
        Inbox::in_schema(pool, remember, &Schema::default())
    }
}

impl<DB: Database, L: Dialect<DB>> Inbox<DB, L> {
    /// The same in another schema.
    pub fn in_schema(pool: Pool<DB>, remember: Remember, schema: &Schema<L>) -> Self {
        Inbox(Arc::new(Shared {
            pool,
            remember,
            schema: schema.clone(),
            checked: OnceCell::new(),
            turn: L::ONE_WRITER.then(Arc::default),
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
        let Shared { pool, schema, .. } = &*self.0;
        let sender = sender_of(scope, sender);
        let found = schema.dialect().mark(pool, schema.tables(), &sender);
        let found = in_time("looking up a mark of the inbox", async {
            found.await?.as_deref().map(decode).transpose()
        });
        Ok(found.await?.unwrap_or_default())
    }

    /// Waits no longer for these numbers of a sender, and says which of them were missing. If messages of this sender are at
    /// work, it waits for those; so a handler cannot do this for the sender of its message, and on SQLite for none.
    pub async fn give_up(
        &self,
        scope: &str,
        sender: &str,
        numbers: RangeInclusive<u64>,
    ) -> Result<Vec<RangeInclusive<u64>>, Error> {
        let changed = async {
            let (mut transaction, _turn) = self.0.begin().await?;
            let senders = [sender_of(scope, sender)];
            let mut marks = self.0.lock_marks(&mut transaction, &senders).await?;
            let missing = marks[0].give_up(numbers);
            self.0.set_marks(&mut transaction, &senders, &marks).await?;
            self.0.dialect().commit(transaction).await?;
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

impl<DB: Database, L: Dialect<DB>> Shared<DB, L> {
    fn dialect(&self) -> &L {
        self.schema.dialect()
    }

    /// Begins a transaction that is going to write, when it is its turn.
    async fn begin(&self) -> sqlx::Result<(Transaction<'static, DB>, Turn)> {
        let turn = self.turn().await;
        Ok((self.dialect().begin(&self.pool).await?, turn))
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
                self.dialect().clean_inbox(&self.pool, self.schema.tables(), now).await
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
        let known = match self.read(incoming) {
            Known::Unknown(unknown) => return Ok(Opened::Unknown(unknown)),
            Known::Old { scope, id } => return self.open_old(Record::Id { scope, id }).await,
            Known::Release { scope, ids } => return self.release(&scope, &ids).await,
            known => known,
        };
        let (mut transaction, turn) = self.begin().await?;
        Ok(match self.record(&mut transaction, &known).await? {
            Found::New(entry) => {
                Opened::New(Box::new(SqlWork::new(self, transaction, known, entry, turn)))
            }
            Found::Done(reply) => Opened::Done(reply),
            Found::Unknown(unknown) => Opened::Unknown(unknown),
        })
    }

    /// One that is older than what is remembered, but may be all the same.
    async fn open_old(&self, record: Record) -> Result<Opened, BoxError> {
        let mut connection = self.pool.acquire().await?;
        let found = self.dialect().reply(&mut connection, self.schema.tables(), &record).await?;
        Ok(match found {
            Some(found) => Opened::Done(found.map(decode_reply)),
            None => Opened::Unknown(Unknown::Forgotten),
        })
    }

    /// Writes down that a message was handled, if it is new. Copies wait for the end of the transaction.
    async fn record(&self, connection: &mut DB::Connection, known: &Known) -> sqlx::Result<Found> {
        match known {
            Known::Id { scope, id } => {
                let expires_at = self.remember.keeps_ids_for().map(in_future);
                let (ids, tables) = ([(scope.as_str(), id.as_slice())], self.schema.tables());
                let added = self.dialect().add_ids(connection, tables, &ids, expires_at).await?;
                let record = Record::Id { scope: scope.clone(), id: id.clone() };
                match added[..] {
                    [true] => Ok(Found::New(Entry { record: Some(record), ..Entry::default() })),
                    _ => self.done(connection, &record).await,
                }
            }
            Known::Number { scope, sender, number, given_up } => {
                let senders = [sender_of(scope, sender)];
                let mut marks = self.lock_marks(connection, &senders).await?;
                let mark = &mut marks[0];
                let mut entry = Entry::default();
                match mark.progress_of(*number) {
                    Progress::New if mark.has_room_for(*number) => {
                        entry.report = self.advance(mark, sender, *number, given_up.clone());
                    }
                    Progress::New => return Ok(Found::Unknown(Unknown::Gaps)),
                    Progress::GivenUp => return Ok(Found::Unknown(Unknown::GivenUp)),
                    Progress::Done => {
                        let record = number_record(senders, *number, Vec::new());
                        return self.done(connection, &record).await;
                    }
                }
                self.set_marks(connection, &senders, &marks).await?;
                entry.record = Some(number_record(senders, *number, marks[0].encode()));
                Ok(Found::New(entry))
            }
            _ => Ok(Found::New(Entry::default())),
        }
    }

    /// Adds a number to its mark.
    fn advance(
        &self,
        mark: &mut HighWater,
        sender: &str,
        number: u64,
        given_up: Option<RangeInclusive<u64>>,
    ) -> Report {
        let mut report = Report::default();
        mark.add(number);
        if let Some(numbers) = given_up {
            report.give_up(sender, mark.give_up(numbers));
        }
        report.give_up(sender, mark.settle(self.remember.gaps_policy()));
        report
    }

    /// A message that was handled, with its reply.
    async fn done(&self, connection: &mut DB::Connection, record: &Record) -> sqlx::Result<Found> {
        let found = self.dialect().reply(connection, self.schema.tables(), record).await?;
        Ok(Found::Done(found.flatten().map(decode_reply)))
    }

    /// Marks that no other transaction may change until the end of this one.
    async fn lock_marks(
        &self,
        connection: &mut DB::Connection,
        senders: &[Sender],
    ) -> sqlx::Result<Vec<HighWater>> {
        let (tables, initial) = (self.schema.tables(), HighWater::default().encode());
        let marks = self.dialect().lock_marks(connection, tables, senders, &initial).await?;
        marks.iter().map(|mark| decode(mark)).collect()
    }

    async fn set_marks(
        &self,
        connection: &mut DB::Connection,
        senders: &[Sender],
        marks: &[HighWater],
    ) -> sqlx::Result<()> {
        let marks: Vec<Vec<u8>> = marks.iter().map(HighWater::encode).collect();
        self.dialect().set_marks(connection, self.schema.tables(), senders, &marks).await
    }

    async fn release(&self, scope: &str, ids: &[Vec<u8>]) -> Result<Opened, BoxError> {
        let Some(linger) = self.remember.lingers_for() else { return Ok(Opened::Released) };
        let (mut transaction, _turn) = self.begin().await?;
        let mut ids: Vec<&[u8]> = ids.iter().map(Vec::as_slice).collect();
        ids.sort_unstable();
        self.release_in(&mut transaction, scope, &ids, linger).await?;
        self.dialect().commit(transaction).await?;
        Ok(Opened::Released)
    }

    /// In this order, so that two that release the same do not wait for each other.
    async fn release_in(
        &self,
        connection: &mut DB::Connection,
        scope: &str,
        ids: &[&[u8]],
        linger: Duration,
    ) -> sqlx::Result<()> {
        let (tables, expires_at) = (self.schema.tables(), in_future(linger));
        self.dialect().release_ids(connection, tables, scope, ids, expires_at).await
    }
}

/// What is known of a message.
enum Found {
    New(Entry),
    Done(Option<Message>),
    Unknown(Unknown),
}

/// What a transaction has written down of a message.
#[derive(Default)]
pub(crate) struct Entry {
    /// None for a message that is handled whenever it comes.
    record: Option<Record>,
    report: Report,
}

fn number_record([sender]: [Sender; 1], number: u64, mark: Vec<u8>) -> Record {
    // Numbers come from headers, which have no larger ones.
    Record::Number { sender, number: i64::try_from(number).unwrap_or(i64::MAX), mark }
}

fn decode(mark: &[u8]) -> sqlx::Result<HighWater> {
    HighWater::decode(mark).map_err(|error| sqlx::Error::Decode(Box::new(error)))
}

fn encode_reply(reply: &Message) -> Result<Reply, leveret::Error> {
    let (body, properties) = reply.clone().into_parts()?;
    let properties = RawProperties::from(&properties).as_bytes().to_vec();
    Ok(Reply { properties, body: body.to_vec() })
}

fn decode_reply(Reply { properties, body }: Reply) -> Message {
    let properties = RawProperties::new(properties.into());
    Message::with_properties(body, properties.get().into_owned())
}

/// The index takes nothing very long. What is cut off is told apart by a digest, and is longer than what is not.
fn shorten(id: &mut Vec<u8>) {
    if id.len() > LONGEST_ID {
        let digest = Sha256::digest(&id[..]);
        id.truncate(LONGEST_ID);
        id.extend_from_slice(&digest);
    }
}

fn sender_of(scope: &str, name: &str) -> Sender {
    Sender { scope: scope.to_owned(), name: name.to_owned() }
}

fn in_milliseconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn in_future(time: Duration) -> i64 {
    let later = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    in_milliseconds(SystemTime::now()).saturating_add(later)
}

impl<DB: Database, L: Dialect<DB>> leveret::inbox::Inbox for Inbox<DB, L> {
    fn open<'a>(&'a self, incoming: &'a Incoming) -> Doing<'a, Opened> {
        Cleaner::start(&self.0);
        Box::pin(async {
            self.0.open(incoming).await.map_err(|error| self.0.opening_failed(error, 1))
        })
    }

    fn open_batch<'a>(&'a self, batch: &'a [Incoming]) -> Doing<'a, OpenedBatch> {
        Cleaner::start(&self.0);
        Box::pin(async {
            let opened = self.0.open_batch(batch).await;
            opened.map_err(|error| self.0.opening_failed(error, batch.len()))
        })
    }

    fn lends(&self, argument: TypeId) -> bool {
        argument == TypeId::of::<Tx<DB>>()
    }
}

impl<DB: Database, L> Clone for Inbox<DB, L> {
    fn clone(&self) -> Self {
        Inbox(Arc::clone(&self.0))
    }
}

impl<DB: Database, L> fmt::Debug for Inbox<DB, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("remember", &self.0.remember).finish_non_exhaustive()
    }
}
