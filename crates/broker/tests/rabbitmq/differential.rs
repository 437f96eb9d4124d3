//! The embedded broker and RabbitMQ, asked the same: see `differential`.
//!
//! `LEVERET_DIFFERENTIAL_PROGRAMS` says how many programs are run, `LEVERET_DIFFERENTIAL_SEED` with which one to begin.

use leveret_broker::{Permissions, Profile};
use leveret_testkit::rabbitmq::{self, Broker, RabbitNode, Version, Vhost};
use serde_json::json;

use crate::differential::{Campaign, LIMITED, LIMITED_TO, Target, explore, versions};

/// Programs that run side by side: most of a run is waiting.
const WORKERS: usize = 16;

fn number<N: std::str::FromStr>(variable: &str, default: N) -> N {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text:?} is no number")),
        Err(_) => default,
    }
}

fn campaign(programs: usize) -> Campaign {
    Campaign {
        seed: number("LEVERET_DIFFERENTIAL_SEED", 1),
        programs: number("LEVERET_DIFFERENTIAL_PROGRAMS", programs),
        differences: number("LEVERET_DIFFERENTIAL_DIFFERENCES", 5),
        forgive: |line| line,
    }
}

/// Virtual hosts for as many workers as there are programs for.
async fn vhosts(broker: &Broker, campaign: Campaign) -> Vec<Vhost> {
    let management = broker.management();
    let user = json!({ "password": LIMITED, "tags": "" });
    // If both tests do this at once, RabbitMQ 4.3 refuses one of them. Then it is there.
    if management.put(&["users", LIMITED], user.clone()).await.is_err() {
        management.put(&["users", LIMITED], user).await.expect("another user");
    }
    let [configure, write, read] = LIMITED_TO;
    let mut vhosts = Vec::new();
    for _ in 0..number("LEVERET_DIFFERENTIAL_WORKERS", WORKERS).min(campaign.programs) {
        let vhost = broker.vhost().await;
        let permissions = json!({ "configure": configure, "write": write, "read": read });
        let path = ["permissions", vhost.name(), LIMITED];
        management.put(&path, permissions).await.expect("permissions");
        vhosts.push(vhost);
    }
    vhosts
}

fn targets(name: &str, vhosts: &[Vhost]) -> Vec<Target> {
    let target = |vhost: &Vhost| Target {
        name: name.to_owned(),
        address: vhost.broker().addr(),
        vhost: vhost.name().to_owned(),
    };
    vhosts.iter().map(target).collect()
}

fn profile(version: Version) -> Profile {
    match version {
        Version::V3_10 => Profile::RabbitMq3_10,
        Version::V4_0 | Version::V4_3 => Profile::RabbitMq4_3,
    }
}

/// The embedded broker, with virtual hosts of the same names: RabbitMQ cuts long texts off, names and all.
async fn embedded(vhosts: &[Vhost]) -> Vec<Target> {
    let [configure, write, read] = LIMITED_TO.map(str::to_owned);
    let permissions = Permissions { configure, write, read };
    let builder = leveret_broker::Broker::builder().profile(profile(Version::under_test()));
    let builder = builder.user("guest", "guest").user(LIMITED, LIMITED);
    let builder = vhosts.iter().fold(builder, |builder, vhost| {
        let builder = builder.virtual_host(vhost.name());
        builder.permissions(LIMITED, vhost.name(), permissions.clone())
    });
    let broker = builder.start().expect("patterns that are in order");
    let address = broker.listen(("127.0.0.1", 0)).await.expect("a free port").to_string();
    let target = |vhost: &Vhost| Target {
        name: "embedded".to_owned(),
        address: address.clone(),
        vhost: vhost.name().to_owned(),
    };
    vhosts.iter().map(target).collect()
}

#[tokio::test]
async fn the_embedded_broker_agrees_with_rabbitmq() {
    let campaign = campaign(200);
    let vhosts = vhosts(rabbitmq::shared().await, campaign).await;
    let name = format!("RabbitMQ {}", Version::under_test());
    let pairs = targets(&name, &vhosts).into_iter().zip(embedded(&vhosts).await).collect();
    explore(campaign, pairs).await;
}

/// What differs here is the harness's fault: it asks what RabbitMQ answers now this way and now that.
#[tokio::test]
async fn rabbitmq_agrees_with_itself() {
    let campaign = campaign(30);
    let broker = rabbitmq::shared().await;
    let (one, other) = (vhosts(broker, campaign).await, vhosts(broker, campaign).await);
    let pairs = targets("one", &one).into_iter().zip(targets("other", &other)).collect();
    explore(campaign, pairs).await;
}

/// No test: it shows what differs between 3.10 and a later version, and there is always something.
#[tokio::test]
#[ignore = "shows what a broker's profiles are about; run it with a later RabbitMQ than 3.10"]
async fn versions_of_rabbitmq_differ() {
    let campaign = Campaign { forgive: versions::forgive, ..campaign(500) };
    let older = RabbitNode::start(Version::V3_10).await;
    let newer = rabbitmq::shared().await;
    let (one, other) = (vhosts(older.broker(), campaign).await, vhosts(newer, campaign).await);
    let name = Version::under_test().to_string();
    let pairs = targets("3.10", &one).into_iter().zip(targets(&name, &other)).collect();
    explore(campaign, pairs).await;
}
