//! The designs on a real RabbitMQ.

mod rabbitmq {
    mod acapi_site;
    mod deployments;
    mod examples;
    mod orb;
    mod removal;
    mod traps;
}

#[path = "../../leveret/tests/support/client.rs"]
#[allow(dead_code, unreachable_pub)]
mod client;
#[path = "support/deployments.rs"]
mod deployments;
#[path = "../../leveret/tests/support/examples.rs"]
mod examples;
#[path = "../../leveret/tests/support/removal.rs"]
mod removal;
#[path = "support/removing.rs"]
mod removing;
