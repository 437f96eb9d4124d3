//! The broker that is restarted.

use leveret_broker::Broker;
use leveret_testkit::rabbitmq::{RabbitNode, Version};

pub(super) enum House {
    Embedded(Broker, String),
    RabbitMq(Box<RabbitNode>),
}

impl House {
    pub(super) async fn embedded() -> Self {
        let broker = Broker::builder().start().unwrap();
        let address = broker.listen("127.0.0.1:0").await.unwrap();
        House::Embedded(broker, format!("amqp://{address}"))
    }

    pub(super) async fn rabbitmq() -> Self {
        House::RabbitMq(Box::new(RabbitNode::start(Version::under_test()).await))
    }

    pub(super) fn url(&self) -> String {
        match self {
            House::Embedded(_, url) => url.clone(),
            House::RabbitMq(broker) => broker.url(),
        }
    }

    pub(super) async fn restart(&mut self) {
        match self {
            House::Embedded(broker, _) => broker.restart().await,
            House::RabbitMq(broker) => {
                broker.write_down_declarations().await;
                broker.kill().await;
                broker.start_again().await;
            }
        }
    }
}
