//! The client on RabbitMQ nodes that fail.

mod support;

mod rabbitmq_node {
    mod amqp;
    mod client;
    mod cluster;
    #[cfg(feature = "tls")]
    mod tls;
}
