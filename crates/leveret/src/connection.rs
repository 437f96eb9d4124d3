//! The connections of a client and the channels on them, which come back when they are lost.

mod backoff;
pub(crate) mod checkup;
pub(crate) mod core;
pub(crate) mod endpoint;
pub(crate) mod event;
mod extensions;
mod handle;
pub(crate) mod health;
pub(crate) mod managed;
pub(crate) mod registry;
mod reliable_channel;
mod resend;
mod version;

pub use backoff::Backoff;
pub use core::ConnectLimits;
pub use endpoint::IntoEndpoints;
pub use event::{ClientEvent, ClientEvents, ParkReason};
pub use handle::Client;
pub use health::{
    CallerHealth, ConnectionHealth, ConsumerHealth, Health, PoolHealth, PublisherHealth,
};

pub(crate) use reliable_channel::{ChannelState, LossCause, ReliableChannel, UsableChannel};
pub(crate) use resend::{PoisonBisection, Resend, ResendSearching, resend_all};
pub(crate) use version::version;
