use leveret_testkit::rabbitmq;

use crate::support::client::client;
use crate::support::removal;

#[tokio::test]
async fn a_queue_is_deleted_with_all_that_belongs_to_it_once_no_message_is_in_it() {
    let vhost = rabbitmq::vhost().await;
    removal::with_the_default_design(&client(&vhost).await).await;
}

#[tokio::test]
async fn a_wait_queue_that_the_policy_does_not_name_keeps_its_queue() {
    let vhost = rabbitmq::vhost().await;
    removal::a_wait_queue_of_another_policy(&client(&vhost).await).await;
}

#[tokio::test]
async fn a_queue_with_a_consumer_is_not_deleted() {
    let vhost = rabbitmq::vhost().await;
    removal::a_consumed_queue(&client(&vhost).await).await;
}
