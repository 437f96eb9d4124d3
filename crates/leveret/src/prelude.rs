//! What most programs need, for `use leveret::prelude::*`.

pub use crate::{
    Attempt, BoxError, Client, ClientEvent, Delivery, Emit, Error, ErrorKind, Events, Exchange,
    Failure, Headers, Incoming, Json, Message, MsgPack, Next, OnLoss, Publisher, Queue, Retry,
    RetryPolicy, State, Topology,
};
