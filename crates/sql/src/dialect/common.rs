//! What PostgreSQL and SQLite say in the same words.

pub(super) const REPLY: &str = "SELECT properties, body FROM {inbox} WHERE scope = $1 AND id = $2";

pub(super) const NUMBER_REPLY: &str =
    "SELECT properties, body FROM {inbox_replies} WHERE scope = $1 AND sender = $2 AND number = $3";

/// Not that of a copy, which has recorded the message if the handler has ended its transaction.
pub(super) const SET_REPLY: &str = "\
UPDATE {inbox} SET properties = $3, body = $4
WHERE scope = $1 AND id = $2 AND properties IS NULL";

/// Beside the mark that this transaction has written: it is not there any more if the handler has ended the transaction.
pub(super) const SET_NUMBER_REPLY: &str = "\
INSERT INTO {inbox_replies} (scope, sender, number, properties, body, expires_at)
SELECT $1, $2, $3, $4, $5, $6 FROM {inbox_marks} WHERE scope = $1 AND sender = $2 AND mark = $7";

pub(super) const RELEASE: &str =
    "UPDATE {inbox} SET expires_at = $3 WHERE scope = $1 AND id = $2 AND expires_at IS NULL";

pub(super) const MARK: &str = "SELECT mark FROM {inbox_marks} WHERE scope = $1 AND sender = $2";

pub(super) const SET_MARK: &str =
    "UPDATE {inbox_marks} SET mark = $3 WHERE scope = $1 AND sender = $2";

pub(super) const COUNT_LANES: &str = "SELECT count(*) FROM {outbox_lanes}";

/// Behind what is reserved, if anything is: what was used of it is unknown, and its holder can reserve no more.
pub(super) const TAKE_NUMBERS: &str = "\
INSERT INTO {sequences} AS s (sender, next, reserved) VALUES ($1, 1 + $2, $2)
ON CONFLICT (sender) DO UPDATE SET holder = NULL,
    next = (CASE WHEN s.next > s.reserved THEN s.next ELSE s.reserved + 1 END) + $2,
    reserved = (CASE WHEN s.next > s.reserved THEN s.next ELSE s.reserved + 1 END) + $2 - 1
RETURNING next";

pub(super) const HOLD_NUMBERS: &str = "\
INSERT INTO {sequences} AS s (sender, next, reserved, holder) VALUES ($1, 1, 0, $2)
ON CONFLICT (sender) DO UPDATE SET holder = $2 RETURNING next, reserved";

pub(super) const KEEP_NUMBERS: &str =
    "UPDATE {sequences} SET next = $3, reserved = $4 WHERE sender = $1 AND holder = $2";

/// The steps of a database, from its folder.
macro_rules! migrations {
    ($folder:literal: $($version:literal $name:literal),*) => {
        &[$($crate::dialect::Migration {
            version: $version,
            name: $name,
            sql: include_str!(concat!("../../migrations/", $folder, "/", $version, "_", $name, ".sql")),
        }),*]
    };
}
pub(super) use migrations;

/// Fails unless a statement has found all rows that this transaction has written or locked.
pub(super) fn expect_rows(expected: usize, found: u64) -> sqlx::Result<()> {
    match found == expected as u64 {
        true => Ok(()),
        false => Err(sqlx::Error::RowNotFound),
    }
}

/// Methods of [`Dialect`](super::Dialect) that differ in the names of tables alone. `BACKLOG`, `ASIDE`, `CLEAN` and `CLEAN_REPLIES`
/// are texts of the file that it is used in.
macro_rules! methods {
    ($database:ident, $connection:ident, $named:ident) => {
        async fn mark(
            &self,
            pool: &Pool<$database>,
            tables: &Tables,
            Sender { scope, name }: &Sender,
        ) -> sqlx::Result<Option<Vec<u8>>> {
            let mark = sqlx::query_scalar(tables.$named(common::MARK)).bind(scope).bind(name);
            mark.fetch_optional(pool).await
        }

        async fn reply(
            &self,
            connection: &mut $connection,
            tables: &Tables,
            record: &Record,
        ) -> sqlx::Result<Option<Option<Reply>>> {
            type Found = Option<(Option<Vec<u8>>, Option<Vec<u8>>)>;
            let found: Found = match record {
                Record::Id { scope, id } => {
                    let reply = sqlx::query_as(tables.$named(common::REPLY)).bind(scope).bind(id);
                    reply.fetch_optional(connection).await?
                }
                Record::Number { sender, number, .. } => {
                    let reply = sqlx::query_as(tables.$named(common::NUMBER_REPLY));
                    let reply = reply.bind(&sender.scope).bind(&sender.name).bind(number);
                    reply.fetch_optional(connection).await?
                }
            };
            let reply = |(properties, body)| Reply { properties, body };
            Ok(found.map(|(properties, body)| properties.zip(body).map(reply)))
        }

        async fn set_reply(
            &self,
            connection: &mut $connection,
            tables: &Tables,
            record: &Record,
            Reply { properties, body }: &Reply,
            expires_at: i64,
        ) -> sqlx::Result<()> {
            let set = match record {
                Record::Id { scope, id } => {
                    let set = sqlx::query(tables.$named(common::SET_REPLY)).bind(scope).bind(id);
                    set.bind(properties).bind(body)
                }
                Record::Number { sender, number, mark } => {
                    let set = sqlx::query(tables.$named(common::SET_NUMBER_REPLY));
                    let set = set.bind(&sender.scope).bind(&sender.name).bind(number);
                    set.bind(properties).bind(body).bind(expires_at).bind(mark)
                }
            };
            common::expect_rows(1, set.execute(connection).await?.rows_affected())
        }

        async fn release_ids(
            &self,
            connection: &mut $connection,
            tables: &Tables,
            scope: &str,
            ids: &[&[u8]],
            expires_at: i64,
        ) -> sqlx::Result<()> {
            for id in ids {
                let release = sqlx::query(tables.$named(common::RELEASE)).bind(scope).bind(id);
                release.bind(expires_at).execute(&mut *connection).await?;
            }
            Ok(())
        }

        async fn clean_inbox(
            &self,
            pool: &Pool<$database>,
            tables: &Tables,
            now: i64,
        ) -> sqlx::Result<u64> {
            let mut rows = 0;
            for sql in [CLEAN, CLEAN_REPLIES] {
                let clean = sqlx::query(tables.$named(sql)).bind(now).bind(ROWS_PER_CLEANUP);
                rows += clean.execute(pool).await?.rows_affected();
            }
            Ok(rows)
        }

        async fn backlog(&self, pool: &Pool<$database>, tables: &Tables) -> sqlx::Result<Backlog> {
            type Counts = (i64, i64, i64, Option<f64>);
            let counts = sqlx::query_as(tables.$named(BACKLOG)).fetch_one(pool);
            let (waiting, refused, set_aside, oldest): Counts = counts.await?;
            Ok(Backlog {
                waiting: waiting.unsigned_abs(),
                refused: refused.unsigned_abs(),
                set_aside: set_aside.unsigned_abs(),
                oldest: oldest.map(crate::outbox::seconds),
            })
        }

        async fn list_aside(
            &self,
            pool: &Pool<$database>,
            tables: &Tables,
            after: i64,
            limit: i64,
        ) -> sqlx::Result<Vec<AsideRow>> {
            let rows = sqlx::query(tables.$named(ASIDE)).bind(after).bind(limit);
            let aside = |found: <$database as sqlx::Database>::Row| {
                let (error, since) = (found.try_get("error")?, found.try_get("since")?);
                Ok(AsideRow { row: row(&found)?, error, since })
            };
            rows.fetch_all(pool).await?.into_iter().map(aside).collect()
        }

        async fn take_numbers(
            &self,
            connection: &mut $connection,
            tables: &Tables,
            sender: &str,
            count: i64,
        ) -> sqlx::Result<i64> {
            let take = sqlx::query_scalar(tables.$named(common::TAKE_NUMBERS));
            take.bind(sender).bind(count).fetch_one(connection).await
        }

        async fn hold_numbers(
            &self,
            pool: &Pool<$database>,
            tables: &Tables,
            sender: &str,
            holder: &str,
        ) -> sqlx::Result<SequenceNumbers> {
            let hold = sqlx::query_as(tables.$named(common::HOLD_NUMBERS));
            let (next, reserved) = hold.bind(sender).bind(holder).fetch_one(pool).await?;
            Ok(SequenceNumbers { next, reserved })
        }

        async fn keep_numbers(
            &self,
            pool: &Pool<$database>,
            tables: &Tables,
            sender: &str,
            holder: &str,
            SequenceNumbers { next, reserved }: SequenceNumbers,
        ) -> sqlx::Result<bool> {
            let keep = sqlx::query(tables.$named(common::KEEP_NUMBERS)).bind(sender).bind(holder);
            let kept = keep.bind(next).bind(reserved).execute(pool).await?;
            Ok(kept.rows_affected() == 1)
        }
    };
}
pub(super) use methods;

/// Reads a row of the outbox.
macro_rules! row_of {
    ($row:ident) => {
        fn row(row: &$row) -> sqlx::Result<Row> {
            Ok(Row {
                id: row.try_get("id")?,
                ordering_key: row.try_get("ordering_key")?,
                exchange: row.try_get("exchange")?,
                routing_key: row.try_get("routing_key")?,
                mandatory: row.try_get("mandatory")?,
                properties: row.try_get("properties")?,
                body: row.try_get("body")?,
                attempts: row.try_get("attempts")?,
                age: row.try_get("age")?,
            })
        }
    };
}
pub(super) use row_of;
