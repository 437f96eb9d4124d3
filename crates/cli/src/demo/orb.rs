//! Orb: pools of publishers and subscribers, and a service that sends rejected messages back.

use std::sync::Arc;
use std::time::Duration;

use leveret::amqp::{Properties, Publish};
use leveret::{Attempt, BoxError, ChannelPool, Error, Failure, Queue, QueueType, State};
use leveret_profiles::Orb;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::ledger::{Fate, Ledger};
use super::scenario::{Play, Scenario, Stage};

pub(super) const SCENARIO: Scenario = Scenario {
    title: "Orb",
    about: "operations by pools; what is rejected is sent back later",
    total: |messages| messages,
    open: |stage| Box::pin(open(stage)),
};

/// As AMQP has it.
const PERSISTENT: u8 = 2;

const NAME: &str = "leveret-demo.orb";
const OPERATIONS: &str = "leveret-demo.orb.operations";
const OBSERVER: &str = "leveret-demo.orb.observer";
const PUBLISHERS: usize = 4;
/// How many messages are published each time a channel is borrowed.
const BURST: u64 = 100;
/// How often a burst is published that is not confirmed.
const MAX_BURSTS: u32 = 50;

async fn open(stage: Stage) -> Result<Play, Error> {
    let orb = Orb::new()
        .name(NAME)
        .initial_interval(Duration::from_millis(200))
        .max_attempts(3)
        .queue_type(QueueType::Quorum);
    for queue in [OPERATIONS, OBSERVER] {
        stage.client.apply(&orb.topology(Queue::quorum(queue))?).await?;
    }
    let pool = stage.client.channel_pool().size(PUBLISHERS).build().await?;
    Ok(Box::pin(async move {
        let subscribe = |queue: &str, subscribers| {
            let consumer = stage.client.consumer(queue).subscribers(subscribers).workers(4);
            let consumer = consumer.retry(orb.clone()).state(Arc::clone(&stage.ledger));
            consumer.handle(observe).run_until(stage.over())
        };
        let lot = format!("{NAME}.parked");
        let posting = async {
            post_all(&pool, &stage.ledger).await;
            stage.end().await;
        };
        let (operations, observer, redelivered, parked, ()) = tokio::join!(
            subscribe(OPERATIONS, 4),
            subscribe(OBSERVER, 2),
            orb.redelivery(&stage.client).run_until(stage.over()),
            stage.watch_lot(&lot),
            posting
        );
        redelivered?;
        for summary in [operations?, observer?, parked?] {
            stage.ledger.add(&summary);
        }
        Ok(())
    }))
}

/// Publishes all messages in bursts, as many at a time as there are channels.
async fn post_all(pool: &ChannelPool, ledger: &Arc<Ledger>) {
    let total = ledger.total();
    let mut publishers = JoinSet::new();
    for first in (0..total).step_by(BURST as usize) {
        if publishers.len() >= PUBLISHERS {
            publishers.join_next().await;
        }
        let (pool, ledger) = (pool.clone(), Arc::clone(ledger));
        publishers
            .spawn(async move { post(&pool, &ledger, first..total.min(first + BURST)).await });
    }
    while publishers.join_next().await.is_some() {}
}

/// Publishes a burst until all of it is confirmed. A channel knows how many messages were, not which: so all are sent again.
async fn post(pool: &ChannelPool, ledger: &Ledger, burst: std::ops::Range<u64>) {
    for number in burst.clone() {
        ledger.sent(number, fate(number));
    }
    for _ in 0..MAX_BURSTS {
        match post_once(pool, burst.clone()).await {
            Ok(confirmed) if confirmed == burst.end - burst.start => {
                return burst.for_each(|number| ledger.confirmed(number));
            }
            _ => sleep(Duration::from_millis(100)).await,
        }
    }
    ledger.fault("a burst was never confirmed");
}

/// Publishes a burst over a channel of the pool, and says how many messages of it are confirmed.
async fn post_once(pool: &ChannelPool, burst: std::ops::Range<u64>) -> Result<u64, BoxError> {
    let channel = pool.borrow().await?;
    for number in burst {
        let publish = Publish {
            exchange: NAME,
            routing_key: if number.is_multiple_of(4) { OBSERVER } else { OPERATIONS },
            mandatory: true,
            properties: Properties { delivery_mode: Some(PERSISTENT), ..Properties::default() },
            body: number.to_string().into(),
        };
        drop(channel.publish(&publish).await?);
    }
    Ok(channel.give_back().await?.acked)
}

fn is_hopeless(number: u64) -> bool {
    number % 200 == 13
}

fn fate(number: u64) -> Fate {
    if is_hopeless(number) { Fate::Parked } else { Fate::Done }
}

async fn observe(
    body: String,
    Attempt(attempt): Attempt,
    State(ledger): State<Arc<Ledger>>,
) -> Result<(), Failure> {
    let number = body.parse()?;
    let failures = if number % 20 == 6 { 1 + (number / 20 % 3) as u32 } else { 0 };
    if is_hopeless(number) || attempt <= failures {
        ledger.failed();
        return Err(Failure::retry("the database does not answer").kind("offline"));
    }
    ledger.done(number);
    Ok(())
}
