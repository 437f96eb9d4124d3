use leveret::Client;
use leveret_testkit::rabbitmq::{self, Vhost};

use crate::support::client::client;
use crate::support::sharing;

async fn two() -> (Vhost, Client, Client) {
    let vhost = rabbitmq::vhost().await;
    let (one, other) = (client(&vhost).await, client(&vhost).await);
    (vhost, one, other)
}

#[tokio::test]
async fn a_pool_handles_as_many_messages_at_a_time_as_it_has_subscribers() {
    let (_vhost, client, _) = two().await;
    sharing::a_pool(&client).await;
}

#[tokio::test]
async fn a_pool_of_an_exclusive_queue_is_busy() {
    let (_vhost, client, _) = two().await;
    sharing::a_pool_of_an_exclusive_queue(&client).await;
}

#[tokio::test]
async fn messages_that_fail_in_place_keep_no_others_waiting() {
    let (_vhost, client, _) = two().await;
    sharing::beside_messages_that_fail_in_place(&client).await;
}

#[tokio::test]
async fn waiting_messages_are_shared_by_two_clients() {
    let (_vhost, one, other) = two().await;
    sharing::two_clients(&one, &other).await;
}

#[tokio::test]
async fn waiting_requests_are_shared_by_two_instances_of_a_service() {
    let (_vhost, one, other) = two().await;
    sharing::two_instances_of_a_service(&one, &other).await;
}

#[tokio::test]
async fn waiting_events_are_shared_by_two_subscribers() {
    let (_vhost, one, other) = two().await;
    sharing::two_subscribers_of_events(&one, &other).await;
}

#[tokio::test]
async fn waiting_batches_are_shared_by_two_clients() {
    let (_vhost, one, other) = two().await;
    sharing::two_clients_with_batches(&one, &other).await;
}

#[tokio::test]
async fn messages_that_cannot_be_parked_do_not_stop_a_consumer() {
    let (_vhost, client, _) = two().await;
    sharing::beside_messages_that_cannot_be_parked(&client).await;
}
