use crate::embedded::{broker, client_of};
use crate::removing;

#[tokio::test(start_paused = true)]
async fn a_queue_is_deleted_with_all_that_belongs_to_it_once_no_message_is_in_it() {
    removing::of_acapi_and_chandra(&client_of(&broker()).await).await;
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_dead_letters_goes_first_and_an_error_says_what_is_gone() {
    removing::a_removal_that_ends_half_way(&client_of(&broker()).await).await;
}
