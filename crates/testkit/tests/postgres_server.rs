//! PostgreSQL servers of a test's own: what one can do to them.

use std::path::PathBuf;
use std::time::Duration;

use leveret_testkit::postgres::Postgres;
use tokio::net::TcpStream;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(60);

#[tokio::test]
async fn data_survives_stop_kill_and_restart() {
    let mut server = Postgres::start().await;
    let database = server.database().await;
    database.sql("CREATE TABLE letter (body text); INSERT INTO letter VALUES ('still here')").await;

    server.stop().await;
    TcpStream::connect(("127.0.0.1", server.port())).await.expect_err("a stopped server listens");
    server.start_again().await;
    server.kill().await;
    TcpStream::connect(("127.0.0.1", server.port())).await.expect_err("a killed server listens");
    server.start_again().await;
    server.restart().await;

    assert_eq!(database.sql("SELECT body FROM letter").await, "still here");
}

#[tokio::test]
async fn a_server_waits_for_the_disk_if_it_is_asked_to() {
    let (quick, mut on_disk) = tokio::join!(Postgres::start(), Postgres::start_on_disk());
    assert_eq!(quick.database().await.sql("SHOW fsync").await, "off");
    on_disk.restart().await;
    let database = on_disk.database().await;
    assert_eq!(database.sql("SHOW fsync").await, "on");
    assert_eq!(database.sql("SHOW full_page_writes").await, "on");
}

#[tokio::test]
async fn a_suspended_server_answers_again_when_it_is_resumed() {
    let server = Postgres::start().await;
    let database = server.database().await;

    server.suspend().await;
    timeout(Duration::from_millis(500), database.sql("SELECT 1"))
        .await
        .expect_err("a suspended server answered");
    server.resume();
    assert_eq!(
        timeout(SOON, database.sql("SELECT 1")).await.expect("no answer after resuming"),
        "1"
    );
}

#[tokio::test]
async fn two_servers_run_side_by_side_and_leave_nothing_behind() {
    let (one, other) = tokio::join!(Postgres::start(), Postgres::start());
    assert_ne!(one.port(), other.port());
    // Even a suspended one ends.
    other.suspend().await;

    let traces = [&one, &other].map(|server| {
        [PathBuf::from(format!("/proc/{}", server.pid())), server.data_folder().into()]
    });
    assert!(traces.as_flattened().iter().all(|path| path.exists()));
    drop((one, other));
    assert!(traces.as_flattened().iter().all(|path| !path.exists()), "something survived");
}
