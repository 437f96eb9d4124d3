//! The Cover Art Archive's indexer: jobs of three kinds, which are tried again four hours later, four times at most.

use std::sync::Arc;
use std::time::Duration;

use leveret::{Attempt, Error, Failure, QueueType, State};
use leveret_profiles::CoverArt;

use super::ledger::{Fate, Ledger};
use super::scenario::{Play, Scenario, Stage};

pub(super) const SCENARIO: Scenario = Scenario {
    title: "cover art",
    about: "jobs on images; what fails waits 4 hours (4 h are 1 s here)",
    total: |messages| messages,
    open: |stage| Box::pin(open(stage)),
};

const NAME: &str = "leveret-demo.cover-art-archive";
const FOUR_HOURS: Duration = Duration::from_secs(1);
const RETRIES: u32 = 4;

/// What is the matter with a job.
enum Trouble {
    None,
    /// It goes well after so many failures.
    Busy(u32),
    /// It never goes well, which only shows by and by.
    Broken,
    /// It never will, and that is known at once.
    Gone,
}

fn trouble(job: u64) -> Trouble {
    match job % 200 {
        7 => Trouble::Broken,
        107 => Trouble::Gone,
        n if n % 20 == 3 => Trouble::Busy(1 + (n / 20 % 2) as u32),
        _ => Trouble::None,
    }
}

async fn open(stage: Stage) -> Result<Play, Error> {
    let retry = CoverArt::new().name(NAME).interval(FOUR_HOURS).max_retries(RETRIES);
    let retry = retry.queue_type(QueueType::Quorum);
    stage.client.apply(&retry.topology()?).await?;
    let publisher = stage.client.publisher(NAME).build().await?;
    Ok(Box::pin(async move {
        let indexer = |job: &str| {
            let consumer = stage.client.consumer(format!("{NAME}.{job}")).workers(16);
            let consumer = consumer.retry(retry.clone()).state(Arc::clone(&stage.ledger));
            consumer.handle(work).run_until(stage.over())
        };
        let failed = format!("{NAME}.failed");
        let requesting = async {
            let request = |job| (job, kind(job), fate(job));
            stage.send(&publisher, (0..stage.ledger.total()).map(request)).await;
            stage.end().await;
        };
        let (index, delete, moving, failed, ()) = tokio::join!(
            indexer("index"),
            indexer("delete"),
            indexer("move"),
            stage.watch_lot(&failed),
            requesting
        );
        for summary in [index?, delete?, moving?, failed?] {
            stage.ledger.add(&summary);
        }
        Ok(())
    }))
}

fn kind(job: u64) -> &'static str {
    match job % 10 {
        8 => "delete",
        9 => "move",
        _ => "index",
    }
}

fn fate(job: u64) -> Fate {
    match trouble(job) {
        Trouble::None | Trouble::Busy(_) => Fate::Done,
        Trouble::Broken | Trouble::Gone => Fate::Parked,
    }
}

async fn work(
    job: String,
    Attempt(attempt): Attempt,
    State(ledger): State<Arc<Ledger>>,
) -> Result<(), Failure> {
    let job = job.parse()?;
    let failure = match trouble(job) {
        Trouble::Busy(failures) if attempt <= failures => Failure::retry("the archive is busy"),
        Trouble::Broken => Failure::retry("the image cannot be read").kind("broken"),
        Trouble::Gone => Failure::permanent("there is no such release").kind("gone"),
        Trouble::None | Trouble::Busy(_) => {
            ledger.done(job);
            return Ok(());
        }
    };
    ledger.failed();
    Err(failure)
}
