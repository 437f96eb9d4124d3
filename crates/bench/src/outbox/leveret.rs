//! The job, done by Leveret's relay.

use std::time::Duration;

use leveret::Client;
use leveret_sql::{Order, Outbox};
use tokio::time::sleep;

use super::{Candidate, Run};
use crate::by_hand::uri;
use crate::meter::{Failure, Measured, Meter, expect};

pub(crate) async fn run(run: Run, order: Order) -> Result<Measured, Failure> {
    let client = Client::connect(&*uri(run.setting.port)).await?;
    let outbox = Outbox::default();
    let relay = match run.candidate {
        Candidate::LeveretSqlite => outbox.relay(&client, &run.setting.sqlite().await?),
        _ => outbox.relay(&client, &run.setting.postgres().await?),
    };
    let relay = relay.order(order).build().await?;
    let monitor = relay.monitor();
    let meter = Meter::start();
    let all_are_sent = async {
        while monitor.summary().sent < run.messages {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let summary = relay.run_until(all_are_sent).await?;
    let measured = meter.stop(run.messages);
    expect("were sent", run.messages, summary.sent)?;
    Ok(measured)
}
