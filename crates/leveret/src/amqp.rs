//! One connection to a broker, without recovery: the crate `leveret-amqp`.

#[doc(inline)]
pub use leveret_amqp::*;

pub(crate) use leveret_amqp::seam::*;
