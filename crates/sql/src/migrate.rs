//! The tables: made, and brought up to date, in numbered steps.
//!
//! Each schema has a table `migrations` of its own, which says what was done; the application's own migrations, by sqlx or
//! otherwise, are never looked at. Steps are never changed once they were released: what changes is a further step, a file in
//! `migrations/` for each database and a line here.

#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;

use crate::backend::Backend;
use crate::error::{Error, ErrorKind};
use crate::schema::Schema;

/// A step: SQL in which `{outbox}` stands for our table of this name.
struct Migration {
    version: i32,
    name: &'static str,
    sql: &'static str,
}

macro_rules! migrations {
    ($folder:literal: $($version:literal $name:literal),*) => {
        [$(Migration {
            version: $version,
            name: $name,
            sql: include_str!(concat!("../migrations/", $folder, "/", $version, "_", $name, ".sql")),
        }),*]
    };
}

#[cfg(feature = "postgres")]
const POSTGRES: &[Migration] = &migrations!("postgres": 1 "outbox", 2 "inbox", 3 "sequences");

#[cfg(feature = "sqlite")]
const SQLITE: &[Migration] = &migrations!("sqlite": 1 "outbox", 2 "inbox", 3 "sequences");

impl Schema {
    /// Makes the tables, or brings them up to date. Several instances of a program may do this at the same time: one
    /// does it, and the others wait for that.
    ///
    /// Tables that a later version of this crate has changed are left alone: [`ErrorKind::NewerSchema`].
    ///
    /// On PostgreSQL it needs the right to make tables there, and to make the schema if it does not exist yet.
    pub async fn migrate<D: Backend>(&self, pool: &sqlx::Pool<D>) -> Result<(), Error> {
        D::migrate(pool, self).await
    }

    /// Fails if the tables are not those that this version of the crate works with.
    pub async fn check<D: Backend>(&self, pool: &sqlx::Pool<D>) -> Result<(), Error> {
        D::check(pool, self).await
    }

    /// Whether the tables are those of now, given the latest step that was made.
    fn is_current(&self, found: Option<i32>, migrations: &[Migration]) -> Result<(), Error> {
        let latest = migrations.last().map_or(0, |migration| migration.version);
        match found {
            Some(found) if found > latest => Err(self.newer(found, latest)),
            Some(found) if found == latest => Ok(()),
            found => {
                let have = found.map_or_else(|| "no tables".to_owned(), |v| format!("version {v}"));
                let text = format!(
                    "schema {:?} has {have}, and version {latest} is needed: call Schema::migrate first",
                    self.name()
                );
                Err(Error::new(ErrorKind::NotMigrated, text))
            }
        }
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
            return Err(self.newer(found, latest));
        }
        Ok(&migrations[migrations.partition_point(|migration| migration.version <= found)..])
    }

    fn newer(&self, found: i32, latest: i32) -> Error {
        let text = format!(
            "schema {:?} has version {found}, made by a later version of leveret-sql; this one knows up to {latest}: \
             update this program, or give it a schema of its own",
            self.name()
        );
        Error::new(ErrorKind::NewerSchema, text)
    }

    fn migrating(&self, error: sqlx::Error) -> Error {
        Error::database(format!("making the tables of schema {:?}", self.name()), error)
    }
}

#[cfg(all(test, feature = "postgres", feature = "sqlite"))]
mod tests {
    use super::*;

    #[test]
    fn steps_are_numbered_without_gaps() {
        for migrations in [POSTGRES, SQLITE] {
            let versions: Vec<i32> = migrations.iter().map(|migration| migration.version).collect();
            assert_eq!(versions, (1..=versions.len() as i32).collect::<Vec<_>>());
        }
        assert_eq!(POSTGRES.len(), SQLITE.len());
    }
}
