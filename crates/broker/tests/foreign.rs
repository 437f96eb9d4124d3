//! Clients of others are served by the embedded broker as by RabbitMQ.

mod foreign {
    mod amqp_tools;
    mod clients;
    mod python;
}
