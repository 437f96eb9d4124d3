//! Databases on the PostgreSQL that serves the whole run.

use std::time::Duration;

use leveret_testkit::{FaultProxy, eventually, postgres};
use tokio::net::TcpStream;

const SOON: Duration = Duration::from_secs(60);

#[tokio::test]
async fn each_test_gets_a_database_of_its_own_that_goes_away_with_it() {
    let (one, other) = tokio::join!(postgres::database(), postgres::database());
    assert_ne!(one.name(), other.name());
    one.sql("CREATE TABLE thing (id int)").await;
    assert_eq!(other.sql("SELECT to_regclass('thing') IS NULL").await, "t");

    let look = format!("SELECT count(*) FROM pg_database WHERE datname = '{}'", one.name());
    assert_eq!(other.sql(&look).await, "1");
    drop(one);
    assert_eq!(other.sql(&look).await, "0");
}

#[tokio::test]
async fn a_proxy_can_stand_before_a_database() {
    let database = postgres::database().await;
    let server = database
        .url()
        .split('@')
        .nth(1)
        .and_then(|rest| rest.split('/').next())
        .unwrap()
        .to_owned();
    let proxy = FaultProxy::to(server).await;
    assert!(proxy.url(database.url()).ends_with(&format!("@{}/{}", proxy.addr(), database.name())));
    drop(TcpStream::connect(proxy.addr()).await.unwrap());
    eventually(SOON, "the connection to pass", async || {
        proxy.seen().connections == 1 && proxy.seen().open == 0
    })
    .await;
}
