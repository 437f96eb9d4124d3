//! What most programs need, for `use leveret::prelude::*`.

pub use crate::{
    Attempt, BoxError, Client, ClientEvent, Delivery, Emit, End, Error, ErrorKind, Events,
    Exchange, Failure, Headers, Incoming, Json, Message, MsgPack, Next, OnLoss, Publisher, Queue,
    Replier, Reply, Retry, RetryPolicy, Rpc, State, Topology,
};
