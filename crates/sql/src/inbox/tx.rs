//! The transaction of a message, lent to its handler.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leveret::{FromIncoming, Given, Incoming};
use sqlx::{Database, Transaction};

/// The transaction in which a message is handled, as an argument of the handler. What is done with it is committed together with
/// the record that the message was handled, or not at all.
///
/// It stands for the connection: `&mut *tx` is what sqlx executes statements on. It is committed when the handler has
/// succeeded, and rolled back when it has failed, by the [`Inbox`](crate::Inbox) and by nobody else. It has to be gone by
/// then: a handler that gives it to a task that lives longer has failed.
///
/// There is one for the message, whatever is around the handler. A layer that calls it again where it has failed, as tower's
/// `Retry`, has it work in the same transaction, and what the first call has changed is committed with what the next one does: have
/// the [retry policy](leveret::RetryPolicy) try again instead, each time with a new one.
///
/// A statement that is cut short, by a layer with a timeout for instance, goes on in the database, and the transaction with it.
/// Who called is told at once, unless the failure is [permanent](leveret::Failure::permanent) and has to be recorded. But until the
/// statement has ended, its connection is not back in the pool, and copies of the message wait: have PostgreSQL end it in time,
/// with `statement_timeout`. Waits for locks end after 10 s, or after the `lock_timeout` that the application has set if that is
/// shorter; `SET LOCAL lock_timeout` in a handler changes it.
///
/// ```
/// use leveret::{Failure, Json};
/// use leveret_sql::Tx;
/// use sqlx::Sqlite;
///
/// async fn deposit(Json((account, cents)): Json<(String, i64)>, mut tx: Tx<Sqlite>) -> Result<(), Failure> {
///     sqlx::query("UPDATE accounts SET cents = cents + ? WHERE name = ?")
///         .bind(cents)
///         .bind(account)
///         .execute(&mut *tx)
///         .await?;
///     Ok(())
/// }
/// ```
pub struct Tx<D: Database> {
    /// It is always there, until it is dropped.
    transaction: Option<Transaction<'static, D>>,
    slot: Slot<D>,
}

impl<D: Database> Tx<D> {
    /// The transaction of a batch of messages, see [`handle_batches`](leveret::ConsumerBuilder::handle_batches).
    ///
    /// ```
    /// use leveret::{Failure, Incoming};
    /// use leveret_sql::Tx;
    /// use sqlx::Sqlite;
    ///
    /// async fn count(batch: Vec<Incoming>) -> Result<(), Failure> {
    ///     let mut tx = Tx::<Sqlite>::of(&batch)?;
    ///     let sql = "UPDATE counter SET count = count + ?";
    ///     sqlx::query(sql).bind(batch.len() as i64).execute(&mut *tx).await?;
    ///     Ok(())
    /// }
    /// ```
    pub fn of(batch: &[Incoming]) -> Result<Self, leveret::Error> {
        let first = batch.first().ok_or_else(|| leveret::Error::invalid("the batch is empty"))?;
        Tx::from_incoming(first)
    }
}

/// Where the transaction is while nobody works with it.
pub(super) struct Slot<D: Database>(Arc<Mutex<State<D>>>);

enum State<D: Database> {
    /// Nobody has it.
    In(Transaction<'static, D>),
    /// The handler has it.
    Out,
    /// It is over: whoever still has it lets it be rolled back.
    Over,
}

impl<D: Database> Slot<D> {
    pub(super) fn new(transaction: Transaction<'static, D>) -> Self {
        Slot(Arc::new(Mutex::new(State::In(transaction))))
    }

    fn lock(&self) -> MutexGuard<'_, State<D>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lend(&self) -> Option<Tx<D>> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Out) {
            State::In(transaction) => {
                Some(Tx { transaction: Some(transaction), slot: self.clone() })
            }
            other => {
                *state = other;
                None
            }
        }
    }

    fn give_back(&self, transaction: Transaction<'static, D>) {
        let mut state = self.lock();
        if matches!(*state, State::Out) {
            *state = State::In(transaction);
        }
    }

    /// Takes the transaction out for good. `None` if somebody has kept it.
    pub(super) fn close(&self) -> Option<Transaction<'static, D>> {
        match std::mem::replace(&mut *self.lock(), State::Over) {
            State::In(transaction) => Some(transaction),
            _ => None,
        }
    }
}

impl<D: Database> Clone for Slot<D> {
    fn clone(&self) -> Self {
        Slot(Arc::clone(&self.0))
    }
}

impl<D: Database> Deref for Tx<D> {
    type Target = D::Connection;

    fn deref(&self) -> &D::Connection {
        self.transaction.as_ref().expect("it is there until it is dropped")
    }
}

impl<D: Database> DerefMut for Tx<D> {
    fn deref_mut(&mut self) -> &mut D::Connection {
        self.transaction.as_mut().expect("it is there until it is dropped")
    }
}

impl<D: Database> Drop for Tx<D> {
    fn drop(&mut self) {
        if let Some(transaction) = self.transaction.take() {
            self.slot.give_back(transaction);
        }
    }
}

impl<D: Database> FromIncoming for Tx<D> {
    fn from_incoming(incoming: &Incoming) -> Result<Self, leveret::Error> {
        let slot = incoming.lent::<Slot<D>>().ok_or_else(has_no_inbox::<D>)?;
        slot.lend().ok_or_else(|| {
            leveret::Error::invalid(
                "the handler asks for its Tx twice, and there is one: take one argument",
            )
        })
    }

    fn check(given: &Given<'_>) -> Result<(), leveret::Error> {
        if given.lends::<Tx<D>>() { Ok(()) } else { Err(has_no_inbox::<D>()) }
    }
}

fn has_no_inbox<D: Database>() -> leveret::Error {
    let text = format!(
        "a handler takes a Tx<{}>, and its consumer or service has no inbox in such a database: call .exactly_once(inbox) with a \
         leveret_sql::Inbox",
        D::NAME
    );
    leveret::Error::invalid(text)
}

impl<D: Database> fmt::Debug for Tx<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tx<{}>", D::NAME)
    }
}
