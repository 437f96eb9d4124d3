//! Calls and answers with Leveret.

use std::time::Instant;

use bytes::Bytes;
use leveret::{Client, Queue};

use super::jobs::{Callers, METHOD, PATIENCE, PREFETCH, Run, SERVICE, all_callers, body, share};
use crate::client::{Failure, Latency, Measured, Meter};

async fn connect(run: Run) -> Result<Client, Failure> {
    Ok(Client::connect(format!("amqp://127.0.0.1:{}", run.port)).await?)
}

pub(super) async fn call(run: Run) -> Result<Measured, Failure> {
    let client = connect(run).await?;
    let rpc = client.rpc(SERVICE).build().await?;
    let meter = Meter::start();
    let caller = |caller| {
        let rpc = rpc.clone();
        async move {
            let mut times = Vec::new();
            for number in share(caller, run) {
                let began = Instant::now();
                let request = Bytes::from(body(number, run.size));
                let mut call = rpc.call(METHOD, request.clone());
                if run.timeout {
                    call = call.timeout(PATIENCE);
                }
                let reply: Bytes = call.await?;
                if reply != request {
                    return Err(format!("call {number} got the reply to another").into());
                }
                times.push(began.elapsed());
            }
            Ok(times)
        }
    };
    let times = all_callers(run, |number| Box::pin(caller(number))).await?;
    let mut measured = meter.stop(run.calls);
    measured.latency = Latency::of(times.into_iter().flatten().collect());
    client.close().await;
    Ok(measured)
}

/// Answers until `stop` is done.
pub(super) async fn serve(
    run: Run,
    ready: impl FnOnce(),
    stop: impl Future<Output = ()>,
) -> Result<Measured, Failure> {
    let client = connect(run).await?;
    // As lapin's: both find it there, whoever comes first.
    let mut service = client
        .service(SERVICE)
        .queue(Queue::classic(SERVICE))
        .workers(PREFETCH.into())
        .prefetch(PREFETCH)
        .method(METHOD, async |body: Bytes| body);
    if run.handlers == Callers::Together {
        service = service.in_one_task();
    }
    client.apply(&service.topology()).await?;
    let meter = Meter::start();
    ready();
    let summary = service.run_until(stop).await?;
    let measured = meter.stop(run.calls);
    if summary.handled < run.calls {
        return Err(format!("only {} requests were answered", summary.handled).into());
    }
    client.close().await;
    Ok(measured)
}
