//! Calls and services, the same on every broker.

mod calls;
mod services;

use leveret::{Error, Json, Replies, Rpc};

use crate::support::client::soon;

const ALL_REPLIES: [Replies; 3] = [Replies::Direct, Replies::Queue, Replies::QueuePerCall];

async fn call_double(rpc: &Rpc, number: u64) -> Result<u64, Error> {
    let Json(doubled): Json<u64> = soon("a reply", rpc.call("double", Json(number))).await?;
    Ok(doubled)
}
