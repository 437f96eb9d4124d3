//! A line on the terminal that says what the broker is doing.

use std::time::Duration;

use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use leveret_broker::Broker;
use leveret_broker::snapshot::Statistics;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// How often the line is drawn.
const EVERY: Duration = Duration::from_millis(500);

/// The line, as long as it is shown.
#[derive(Debug)]
pub(super) struct Rates {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Rates {
    pub(super) fn show(broker: Broker) -> Self {
        let (stop, stopped) = oneshot::channel();
        Rates { stop, task: tokio::spawn(draw(broker, stopped)) }
    }

    /// Takes the line away.
    pub(super) async fn stop(self) {
        let _ = self.stop.send(());
        let _ = self.task.await;
    }
}

async fn draw(broker: Broker, mut stopped: oneshot::Receiver<()>) {
    let line = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
        line.set_style(style);
    }
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut before, mut at) = (broker.statistics(), Instant::now());
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = &mut stopped => break,
        }
        let (now, seconds) = (broker.statistics(), at.elapsed().as_secs_f64());
        at = Instant::now();
        line.set_message(summary(&before, &now, seconds));
        line.tick();
        before = now;
    }
    line.finish_and_clear();
}

fn summary(before: &Statistics, now: &Statistics, seconds: f64) -> String {
    let rate = |before: u64, now: u64| {
        let rate = (now - before) as f64 / seconds.max(0.001);
        HumanCount(rate.round() as u64)
    };
    format!(
        "{} connections, {} queues · in {}/s · out {}/s · acked {}/s · {} ready, {} unsettled · {}",
        now.connections,
        now.queues,
        rate(before.tally.published, now.tally.published),
        rate(before.tally.delivered, now.tally.delivered),
        rate(before.tally.acked, now.tally.acked),
        HumanCount(now.ready as u64),
        HumanCount(now.unsettled as u64),
        HumanBytes(now.memory as u64),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_per_second() {
        let before = Statistics::default();
        let mut now = before;
        now.tally.published = 1500;
        now.ready = 12_345;
        let line = summary(&before, &now, 0.5);
        assert!(line.contains("in 3,000/s") && line.contains("12,345 ready"), "{line}");
    }
}
