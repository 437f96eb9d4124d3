//! Calls and answers with Leveret.

use bytes::Bytes;
use leveret::{Client, Queue};

use super::{CALL_TIMEOUT, METHOD, PREFETCH, Run, SERVICE, Scheduling, call_all, call_in_turn};
use crate::by_hand::uri;
use crate::meter::{Failure, Measured, Meter};

pub(super) async fn call(run: Run) -> Result<Measured, Failure> {
    let client = Client::connect(uri(run.setting.port)).await?;
    let rpc = client.rpc(SERVICE).build().await?;
    let caller = |caller| {
        let rpc = rpc.clone();
        async move {
            let rpc = &rpc;
            let call = |request: Bytes| async move {
                let call = rpc.call(METHOD, request);
                let call =
                    if run.setting.calls.timeout { call.timeout(CALL_TIMEOUT) } else { call };
                Ok(call.await?)
            };
            call_in_turn(run, caller, call).await
        }
    };
    let measured = call_all(run, |number| Box::pin(caller(number))).await?;
    client.close().await;
    Ok(measured)
}

/// Answers until `stop` is done.
pub(super) async fn serve(
    run: Run,
    ready: impl FnOnce(),
    stop: impl Future<Output = ()>,
) -> Result<Measured, Failure> {
    let client = Client::connect(uri(run.setting.port)).await?;
    // As lapin's: each candidate finds it there after the other.
    let mut service = client
        .service(SERVICE)
        .queue(Queue::classic(SERVICE))
        .workers(PREFETCH.into())
        .prefetch(PREFETCH)
        .method(METHOD, async |body: Bytes| body);
    if run.setting.calls.handlers == Scheduling::Together {
        service = service.in_one_task();
    }
    client.apply(&service.topology()).await?;
    let meter = Meter::start();
    ready();
    let summary = service.run_until(stop).await?;
    let measured = meter.stop(run.messages);
    if summary.handled < run.messages {
        return Err(format!("only {} requests were answered", summary.handled).into());
    }
    client.close().await;
    Ok(measured)
}
