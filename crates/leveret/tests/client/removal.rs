use crate::{broker, client_of, removal};

#[tokio::test(start_paused = true)]
async fn a_queue_is_deleted_with_all_that_belongs_to_it_once_no_message_is_in_it() {
    removal::all_that_belongs_to_a_queue(&client_of(&broker()).await).await;
}

#[tokio::test(start_paused = true)]
async fn a_wait_queue_that_the_policy_does_not_name_keeps_its_queue() {
    removal::a_wait_queue_of_another_policy(&client_of(&broker()).await).await;
}

#[tokio::test(start_paused = true)]
async fn a_queue_with_a_consumer_is_not_deleted() {
    removal::a_consumed_queue(&client_of(&broker()).await).await;
}

#[tokio::test(start_paused = true)]
async fn what_is_confirmed_while_a_classic_queue_is_deleted_is_not_lost() {
    removal::a_message_that_comes_meanwhile(&client_of(&broker()).await).await;
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_dead_letters_goes_first_and_an_error_says_what_is_gone() {
    removal::a_removal_that_ends_half_way(&client_of(&broker()).await).await;
}
