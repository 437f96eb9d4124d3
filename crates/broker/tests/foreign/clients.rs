//! Programs of others that are clients of a broker: where it is, and what they say.

use std::process::{Output, Stdio};
use std::time::Duration;

use leveret_broker::{Broker, Profile};
use leveret_testkit::rabbitmq;
use tokio::process::Command;
use tokio::time::timeout;

/// How long a program may take.
const DEADLINE: Duration = Duration::from_secs(60);

/// Runs a scenario on the embedded broker as either profile, and on the RabbitMQ at hand, if there is one.
pub(crate) async fn everywhere(scenario: impl AsyncFn(&str)) {
    for profile in [Profile::RabbitMq3_10, Profile::RabbitMq4_3] {
        println!("on the embedded broker as {profile}");
        let broker = Broker::builder().profile(profile).start().unwrap();
        let address = broker.listen("127.0.0.1:0").await.unwrap();
        scenario(&format!("amqp://guest:guest@{address}/%2f")).await;
        broker.shutdown().await;
    }
    if std::env::var("LEVERET_RABBITMQ_URL").is_ok_and(|url| url.starts_with("amqp")) {
        println!("on RabbitMQ");
        let vhost = rabbitmq::vhost().await;
        scenario(&vhost.url()).await;
    }
}

/// Runs a program to its end and gives what it printed, and whether it succeeded.
pub(crate) async fn run(command: &mut Command) -> Output {
    let name = format!("{:?}", command.as_std());
    let running = command.stdin(Stdio::null()).kill_on_drop(true).output();
    match timeout(DEADLINE, running).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => panic!(
            "{name} could not be run: {error}. Install it with `scripts/install-servers --foreign-clients` and \
             `scripts/install-python-clients`, as ./test does."
        ),
        Err(_) => panic!("{name} did not end within {DEADLINE:?}"),
    }
}

/// What a program printed that has to succeed.
pub(crate) async fn succeed(command: &mut Command) -> String {
    let output = run(command).await;
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{:?}: {said}{complained}", command.as_std());
    said
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
