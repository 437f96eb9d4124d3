//! A database per test, on the one PostgreSQL that serves a whole test run.

use std::process::{Command, Stdio};

use reqwest::Url;
use tokio::sync::OnceCell;

use super::Postgres;
use super::programs::{psql, run};
use crate::name::unique_name;

/// A database of its own. Dropping it deletes it, connections or not; a failure of that is ignored,
/// as the server may be down on purpose.
#[derive(Debug)]
pub struct Database {
    name: String,
    url: String,
    server_url: String,
}

impl Database {
    /// Its name: that of the test and a random number.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The URL that leads here.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Runs SQL with `psql` and returns what it printed: a row per line, columns separated by `|`.
    ///
    /// # Panics
    /// If it fails.
    pub async fn sql(&self, sql: &str) -> String {
        run(&psql(&self.url, sql)).await.unwrap_or_else(|error| panic!("{error}"))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let command =
            psql(&self.server_url, &format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name));
        let quiet = || Stdio::null();
        let _ = Command::new(&command[0])
            .args(&command[1..])
            .stdin(quiet())
            .stdout(quiet())
            .stderr(quiet())
            .status();
    }
}

/// Makes a fresh database on the shared PostgreSQL: what most tests begin with.
///
/// # Panics
/// If there is no PostgreSQL; the message says how to get one.
pub async fn database() -> Database {
    create(shared_url().await).await
}

/// The URL of the PostgreSQL that all tests of a run share.
///
/// It is the one that `LEVERET_POSTGRES_URL` names; the program `with-servers` starts one and sets
/// this for a whole run. Where it is not set, one is started for this process and ends with it.
///
/// # Panics
/// If there is no PostgreSQL; the message says how to get one.
pub async fn shared_url() -> &'static str {
    /// The server, where it is ours, stays here for as long as the process lives. Statics are never
    /// dropped, so it is the server's guardians that end it.
    static SHARED: OnceCell<(String, Option<Postgres>)> = OnceCell::const_new();
    let (url, _) = SHARED
        .get_or_init(async || match std::env::var("LEVERET_POSTGRES_URL") {
            Ok(url) => (url, None),
            Err(_) => {
                let postgres = Postgres::start().await;
                (postgres.url(), Some(postgres))
            }
        })
        .await;
    url
}

pub(super) async fn create(server_url: &str) -> Database {
    let name = unique_name();
    let made = run(&psql(server_url, &format!("CREATE DATABASE {name}"))).await;
    made.unwrap_or_else(|error| panic!("could not make the database {name}: {error}"));
    let mut url =
        Url::parse(server_url).unwrap_or_else(|error| panic!("{server_url:?} is no URL: {error}"));
    url.set_path(&name);
    Database { name, url: url.to_string(), server_url: server_url.to_owned() }
}
