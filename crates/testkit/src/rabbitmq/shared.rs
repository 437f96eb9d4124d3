//! The one RabbitMQ that serves a whole test run.

use reqwest::Url;
use tokio::sync::OnceCell;

use super::{Broker, Management, RabbitNode, Version, Vhost};

/// Makes a fresh virtual host on the [`shared`] RabbitMQ: what most tests begin with.
///
/// # Panics
/// If there is no RabbitMQ; the message says how to get one.
pub async fn vhost() -> Vhost {
    shared().await.vhost().await
}

/// The RabbitMQ that all tests of a run share.
///
/// With `LEVERET_RABBITMQ_URL=memory://embedded`, the tests run on Leveret's embedded broker instead, as far as they need
/// no management API.
///
/// It is the one that `LEVERET_RABBITMQ_URL` and `LEVERET_RABBITMQ_MANAGEMENT_URL` name; the
/// program `with-servers` starts one and sets these for a whole run. Where they are not set, one is
/// started for this process and ends with it.
///
/// # Panics
/// If there is no RabbitMQ; the message says how to get one.
pub async fn shared() -> &'static Broker {
    /// The node, where it is ours, stays here for as long as the process lives. Statics are never
    /// dropped, so it is the node's guardians that end it.
    static SHARED: OnceCell<(Broker, Option<RabbitNode>)> = OnceCell::const_new();
    let (broker, _) = SHARED
        .get_or_init(async || match std::env::var("LEVERET_RABBITMQ_URL") {
            Ok(url) if url.starts_with("memory:") => {
                (Broker::new(&url, Management::at("http://no.management.invalid")), None)
            }
            Ok(url) => (running_at(&url).await, None),
            Err(_) => {
                let node = RabbitNode::start(Version::under_test()).await;
                (node.broker().clone(), Some(node))
            }
        })
        .await;
    broker
}

async fn running_at(url: &str) -> Broker {
    let given = std::env::var("LEVERET_RABBITMQ_MANAGEMENT_URL").ok();
    let management = Management::at(&given.clone().unwrap_or_else(|| usual_management_url(url)));
    if let Err(error) = management.get(&["overview"]).await {
        let hint = match given {
            Some(_) => "is LEVERET_RABBITMQ_MANAGEMENT_URL right?",
            None => {
                "set LEVERET_RABBITMQ_MANAGEMENT_URL to http://user:password@host:port of its management plugin"
            }
        };
        panic!(
            "the tests need the management API of the RabbitMQ at LEVERET_RABBITMQ_URL ({url}), to make virtual hosts, \
             and it does not answer at {}: {hint}; or unset LEVERET_RABBITMQ_URL and run ./test ({error})",
            management.url()
        );
    }
    Broker::new(url, management)
}

/// Where the management plugin of a RabbitMQ listens unless told otherwise.
fn usual_management_url(amqp_url: &str) -> String {
    let amqp = Url::parse(amqp_url)
        .unwrap_or_else(|error| panic!("LEVERET_RABBITMQ_URL={amqp_url:?}: {error}"));
    let (user, password) = match amqp.username() {
        "" => ("guest", "guest"),
        user => (user, amqp.password().unwrap_or_default()),
    };
    format!("http://{user}:{password}@{}:15672", amqp.host_str().unwrap_or("127.0.0.1"))
}
