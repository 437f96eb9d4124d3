use leveret_testkit::rabbitmq;

use crate::client::client;
use crate::removing;

#[tokio::test]
async fn a_queue_is_deleted_with_all_that_belongs_to_it_once_no_message_is_in_it() {
    let vhost = rabbitmq::vhost().await;
    removing::of_acapi_and_chandra(&client(&vhost).await).await;
}

#[tokio::test]
async fn a_queue_that_dead_letters_goes_first_and_an_error_says_what_is_gone() {
    let vhost = rabbitmq::vhost().await;
    removing::a_removal_that_ends_half_way(&client(&vhost).await).await;
}
