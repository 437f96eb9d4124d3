//! What a real RabbitMQ does, and the embedded broker has to do, too.

#[macro_use]
mod dead_letters;
mod declaring;
mod differential;
#[macro_use]
mod frames;
#[macro_use]
mod lapin_client;
#[macro_use]
mod messages;
mod routing;

mod rabbitmq {
    mod dead_letters;
    mod declaring;
    mod differential;
    mod frames;
    mod lapin;
    mod messages;
    mod routing;
}

// `routing`, which is a part of the unit tests as well, finds it beside itself.
use leveret_broker::Profile;
