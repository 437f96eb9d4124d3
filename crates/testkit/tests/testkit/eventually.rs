//! Polling with a deadline.

use std::time::Duration;

use leveret_testkit::eventually;
use tokio::time::Instant;

const DEADLINE: Duration = Duration::from_secs(5);

#[tokio::test(start_paused = true)]
async fn it_ends_with_the_first_yes() {
    let begin = Instant::now();
    let half_way = begin + DEADLINE / 2;
    eventually(DEADLINE, "half of the time", async || Instant::now() >= half_way).await;
    assert!(begin.elapsed() < DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn it_returns_what_the_check_found() {
    assert_eq!(eventually(DEADLINE, "an option", async || Some(3)).await, 3);
    assert_eq!(eventually(DEADLINE, "a result", async || Ok::<_, String>("here")).await, "here");
}

#[tokio::test(start_paused = true)]
async fn it_says_what_was_awaited_in_vain_and_where() {
    let message = panic_of(eventually(DEADLINE, "the cows to come home", async || false)).await;
    assert!(message.starts_with("waited 5s for the cows to come home, in vain"), "{message}");
    assert!(message.contains(file!()), "{message}");
}

#[tokio::test(start_paused = true)]
async fn it_says_what_the_last_error_was() {
    let message =
        panic_of(eventually(DEADLINE, "luck", async || Err::<(), _>("no luck today"))).await;
    assert!(message.contains("no luck today"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn a_check_that_hangs_is_given_up_at_the_deadline() {
    let begin = Instant::now();
    panic_of(eventually(DEADLINE, "nothing", std::future::pending::<bool>)).await;
    assert_eq!(begin.elapsed().as_secs(), DEADLINE.as_secs());
}

async fn panic_of(polling: impl Future<Output = ()> + Send + 'static) -> String {
    let panic = tokio::spawn(polling).await.expect_err("it did not panic").into_panic();
    panic.downcast_ref::<String>().expect("a panic with a message").clone()
}
