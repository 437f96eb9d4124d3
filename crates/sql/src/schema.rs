//! Where the tables are.

#[cfg(doc)]
use crate::dialect::Dialect;
use crate::dialect::{BuiltIn, Tables};
use crate::error::{Error, ErrorKind};

/// PostgreSQL cuts names off after 63 bytes; ours have something appended to them.
const LONGEST: usize = 40;

/// The place of our tables among those of the application: a schema of PostgreSQL, or a prefix of the names of tables in
/// SQLite. `leveret` by default.
///
/// ```
/// # use leveret_sql::Schema;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// let schema = Schema::new("billing")?;
/// schema.migrate(&pool).await?; // makes the tables billing_outbox and so on, or brings them up to date
/// # Ok(())
/// # }
/// ```
///
/// Another database has a [`Dialect`] of its own, see [`with_dialect`](Self::with_dialect).
#[derive(Clone, Debug)]
pub struct Schema<L = BuiltIn> {
    tables: Tables,
    dialect: L,
}

impl Schema {
    /// A name of ASCII letters, digits and underscores that does not begin with a digit or what databases keep for themselves,
    /// `pg_` and `sqlite_`, of 40 bytes at most. On PostgreSQL it is taken as it is written: `Billing` is not `billing`. SQLite
    /// does not tell them apart.
    pub fn new(name: impl AsRef<str>) -> Result<Self, Error> {
        Schema::with_dialect(name, BuiltIn)
    }
}

impl<L> Schema<L> {
    /// The same in a database of which this [`Dialect`] knows.
    pub fn with_dialect(name: impl AsRef<str>, dialect: L) -> Result<Self, Error> {
        let name = name.as_ref();
        let is_sound = (1..=LONGEST).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && !name.as_bytes()[0].is_ascii_digit()
            && !is_reserved(name);
        if is_sound {
            return Ok(Schema { tables: Tables::new(name), dialect });
        }
        let text = format!(
            "{name:?} is no name for a schema: take ASCII letters, digits and underscores, {LONGEST} at most, with no digit, \
             no pg_ and no sqlite_ at the beginning, and neither is sqlite one"
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.tables.name()
    }

    pub(crate) fn tables(&self) -> &Tables {
        &self.tables
    }

    pub(crate) fn dialect(&self) -> &L {
        &self.dialect
    }
}

impl<L: PartialEq> PartialEq for Schema<L> {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name() && self.dialect == other.dialect
    }
}

impl<L: Eq> Eq for Schema<L> {}

/// Whether a database keeps such names for itself: PostgreSQL those of schemas, SQLite those of tables.
fn is_reserved(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.starts_with("pg_") || format!("{name}_outbox").starts_with("sqlite_")
}

impl Default for Schema {
    fn default() -> Self {
        Schema { tables: Tables::new("leveret"), dialect: BuiltIn }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_be_more_than_names_are_refused() {
        let reserved = ["pg_own", "PG_own", "sqlite", "SQLite_own"];
        for name in ["", "a b", "a\"b", "a;b", "1a", "ä", &"a".repeat(41)].iter().chain(&reserved)
        {
            assert_eq!(Schema::new(name).unwrap_err().kind(), ErrorKind::Invalid, "{name}");
        }
        for name in ["a", "_1", "Billing", "sqlites", "pg", &"a".repeat(40)] {
            assert!(Schema::new(name).is_ok(), "{name}");
        }
    }
}
