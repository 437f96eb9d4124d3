//! Messages that were set aside, because the broker has refused them too often.

use std::time::Duration;

use leveret::Message;
use leveret::amqp::{Properties, RawProperties};

use super::store::SharedStore;
use super::{failed, seconds};
use crate::dialect::{AsideAction, AsideRow, Row};
use crate::error::Error;

/// The messages of an [`Outbox`](crate::Outbox) that were set aside.
///
/// ```
/// # use leveret_sql::{Outbox, Schema};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # Schema::default().migrate(&pool).await?;
/// let aside = Outbox::default().aside(&pool);
/// for message in aside.list(0, 100).await? {
///     println!("{}: {}", message.routing_key, message.error);
/// }
/// let again = aside.send_all_again().await?; // or send_again(&[id]), discard(&[id])
/// assert_eq!(again, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Aside {
    store: SharedStore,
    notify: bool,
}

/// A message that was set aside.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SetAside {
    /// Its number in the outbox, which grows.
    pub id: i64,
    /// Where it should go.
    pub exchange: String,
    /// With this routing key.
    pub routing_key: String,
    /// What its order was by.
    pub ordering_key: Option<String>,
    /// The message, as it would be published.
    pub message: Message,
    /// How often it was tried.
    pub attempts: u32,
    /// Why it failed the last time.
    pub error: String,
    /// How long ago it was written.
    pub age: Duration,
    /// How long ago it was set aside.
    pub since: Duration,
}

impl Aside {
    pub(super) fn new(store: SharedStore, notify: bool) -> Self {
        Aside { store, notify }
    }

    /// The first ones with higher ids than this, so many at most.
    pub async fn list(&self, after: i64, limit: u32) -> Result<Vec<SetAside>, Error> {
        let rows = self.store.list_aside(after, i64::from(limit)).await;
        let rows = rows.map_err(|error| self.failed("listing set aside messages", error))?;
        Ok(rows.into_iter().map(SetAside::from).collect())
    }

    /// Has these sent again, as if for the first time, and says how many there are.
    pub async fn send_again(&self, ids: &[i64]) -> Result<u64, Error> {
        self.sent_again(Some(ids)).await
    }

    /// Has all sent again, as if for the first time, and says how many there are.
    pub async fn send_all_again(&self) -> Result<u64, Error> {
        self.sent_again(None).await
    }

    async fn sent_again(&self, ids: Option<&[i64]>) -> Result<u64, Error> {
        let action = AsideAction::SendAgain { notify: self.notify };
        let sent = self.store.update_aside(ids, action).await;
        sent.map_err(|error| self.failed("releasing set aside messages", error))
    }

    /// Deletes these, and says how many there were.
    pub async fn discard(&self, ids: &[i64]) -> Result<u64, Error> {
        self.discarded(Some(ids)).await
    }

    /// Deletes all, and says how many there were.
    pub async fn discard_all(&self) -> Result<u64, Error> {
        self.discarded(None).await
    }

    async fn discarded(&self, ids: Option<&[i64]>) -> Result<u64, Error> {
        let gone = self.store.update_aside(ids, AsideAction::Discard).await;
        gone.map_err(|error| self.failed("discarding set aside messages", error))
    }

    fn failed(&self, what: &str, error: sqlx::Error) -> Error {
        failed(what, self.store.schema(), error)
    }
}

impl From<AsideRow> for SetAside {
    fn from(aside: AsideRow) -> Self {
        let AsideRow { mut row, error, since } = aside;
        // What cannot be read any more is why it was set aside.
        let message = row.take_message().unwrap_or_default();
        SetAside {
            id: row.id,
            exchange: row.exchange,
            routing_key: row.routing_key,
            ordering_key: row.ordering_key,
            message,
            attempts: row.attempts.unsigned_abs(),
            error: error.unwrap_or_default(),
            age: seconds(row.age),
            since: seconds(since),
        }
    }
}

impl Row {
    /// The message in it, or what is wrong with it. The row has none afterwards.
    pub(crate) fn take_message(&mut self) -> Result<Message, String> {
        let (properties, body) =
            (std::mem::take(&mut self.properties), std::mem::take(&mut self.body));
        let properties = RawProperties::new(properties.into());
        if let Some(fault) = properties.fault() {
            return Err(format!("the properties in its row cannot be read: {fault}"));
        }
        let properties: Properties<'static> = properties.get().into_owned();
        Ok(Message::with_properties(body, properties))
    }
}
