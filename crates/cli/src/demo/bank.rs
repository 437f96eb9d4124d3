//! A bank, after the guide to messaging patterns: transfers are called for, some of them more than once, and each is done exactly
//! once, in SQLite, with the same reply to every copy. A receipt is written with it, and sent once that is committed.

use std::sync::Arc;
use std::time::Duration;

use leveret::inbox::Remember;
use leveret::{Client, Error, Failure, IntoMessage as _, Json, Message, OnLoss, Queue, Rpc, State};
use leveret_sql::{Inbox, Outbox, Relay, Schema, Tx};
use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Sqlite, SqlitePool};
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::ledger::{Fate, Ledger, Party};
use super::scenario::{Play, Scenario, Stage};

pub(super) const SCENARIO: Scenario = Scenario {
    title: "bank",
    about: "transfers by RPC, asked for 1 to 3 times, done once in SQLite",
    total,
    open: |stage| Box::pin(open(stage)),
};

const BANK: &str = "leveret-demo.bank";
const TRANSFER: &str = "transfer";
const RECEIPTS: &str = "leveret-demo.bank.receipts";

const ACCOUNTS: u64 = 20;
const FIRST_BALANCE: i64 = 1_000_000;
/// An account that nobody has.
const NOBODYS: u64 = 99;
const NO_ACCOUNT: &str = "no-account";

/// How many transfers are under way at a time.
const CUSTOMERS: u64 = 16;
/// How long a call may take, cuts included.
const CALL: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Transfer {
    number: u64,
    from: u64,
    to: u64,
    cents: i64,
}

impl Transfer {
    /// The transfer of a number. One of fifty is from an account that is not there.
    fn new(number: u64) -> Self {
        let from = if number % 50 == 13 { NOBODYS } else { number % ACCOUNTS };
        let to = (number + 1 + number / ACCOUNTS % (ACCOUNTS - 1)) % ACCOUNTS;
        Transfer { number, from, to, cents: 1 + (number % 500) as i64 }
    }

    fn is_possible(&self) -> bool {
        self.from != NOBODYS
    }

    /// How often it is asked for beyond the first time.
    fn copies(&self) -> u64 {
        self.number % 3
    }

    /// What should become of it: who asks gets a reply, and if it was possible, there is a receipt.
    fn fate(&self) -> Fate {
        if self.is_possible() { Fate::DoneByTwo } else { Fate::Done }
    }
}

/// How many transfers there are: each of them is a transaction, or several.
fn total(messages: u64) -> u64 {
    messages.div_ceil(5)
}

async fn open(stage: Stage) -> Result<Play, Error> {
    let vault = Vault::open().await.map_err(unavailable)?;
    let client = &stage.client;
    let remember = Remember::ids_for(Duration::from_secs(3600));
    let service = client
        .service(BANK)
        .queue(Queue::quorum(BANK))
        .exactly_once(Inbox::new(vault.pool.clone(), remember))
        .state(Outbox::default())
        .method(TRANSFER, transfer);
    client.apply(&service.topology().queue(Queue::quorum(RECEIPTS))).await?;
    let rpc = client.rpc(BANK).timeout(CALL).on_loss(OnLoss::Replay).build().await?;
    let relay = vault.relay(client).await.map_err(unavailable)?;
    let receipts = client.consumer(RECEIPTS).workers(4).state(Arc::clone(&stage.ledger));
    Ok(Box::pin(async move {
        let all = async {
            ask_all(&rpc, &stage.ledger).await;
            stage.end().await;
        };
        let (served, relayed, filed, ()) = tokio::join!(
            service.run_until(stage.over()),
            relay.run_until(stage.over()),
            receipts.handle(file).run_until(stage.over()),
            all
        );
        let served = served?;
        relayed.map_err(unavailable)?;
        stage.ledger.add(&served);
        stage.ledger.add(&filed?);
        let ledger = &stage.ledger;
        let copies: u64 = (0..ledger.total()).map(|number| Transfer::new(number).copies()).sum();
        if served.duplicates < copies {
            let known = served.duplicates;
            ledger.fault(format!("{copies} copies were sent, and {known} were recognised"));
        }
        vault.check(ledger).await.map_err(unavailable)
    }))
}

/// The database has failed, which is an error of the scenario's own.
fn unavailable(error: impl std::fmt::Display) -> Error {
    Error::invalid(format!("the bank's database: {error}"))
}

/// Where the accounts are. It is gone with its folder.
struct Vault {
    pool: SqlitePool,
    _folder: TempDir,
}

impl Vault {
    async fn open() -> Result<Self, leveret::BoxError> {
        let folder = tempfile::tempdir()?;
        let options = SqliteConnectOptions::new()
            .filename(folder.path().join("bank.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(Duration::from_secs(20));
        let pool = SqlitePoolOptions::new().max_connections(4).connect_with(options).await?;
        Schema::default().migrate(&pool).await?;
        let sql = "CREATE TABLE accounts (number INTEGER PRIMARY KEY, cents INTEGER NOT NULL)";
        sqlx::query(sql).execute(&pool).await?;
        for number in 0..ACCOUNTS {
            let opening = sqlx::query("INSERT INTO accounts VALUES (?, ?)");
            opening.bind(number as i64).bind(FIRST_BALANCE).execute(&pool).await?;
        }
        Ok(Vault { pool, _folder: folder })
    }

    async fn relay(&self, client: &Client) -> Result<Relay, leveret_sql::Error> {
        Outbox::default().relay(client, &self.pool).build().await
    }

    /// Every balance has to be what it is if each transfer was done once.
    async fn check(&self, ledger: &Ledger) -> Result<(), sqlx::Error> {
        let mut expected = vec![FIRST_BALANCE; ACCOUNTS as usize];
        for transfer in (0..ledger.total()).map(Transfer::new).filter(Transfer::is_possible) {
            expected[transfer.from as usize] -= transfer.cents;
            expected[transfer.to as usize] += transfer.cents;
        }
        let sql = "SELECT cents FROM accounts ORDER BY number";
        let found: Vec<i64> = sqlx::query_scalar(sql).fetch_all(&self.pool).await?;
        let wrong = found.iter().zip(&expected).filter(|(found, expected)| found != expected);
        match wrong.count() {
            0 => {}
            wrong => ledger.fault(format!("{wrong} of {ACCOUNTS} balances are wrong")),
        }
        Ok(())
    }
}

/// Moves money, writes a receipt, and replies with what is left: which would be another number if it were done again.
async fn transfer(
    Json(transfer): Json<Transfer>,
    mut tx: Tx<Sqlite>,
    State(outbox): State<Outbox>,
) -> Result<Json<i64>, Failure> {
    let Transfer { number, from, to, cents } = transfer;
    let sql = "UPDATE accounts SET cents = cents - ? WHERE number = ? RETURNING cents";
    let paying = sqlx::query_scalar(sql).bind(cents).bind(from as i64);
    let Some(left) = paying.fetch_optional(&mut *tx).await? else {
        return Err(Failure::permanent(format!("there is no account {from}")).kind(NO_ACCOUNT));
    };
    let sql = "UPDATE accounts SET cents = cents + ? WHERE number = ?";
    sqlx::query(sql).bind(cents).bind(to as i64).execute(&mut *tx).await?;
    outbox.publish(&mut *tx, "", RECEIPTS, number.to_string()).await?;
    Ok(Json(left))
}

async fn file(receipt: String, State(ledger): State<Arc<Ledger>>) -> Result<(), Failure> {
    ledger.done_by(receipt.parse()?, Party::Second);
    Ok(())
}

/// Asks for all transfers, many at a time.
async fn ask_all(rpc: &Rpc, ledger: &Arc<Ledger>) {
    let mut customers = JoinSet::new();
    for customer in 0..CUSTOMERS {
        let (rpc, ledger) = (rpc.clone(), Arc::clone(ledger));
        customers.spawn(async move {
            for number in (customer..ledger.total()).step_by(CUSTOMERS as usize) {
                let transfer = Transfer::new(number);
                ledger.sent(number, transfer.fate());
                match ask(&rpc, transfer).await {
                    Ok(()) => {
                        ledger.confirmed(number);
                        ledger.done(number);
                    }
                    Err(wrong) => ledger.fault(wrong),
                }
            }
        });
    }
    while customers.join_next().await.is_some() {}
}

/// Asks for a transfer, with all copies of it at the same time: all have to get the same reply.
async fn ask(rpc: &Rpc, transfer: Transfer) -> Result<(), String> {
    let request = Json(transfer).into_message().map_err(|error| error.to_string())?;
    let request = request.message_id(format!("transfer {}", transfer.number));
    let mut calls = JoinSet::new();
    for _ in 0..=transfer.copies() {
        calls.spawn(call(rpc.clone(), request.clone()));
    }
    let replies: Result<Vec<_>, Error> = calls.join_all().await.into_iter().collect();
    let mut replies = replies.map_err(|error| error.to_string())?;
    replies.dedup();
    match replies[..] {
        [Reply::Left(_)] if transfer.is_possible() => Ok(()),
        [Reply::NoAccount] if !transfer.is_possible() => Ok(()),
        _ => Err(format!("transfer {} got the replies {replies:?}", transfer.number)),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Left(i64),
    NoAccount,
}

async fn call(rpc: Rpc, request: Message) -> Result<Reply, Error> {
    match rpc.call::<Json<i64>>(TRANSFER, request).await {
        Ok(Json(left)) => Ok(Reply::Left(left)),
        Err(error) if error.remote().is_some_and(|remote| remote.kind == NO_ACCOUNT) => {
            Ok(Reply::NoAccount)
        }
        Err(error) => Err(error),
    }
}
