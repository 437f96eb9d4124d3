//! The client on a real RabbitMQ.

mod support;

mod rabbitmq {
    mod abandoned;
    mod amqp;
    mod client;
    mod consuming;
    mod examples;
    mod publishing;
    mod stress;
}
