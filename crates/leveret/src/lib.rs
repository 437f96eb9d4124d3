//! Messaging on AMQP 0-9-1 (RabbitMQ) that does not lose work.

pub mod amqp;
