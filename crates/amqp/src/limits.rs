//! Every wait has a deadline and every buffer a bound: these.

use std::time::Duration;

/// Deadlines and bounds of a connection. The defaults suit a service; a test may want shorter ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long the broker may take to answer a call. A channel on which it takes longer is closed.
    pub reply_timeout: Duration,
    /// How long a publish may wait for room: because the broker blocks the connection, or does not take what was sent
    /// before, or because too many publishes are unconfirmed.
    pub publish_timeout: Duration,
    /// How many publishes of a channel there may be from the oldest unconfirmed one on, before the next one waits.
    pub max_unconfirmed: usize,
    /// How many deliveries may wait in memory for a consumer that names no prefetch, or has auto-ack. Without auto-ack
    /// the broker is asked to send no more; with it, nothing is read from the connection until the consumer takes them.
    pub consumer_buffer: usize,
    /// The same in bytes of bodies, for consumers with auto-ack.
    pub consumer_buffer_bytes: usize,
    /// How long reading may stop for a consumer with auto-ack, before it is ended so that the others go on. RabbitMQ
    /// gives up a connection on which it could not write for 15 seconds.
    pub slow_consumer_timeout: Duration,
    /// The largest message that is taken. RabbitMQ sends none over 512 MiB. A larger one ends the connection, and stays in
    /// its queue: a limit below the broker's is for a client that would rather stop than take it.
    pub max_message_size: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            reply_timeout: Duration::from_secs(30),
            publish_timeout: Duration::from_secs(30),
            max_unconfirmed: 65_536,
            consumer_buffer: 4096,
            consumer_buffer_bytes: 64 * 1024 * 1024,
            slow_consumer_timeout: Duration::from_secs(10),
            max_message_size: 512 * 1024 * 1024,
        }
    }
}
