//! What becomes of messages on their way through queues, for any broker: each scenario takes a connection to an empty
//! virtual host, and the version of RabbitMQ that is at the other end of it, or seems to be.

pub(crate) mod consuming;
pub(crate) mod limits;
pub(crate) mod properties;
pub(crate) mod replies;
pub(crate) mod returning;
mod stage;
pub(crate) mod timeouts;

/// Makes a test of every scenario, given the function that runs one on a broker of its choice.
macro_rules! message_tests {
    ($run:ident) => {
        message_tests! { $run:
            consuming::a_prefetch_for_all_stops_consumers_in_3_10_alone,
            consuming::a_quorum_queue_with_a_single_active_consumer_is_not_to_get_from,
            consuming::the_default_exchange_is_no_alternate,
            consuming::a_dead_letter_that_is_handed_on_at_once_is_new,
            consuming::who_has_something_of_a_quorum_queue_counts_as_a_consumer,
            consuming::who_follows_a_single_active_consumer,
            consuming::who_has_settled_is_last_in_line_of_a_quorum_queue,
            consuming::who_gave_a_message_back_too_often_gets_the_next,
            limits::a_full_queue_that_drops_its_head,
            limits::a_full_queue_that_refuses,
            limits::what_comes_back_to_a_full_queue_makes_it_drop_its_head,
            limits::a_commit_that_a_full_queue_refuses_costs_the_channel,
            limits::a_quorum_queue_of_4_3_counts_the_bytes_of_properties,
            properties::headers_are_sorted_and_come_once_in_4_3,
            properties::a_headers_exchange_sees_all_headers,
            properties::an_expiration_is_a_number_in_4_3,
            properties::an_expiration_that_is_none_is_refused,
            properties::a_delivery_mode_that_3_10_does_not_know_is_refused,
            properties::a_direct_reply_to_nobody_is_refused_before_anything_else,
            properties::copies_go_to_the_strings_of_an_array,
            properties::copies_that_are_no_array_are_refused,
            replies::a_mandatory_direct_reply_comes_back_in_3_10_alone,
            replies::a_mandatory_direct_reply_to_who_has_cancelled,
            replies::a_mandatory_direct_reply_to_what_is_no_address_comes_back,
            replies::a_direct_reply_and_copies_of_it_go_to_queues_as_well,
            replies::a_direct_reply_in_a_transaction_awaits_the_commit_in_4_3_alone,
            replies::a_direct_reply_that_is_rolled_back_was_sent_in_3_10,
            returning::a_quorum_queue_counts_deliveries,
            returning::counts_that_a_client_claims_are_overwritten,
            returning::what_comes_back_to_a_classic_queue_goes_where_it_was,
            returning::what_comes_back_to_a_quorum_queue_goes_first_or_last,
            returning::a_recover_is_answered_before_what_it_delivers_anew,
            returning::a_quorum_queue_has_priorities_in_4_3,
            timeouts::a_consumer_of_a_quorum_queue_that_keeps_a_message_is_cancelled,
            timeouts::a_message_that_a_cancelled_consumer_keeps_costs_the_channel,
            timeouts::a_message_that_was_got_from_a_quorum_queue_and_kept_costs_the_channel,
        }
    };
    ($run:ident: $($topic:ident::$scenario:ident,)*) => {$(
        #[tokio::test]
        async fn $scenario() {
            $run($crate::messages::$topic::$scenario).await;
        }
    )*};
}
