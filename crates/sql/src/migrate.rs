//! The tables: made, and brought up to date, in numbered steps.
//!
//! Each schema has a table `migrations` of its own, which says what was done; the application's own migrations, by sqlx or
//! otherwise, are never looked at. Steps are never changed once they were released: what changes is a further step, a file in
//! `migrations/` for each database and a word in its dialect.

use sqlx::{Database, Pool};

use crate::dialect::{Dialect, Migration};
use crate::error::{Error, ErrorKind};
use crate::schema::Schema;

impl<L> Schema<L> {
    /// Makes the tables, or brings them up to date. Several instances of a program may do this at the same time: one
    /// does it, and the others wait for that.
    ///
    /// Tables that a later version of this crate has changed are left alone: [`ErrorKind::NewerSchema`].
    ///
    /// On PostgreSQL it needs the right to make tables there, and to make the schema if it does not exist yet.
    pub async fn migrate<DB: Database>(&self, pool: &Pool<DB>) -> Result<(), Error>
    where
        L: Dialect<DB>,
    {
        let (dialect, tables) = (self.dialect(), self.tables());
        let failed = |error| {
            Error::database(format!("making the tables of schema {:?}", self.name()), error)
        };
        let mut transaction = dialect.begin_migration(pool, tables).await.map_err(failed)?;
        let found = dialect.version(&mut transaction, tables).await.map_err(failed)?;
        for step in self.missing(found, dialect.migrations())? {
            dialect.apply(&mut transaction, tables, step).await.map_err(failed)?;
        }
        transaction.commit().await.map_err(failed)
    }

    /// Fails if the tables are not those that this version of the crate works with.
    pub async fn check<DB: Database>(&self, pool: &Pool<DB>) -> Result<(), Error>
    where
        L: Dialect<DB>,
    {
        let found = async {
            let mut connection = pool.acquire().await?;
            self.dialect().version(&mut connection, self.tables()).await
        };
        let failed = |error| Error::database(format!("looking at schema {:?}", self.name()), error);
        self.is_current(found.await.map_err(failed)?, self.dialect().migrations())
    }

    /// Whether the tables are those of now, given the latest step that was made.
    fn is_current(&self, found: Option<i32>, migrations: &[Migration]) -> Result<(), Error> {
        if self.missing(found, migrations)?.is_empty() {
            return Ok(());
        }
        let latest = migrations.last().map_or(0, |migration| migration.version);
        let have = found.map_or_else(|| "no tables".to_owned(), |v| format!("version {v}"));
        let text = format!(
            "schema {:?} has {have}, and version {latest} is needed: call Schema::migrate first",
            self.name()
        );
        Err(Error::new(ErrorKind::NotMigrated, text))
    }

    /// The steps that are still to be made after this one.
    fn missing<'m>(
        &self,
        found: Option<i32>,
        migrations: &'m [Migration],
    ) -> Result<&'m [Migration], Error> {
        let found = found.unwrap_or(0);
        let latest = migrations.last().map_or(0, |migration| migration.version);
        if found > latest {
            let text = format!(
                "schema {:?} has version {found}, made by a later version of leveret-sql; this one knows up to {latest}: \
                 update this program, or give it a schema of its own",
                self.name()
            );
            return Err(Error::new(ErrorKind::NewerSchema, text));
        }
        Ok(&migrations[migrations.partition_point(|migration| migration.version <= found)..])
    }
}

#[cfg(all(test, feature = "postgres", feature = "sqlite"))]
mod tests {
    use sqlx::{Postgres, Sqlite};

    use super::*;
    use crate::dialect::BuiltIn;

    #[test]
    fn steps_are_numbered_without_gaps() {
        let postgres = Dialect::<Postgres>::migrations(&BuiltIn);
        let sqlite = Dialect::<Sqlite>::migrations(&BuiltIn);
        for migrations in [postgres, sqlite] {
            let versions: Vec<i32> = migrations.iter().map(|migration| migration.version).collect();
            assert_eq!(versions, (1..=versions.len() as i32).collect::<Vec<_>>());
        }
        assert_eq!(postgres.len(), sqlite.len());
    }
}
