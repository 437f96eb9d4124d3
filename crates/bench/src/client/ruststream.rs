//! The jobs, done by RustStream on lapin: its publisher with confirms, many publishes at once, and an application with a
//! handler per queue.

use std::num::{NonZeroU16, NonZeroUsize};

use futures_util::{TryFutureExt as _, stream};
use ruststream::runtime::{
    AppInfo, Context, Handler, HandlerMetadata, HandlerResult, Router, RustStream, RustStreamError,
    Workers,
};
use ruststream::{
    Broker as _, ConnectedBroker as _, IncomingMessage as _, OutgoingMessage, Publisher as _,
};
use ruststream_lapin::{ConfirmsPublisher, LapinBroker, LapinMessage, LapinPublish, RabbitQueue};

use super::channels::{Tally, concurrent, measure};
use super::jobs::{CONFIRM_WINDOW, Job, PREFETCH, Run};
use crate::by_hand::uri;
use crate::countdown::Countdown;
use crate::meter::{Failure, Measured, Meter, expect};

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    match run.job {
        Job::Confirm => confirm_all(run).await,
        Job::Consume => consume_all(run).await,
        other => Err(format!("RustStream is not asked for {other:?}").into()),
    }
}

async fn confirm_all(run: Run) -> Result<Measured, Failure> {
    let broker = LapinBroker::new(uri(run.setting.port)).connect().await?;
    // Each has a channel of its own.
    let publisher = |_| broker.publisher(LapinPublish::default().confirms());
    let measured =
        measure(run, (0..run.setting.channels).map(publisher).collect(), confirm).await?;
    // It is done; that the channels were dropped just before makes lapin report an error here.
    let _ = broker.shutdown().await;
    Ok(measured)
}

async fn confirm(publisher: ConfirmsPublisher, index: u64, run: Run) -> Result<Tally, Failure> {
    let (queue, body) = (run.queue(index), run.body());
    let confirmed = concurrent(stream::iter(0..run.share()), CONFIRM_WINDOW, |_| {
        publisher.publish(OutgoingMessage::new(&queue, &body)).map_ok(|()| true)
    });
    expect("were confirmed", run.share(), confirmed.await?)?;
    Ok(Tally::default())
}

/// How many handlers run at once, each until its ack is written. One alone costs three times as much; more than these,
/// the same.
const WORKERS: usize = 100;

async fn consume_all(run: Run) -> Result<Measured, Failure> {
    let handled = Countdown::new(run.messages);
    let prefetch = NonZeroU16::new(PREFETCH).ok_or("no prefetch")?;
    let workers = Workers::pool(NonZeroUsize::new(WORKERS).ok_or("no workers")?);
    let app = RustStream::new(AppInfo::new("bench", "0")).with_broker(
        LapinBroker::new(uri(run.setting.port)).prefetch(prefetch),
        |scope| {
            for index in 0..run.setting.channels {
                let (queue, handler) = (run.queue(index), handler(run, handled.clone()));
                let router = Router::new().subscribe(
                    RabbitQueue::new(&queue),
                    handler,
                    HandlerMetadata::raw(queue),
                );
                scope.include_router(router.workers(workers));
            }
        },
    );
    // It connects and subscribes in one go: both are in the measure, a millisecond in a second.
    let meter = Meter::start();
    match app.run_until(handled.done()).await {
        // As above.
        Ok(()) | Err(RustStreamError::Shutdown(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let measured = meter.stop(run.messages);
    expect("were handled", run.messages, handled.count())?;
    Ok(measured)
}

fn handler(run: Run, handled: Countdown) -> impl Handler<LapinMessage> {
    move |message: &LapinMessage, _: &mut Context<'_>| {
        let is_right = message.payload().len() == run.setting.size;
        let handled = handled.clone();
        async move {
            if !is_right {
                return HandlerResult::drop();
            }
            handled.add(1);
            HandlerResult::Ack
        }
    }
}
