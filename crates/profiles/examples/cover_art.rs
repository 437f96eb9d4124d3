//! The indexer of the Cover Art Archive: jobs that fail wait for four hours, and after some retries they end in a queue that a
//! person looks into. Here four hours are half a second.
//!
//! ```text
//! cargo run -p leveret-profiles --example cover_art                                  # with a broker in memory
//! cargo run -p leveret-profiles --example cover_art -- amqp://guest:guest@localhost  # with yours
//! ```

use std::time::Duration;

use leveret::Filter;
use leveret::prelude::*;
use leveret_profiles::CoverArt;
use tokio::sync::mpsc;

/// The archive is away at first, and one of the covers is no picture.
async fn index(cover: String, Attempt(attempt): Attempt) -> Result<(), Failure> {
    match (cover.as_str(), attempt) {
        ("torn.jpg", _) => Err(Failure::permanent("not a picture").kind("format")),
        (_, 1) => Err(Failure::retry("the archive does not answer").kind("network")),
        _ => {
            println!("{cover} is indexed, at attempt {attempt}");
            Ok(())
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let client = match std::env::args().nth(1) {
        Some(url) => Client::connect(url).await?,
        None => Client::embedded().await?,
    };
    // cover-art-archive.index, .delete and .move; .retry, in which jobs wait; .failed, in which they end.
    let retry =
        CoverArt::new().name("example-covers").interval(Duration::from_millis(500)).max_retries(4);
    client.apply(&retry.topology()?).await?;

    let jobs = client.publisher("example-covers").build().await?;
    for cover in ["front.jpg", "back.jpg", "torn.jpg"] {
        jobs.publish("index", cover).await?;
    }

    let failed = client.parking_lot("example-covers.failed");
    let (done, mut until_done) = mpsc::channel::<()>(10);
    let consumer = client.consumer("example-covers.index").retry(retry).state(done);
    let handler =
        async move |cover: String, attempt: Attempt, State(done): State<mpsc::Sender<()>>| {
            index(cover, attempt).await?;
            let _ = done.send(()).await;
            Ok::<(), Failure>(())
        };
    let both = async {
        until_done.recv().await;
        until_done.recv().await;
    };
    let summary = consumer.handle(handler).run_until(both).await?;
    println!(
        "{} indexed, {} tried again, {} failed for good",
        summary.handled, summary.retried, summary.parked
    );

    for job in failed.list(&Filter::new(), 10).await? {
        let story = job.story();
        println!(
            "{}: {}",
            String::from_utf8_lossy(job.body()),
            story.error.as_deref().unwrap_or("?")
        );
    }
    // Once the cause is mended: failed.replay().run().await?
    let purged = failed.purge().run().await?;
    client.close().await;
    match (summary.handled, summary.retried, purged.done) {
        (2, 2, 1) => Ok(()),
        other => {
            Err(format!("expected 2 indexed, 2 tried again and 1 failed, not {other:?}").into())
        }
    }
}
