//! The program on RabbitMQ: the same as on its own broker.

mod support;

const ON_RABBITMQ: bool = true;

#[path = "program/calling.rs"]
mod calling;
#[path = "program/deleting.rs"]
mod deleting;
#[path = "program/demo.rs"]
mod demo;
#[path = "program/guide.rs"]
mod guide;
#[path = "program/migrating.rs"]
mod migrating;
#[path = "program/parking.rs"]
mod parking;
#[path = "program/publishing.rs"]
mod publishing;
#[path = "program/running.rs"]
mod running;
#[path = "program/topology.rs"]
mod topology;
#[path = "program/waiting.rs"]
mod waiting;
