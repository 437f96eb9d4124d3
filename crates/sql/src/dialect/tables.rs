//! The names of tables, and the steps that make them.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

/// A step of the tables: SQL in which `{outbox}` stands for the table of this name.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// From 1 on.
    pub version: i32,
    /// A word for it.
    pub name: &'static str,
    /// The statements.
    pub sql: &'static str,
}

/// The tables of a [`Schema`](crate::Schema): puts their names into SQL.
#[derive(Clone)]
pub struct Tables {
    name: Arc<str>,
    /// With names put in. The keys are texts of the program, so there are only so many.
    texts: Arc<RwLock<HashMap<(&'static str, &'static str), SqlStr>>>,
}

impl Tables {
    /// The name was checked: nothing else is ever put into SQL.
    pub(crate) fn new(name: &str) -> Self {
        Tables { name: name.into(), texts: Arc::default() }
    }

    /// The name of the schema.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// SQL with `"name"."outbox"` for `{outbox}`.
    pub fn qualified(&self, sql: &'static str) -> SqlStr {
        self.named("\".\"", sql)
    }

    /// SQL with `"name_outbox"` for `{outbox}`.
    pub fn prefixed(&self, sql: &'static str) -> SqlStr {
        self.named("_", sql)
    }

    fn named(&self, separator: &'static str, sql: &'static str) -> SqlStr {
        let key = (separator, sql);
        let known = self.texts.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        known.unwrap_or_else(|| {
            let named = replace_names(sql, &format!("{}{separator}", self.name));
            let named = AssertSqlSafe(Arc::<str>::from(named)).into_sql_str();
            let mut texts = self.texts.write().unwrap_or_else(PoisonError::into_inner);
            texts.entry(key).or_insert(named).clone()
        })
    }
}

/// Other braces stay, such as those of arrays and JSON.
fn replace_names(sql: &str, prefix: &str) -> String {
    let is_name = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase())
    };
    let (mut named, mut rest) = (String::new(), sql);
    while let Some((before, after)) = rest.split_once('{') {
        named.push_str(before);
        rest = match after.split_once('}') {
            Some((name, after)) if is_name(name) => {
                named.push_str(&format!("\"{prefix}{name}\""));
                after
            }
            _ => {
                named.push('{');
                after
            }
        };
    }
    named + rest
}

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tables({:?})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_named_by_schema_or_prefix() {
        let tables = Tables::new("own");
        for _ in 0..2 {
            assert_eq!(tables.qualified("FROM {outbox} o").as_str(), r#"FROM "own"."outbox" o"#);
            assert_eq!(tables.prefixed("FROM {outbox} o").as_str(), r#"FROM "own_outbox" o"#);
        }
    }

    #[test]
    fn braces_without_a_name_stay() {
        let tables = Tables::new("own");
        for sql in ["DEFAULT '{}'", "'{1,2}' || '{'", "'}{'", r#"'{"a": {"b": 1}}'"#] {
            assert_eq!(tables.qualified(sql).as_str(), sql);
        }
        let sql = tables.prefixed("CREATE TABLE {own_marks} (a TEXT DEFAULT '{}', b TEXT) -- {x}");
        let named = "CREATE TABLE \"own_own_marks\" (a TEXT DEFAULT '{}', b TEXT) -- \"own_x\"";
        assert_eq!(sql.as_str(), named);
    }
}
