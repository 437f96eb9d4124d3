//! Real RabbitMQ: a virtual host on the shared node for most tests, nodes and clusters of their own
//! for tests that break them.
//!
//! Which generation of RabbitMQ a run is about is [`Version::under_test`]. A node runs the server
//! in the foreground with its own data folder, node name, cookie, ports and epmd, so that any
//! number of nodes of any number of test processes live side by side.

mod broker;
mod cluster;
mod epmd;
mod installation;
mod management;
mod node;
mod readiness;
mod settings;
mod shared;
mod version;
mod vhost;

pub use broker::Broker;
pub use cluster::RabbitCluster;
pub use management::{Management, ManagementError};
pub use node::{Builder, RabbitNode};
pub use shared::{shared, vhost};
pub use version::{UnknownVersion, Version};
pub use vhost::Vhost;
