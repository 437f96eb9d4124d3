//! What most programs need, for `use leveret::prelude::*`.

pub use crate::{
    Attempt, BoxError, Client, Delivery, Error, ErrorKind, Event, Exchange, Failure, Headers,
    Incoming, Json, Message, MsgPack, Next, OnLoss, Publisher, Queue, Retry, RetryPolicy, State,
    Topology,
};
