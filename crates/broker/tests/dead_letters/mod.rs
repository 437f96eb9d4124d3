//! What dead letters look like and where they go, for any broker: each scenario takes a connection to an empty virtual
//! host, and the version of RabbitMQ that is at the other end of it, or seems to be.

pub(crate) mod carbon_copies;
pub(crate) mod claims;
pub(crate) mod cycles;
pub(crate) mod failures;
pub(crate) mod headers;
mod letter;
pub(crate) mod reasons;
pub(crate) mod routes;
pub(crate) mod several;
mod stage;

/// Makes a test of every scenario, given the function that runs one on a broker of its choice.
macro_rules! dead_letter_tests {
    ($run:ident) => {
        dead_letter_tests! { $run:
            carbon_copies::keys_of_cc_are_told_and_those_of_bcc_are_only_used,
            carbon_copies::a_dead_letter_routing_key_takes_the_place_of_all_keys,
            carbon_copies::a_dead_letter_routing_key_that_was_a_bcc_is_not_told_in_4_3,
            claims::an_x_death_that_is_none_is_written_anew,
            claims::deaths_that_a_client_claims_count_in_3_10,
            claims::first_and_last_death_of_a_client_are_overwritten,
            claims::a_cycle_that_a_client_claims_counts_in_3_10,
            cycles::an_expired_message_does_not_come_back_to_its_queue,
            cycles::a_message_pushed_out_does_not_come_back_to_its_queue,
            cycles::two_queues_do_not_pass_an_expired_message_round,
            cycles::a_rejection_before_does_not_break_the_cycle,
            cycles::a_rejection_within_breaks_the_cycle,
            cycles::three_deaths_are_enough_to_confuse_3_10,
            failures::rejections_are_carried_on_in_4_3,
            failures::nacks_are_not,
            failures::carried_failures_count_for_the_delivery_limit,
            headers::headers_are_sorted_and_respelled,
            headers::other_properties_stay,
            reasons::a_rejected_message,
            reasons::an_expired_message,
            reasons::a_message_pushed_out,
            reasons::a_message_not_let_in,
            reasons::a_message_out_of_a_quorum_queue,
            reasons::a_message_beyond_its_delivery_limit,
            reasons::a_message_dead_lettered_at_least_once,
            routes::a_headers_exchange_sees_the_first_death,
            routes::what_cannot_be_routed_goes_to_the_alternate_exchange,
            routes::a_cycle_is_not_for_the_alternate_exchange,
            routes::the_exchange_that_is_told_is_the_one_published_to,
            routes::without_the_exchange_the_message_is_gone,
            several::the_same_death_again_is_counted,
            several::the_time_is_that_of_the_first,
            several::a_retry_loop_has_two_entries,
            several::the_newest_comes_first,
        }
    };
    ($run:ident: $($topic:ident::$scenario:ident,)*) => {$(
        #[tokio::test]
        async fn $scenario() {
            $run($crate::dead_letters::$topic::$scenario).await;
        }
    )*};
}
