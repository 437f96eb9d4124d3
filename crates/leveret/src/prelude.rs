//! What most programs need, for `use leveret::prelude::*`.

pub use crate::{
    BoxError, Client, Delivery, Error, ErrorKind, Event, Exchange, Headers, Incoming, Json,
    Message, MsgPack, Next, OnFailure, OnLoss, Publisher, Queue, State, Topology,
};
