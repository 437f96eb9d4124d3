//! On the RabbitMQ that a whole test run shares.

mod support;

mod rabbitmq {
    mod shared;
    mod wire;
}
