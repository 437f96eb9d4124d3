//! Chandra: batches that are published, confirmed, handled and acked together, one dead-letter exchange, and a parking lot.

use std::sync::Arc;
use std::time::Duration;

use leveret::{
    BatchOptions, BatchOutcome, BoxError, Error, Exchange, Failure, Incoming, Publisher, Queue,
};
use leveret_profiles::Chandra;

use super::ledger::{Fate, Ledger};
use super::scenario::{Play, Scenario, Stage};

pub(super) const SCENARIO: Scenario = Scenario {
    title: "Chandra",
    about: "photons in batches, confirmed and acked as a whole",
    total: |messages| messages,
    open: |stage| Box::pin(open(stage)),
};

const EXCHANGE: &str = "leveret-demo.chandra";
const QUEUE: &str = "leveret-demo.chandra.photons";
const BATCH: u16 = 100;

async fn open(stage: Stage) -> Result<Play, Error> {
    let retry = Chandra::new(Exchange::topic(EXCHANGE));
    let retry = retry.interval(Duration::from_millis(800)).max_retries(3);
    let queue = Queue::quorum(QUEUE).bind(EXCHANGE, "photon.*");
    stage.client.apply(&retry.topology(queue)?).await?;
    let publisher = stage.client.publisher(EXCHANGE).build().await?;
    Ok(Box::pin(async move {
        let options = BatchOptions { size: BATCH, within: Duration::from_millis(50) };
        let ledger = Arc::clone(&stage.ledger);
        let handler = move |batch| see(batch, Arc::clone(&ledger));
        let consumer = stage.client.consumer(QUEUE).prefetch(3 * BATCH).retry(retry);
        let lot = format!("{QUEUE}.parking_lot");
        let shining = async {
            shine(&publisher, &stage.ledger).await;
            stage.end().await;
        };
        let (seen, parked, ()) = tokio::join!(
            consumer.handle_batches(options, handler).run_until(stage.over()),
            stage.watch_lot(&lot),
            shining
        );
        for summary in [seen?, parked?] {
            stage.ledger.add(&summary);
        }
        Ok(())
    }))
}

/// Publishes batch after batch. Of one that is not confirmed as a whole, it is known which messages are not.
async fn shine(publisher: &Publisher, ledger: &Ledger) {
    let total = ledger.total();
    for first in (0..total).step_by(usize::from(BATCH)) {
        let photons = first..total.min(first + u64::from(BATCH));
        for photon in photons.clone() {
            ledger.sent(photon, fate(photon));
        }
        let batch = photons.clone().map(|photon| ("photon.xray", photon.to_string()));
        let failed = match publisher.publish_batch(batch).await {
            Ok(_) => Vec::new(),
            Err(error) => {
                ledger.fault(error.to_string());
                error.failed().iter().map(|(place, _)| first + *place as u64).collect()
            }
        };
        photons
            .filter(|photon| !failed.contains(photon))
            .for_each(|photon| ledger.confirmed(photon));
    }
}

fn is_noise(photon: u64) -> bool {
    photon % 200 == 17
}

fn fate(photon: u64) -> Fate {
    if is_noise(photon) { Fate::Parked } else { Fate::Done }
}

/// Looks at each photon of a batch: those that fail are rejected one by one, and the others acked.
async fn see(batch: Vec<Incoming>, ledger: Arc<Ledger>) -> BatchOutcome {
    BatchOutcome::Each(batch.iter().map(|photon| look_at(photon, &ledger)).collect())
}

fn look_at(incoming: &Incoming, ledger: &Ledger) -> Result<(), BoxError> {
    let photon = std::str::from_utf8(incoming.body())?.parse()?;
    if is_noise(photon) {
        ledger.failed();
        return Err(Failure::permanent("this is noise").kind("noise").into());
    }
    if photon % 40 == 9 && incoming.attempt() <= 1 + (photon / 40 % 3) as u32 {
        ledger.failed();
        return Err(Failure::retry("the mirror is turning").kind("turning").into());
    }
    ledger.done(photon);
    Ok(())
}
