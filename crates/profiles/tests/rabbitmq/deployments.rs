use leveret::{Failure, QueueType, Topology};
use leveret_testkit::rabbitmq;

use crate::client::{client, soon, until_depth};
use crate::deployments;

#[tokio::test]
async fn deployments_with_names_of_their_own_are_joined() {
    for queue_type in [QueueType::Classic, QueueType::Quorum] {
        for deployment in deployments::all(queue_type) {
            let vhost = rabbitmq::vhost().await;
            let theirs = client(&vhost).await;
            soon("objects", theirs.apply(&deployment.there)).await.unwrap();
            let ours = client(&vhost).await;
            let work = Topology::new().queue(deployment.work.clone());
            soon("the queue as it is", ours.apply(&work)).await.unwrap();
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let redelivering = deployment
                .orb
                .clone()
                .map(|orb| tokio::spawn(orb.redelivery(&ours).run_until(stopped)));
            let (exchange, key) = deployment.address;
            let publishing = soon("a publisher", theirs.publisher(exchange).build()).await.unwrap();
            soon("an outcome", publishing.publish(key, "job")).await.unwrap();
            let consumer = ours.consumer(deployment.work.name()).retry(deployment.retry);
            let runner = consumer.handle(async || Err::<(), _>(Failure::retry("not yet")));
            let parked = until_depth(&theirs, deployment.parked, 1);
            let summary = soon("the end", runner.run_until(parked)).await.unwrap();
            assert_eq!((summary.failed, summary.parked), (3, 1), "{}", deployment.design);
            let _ = stop.send(());
            if let Some(redelivering) = redelivering {
                soon("the service's end", redelivering).await.unwrap().unwrap();
            }
        }
    }
}
