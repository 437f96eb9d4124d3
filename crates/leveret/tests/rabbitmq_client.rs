//! The client's behaviour, the same on every broker.

mod support;

mod rabbitmq_client {
    mod consuming;
    mod events;
    mod handling;
    mod parking;
    mod pool;
    mod publishing;
    mod retry;
    mod topology;
}
