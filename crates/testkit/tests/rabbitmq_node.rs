//! Nodes of a test's own.

mod support;

mod rabbitmq_node {
    mod cluster;
    mod node;
}
