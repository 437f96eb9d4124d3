//! The connection engine against a broker that does what a test says.

mod support;

mod engine {
    mod calls;
    mod closing;
    mod confirms;
    mod consuming;
    mod ends;
    mod frames;
    mod handshake;
    mod liveness;
    mod publishing;
    mod stress;
    mod turns;
}

use std::time::Duration;

use leveret_amqp::{Limits, Options};
use leveret_wire::method::{basic, connection};
use leveret_wire::{Properties, ShortStr};
use support::Broker;

const SOON: Duration = Duration::from_secs(60);

fn tune(heartbeat: u16) -> connection::Tune {
    connection::Tune { channel_max: 2047, frame_max: 131_072, heartbeat }
}

fn with_limits(change: impl FnOnce(&mut Limits)) -> Options {
    let mut options = Options::default();
    change(&mut options.limits);
    options
}

fn deliver(tag: u64) -> basic::Deliver<'static> {
    basic::Deliver {
        consumer_tag: ShortStr::from_static("c"),
        delivery_tag: tag,
        redelivered: false,
        exchange: ShortStr::from_static("the exchange"),
        routing_key: ShortStr::from_static("the key"),
    }
}

async fn send_deliveries(broker: &mut Broker, id: u16, tags: std::ops::RangeInclusive<u64>) {
    for tag in tags {
        broker.send_content(id, &deliver(tag), &Properties::default(), tag.to_string()).await;
    }
}
