//! Which RabbitMQ the broker behaves like, where they differ.

use std::fmt;

use leveret_wire::FrameMax;

/// A version of RabbitMQ to behave like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Profile {
    /// RabbitMQ 3.10.
    RabbitMq3_10,
    /// RabbitMQ 4.3.
    #[default]
    RabbitMq4_3,
}

impl Profile {
    /// The version that clients are told.
    pub(crate) fn version(self) -> &'static str {
        match self {
            Profile::RabbitMq3_10 => "3.10.8",
            Profile::RabbitMq4_3 => "4.3.6",
        }
    }

    /// The largest body of a message that it takes.
    pub(crate) fn max_message_size(self) -> u64 {
        match self {
            Profile::RabbitMq3_10 => 128 * 1024 * 1024,
            Profile::RabbitMq4_3 => 16 * 1024 * 1024,
        }
    }

    /// The largest frame that it takes before a limit is agreed on.
    pub(crate) fn handshake_frame_max(self) -> FrameMax {
        match self {
            Profile::RabbitMq3_10 => FrameMax::MIN,
            Profile::RabbitMq4_3 => FrameMax::new(8192).unwrap_or(FrameMax::MIN),
        }
    }

    pub(crate) fn is_at_least_4(self) -> bool {
        self >= Profile::RabbitMq4_3
    }
}

/// The version's number.
impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Profile::RabbitMq3_10 => "3.10",
            Profile::RabbitMq4_3 => "4.3",
        })
    }
}
