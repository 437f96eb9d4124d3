//! Channels that outlive a connection, for whatever publishes.

mod reliable_channel;
mod resend;

pub(crate) use reliable_channel::{ChannelState, LossCause, ReliableChannel, UsableChannel};
pub(crate) use resend::{PoisonBisection, Resend};
