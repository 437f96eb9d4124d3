//! Names and keys of a retry profile's objects, where they differ from the usual ones. Each has the name of a builder method.

use std::collections::BTreeMap;

use leveret_profiles::{Acapi, Chandra, CoverArt, Orb};

pub(super) type Names = BTreeMap<String, String>;

/// Sets the names one after the other. An error names the one that the profile does not have.
fn named<P>(
    profile: P,
    names: &Names,
    set: impl Fn(P, &str, &str) -> Option<P>,
) -> Result<P, String> {
    names.iter().try_fold(profile, |profile, (name, value)| {
        set(profile, name, value).ok_or_else(|| name.clone())
    })
}

pub(super) fn of_acapi(profile: Acapi, names: &Names) -> Result<Acapi, String> {
    named(profile, names, |profile, name, value| {
        Some(match name {
            "retry-exchange" => profile.retry_exchange(value),
            "retry-queue" => profile.retry_queue(value),
            "retry-key" => profile.retry_key(value),
            "requeue-exchange" => profile.requeue_exchange(value),
            "requeue-key" => profile.requeue_key(value),
            "error-exchange" => profile.error_exchange(value),
            "error-queue" => profile.error_queue(value),
            "error-key" => profile.error_key(value),
            _ => return None,
        })
    })
}

pub(super) fn of_chandra(profile: Chandra, names: &Names) -> Result<Chandra, String> {
    named(profile, names, |profile, name, value| {
        Some(match name {
            "dead-letter-exchange" => profile.dead_letter_exchange(value),
            "dead-letter-exchange-type" => profile.dead_letter_exchange_kind(value.into()),
            "shared-dead-letter-exchange" => profile.shared_dead_letter_exchange(value),
            "retry-queue" => profile.retry_queue(value),
            "retry-key" => profile.retry_key(value),
            "retry-binding" => profile.retry_binding(value),
            "return-key" => profile.return_key(value),
            "parking-queue" => profile.parking_queue(value),
            "parking-key" => profile.parking_key(value),
            "parking-binding" => profile.parking_binding(value),
            _ => return None,
        })
    })
}

pub(super) fn of_cover_art(profile: CoverArt, names: &Names) -> Result<CoverArt, String> {
    named(profile, names, |profile, name, value| {
        Some(match name {
            "retry-exchange" => profile.retry_exchange(value),
            "retry-queue" => profile.retry_queue(value),
            "failed-exchange" => profile.failed_exchange(value),
            "failed-queue" => profile.failed_queue(value),
            "retries-header" => profile.retries_header(value),
            "exceptions-header" => profile.exceptions_header(value),
            _ => return None,
        })
    })
}

pub(super) fn of_orb(profile: Orb, names: &Names) -> Result<Orb, String> {
    named(profile, names, |profile, name, value| {
        Some(match name {
            "exchange" => profile.exchange(value),
            "redelivery-exchange" => profile.redelivery_exchange(value),
            "redelivery-key" => profile.redelivery_key(value),
            "redelivery-queue" => profile.redelivery_queue(value),
            "wait-exchange" => profile.wait_exchange(value),
            "wait-key" => profile.wait_key(value),
            "wait-queue" => profile.wait_queue(value),
            "parked-exchange" => profile.parked_exchange(value),
            "parked-queue" => profile.parked_queue(value),
            "count-header" => profile.count_header(value),
            "queue-header" => profile.queue_header(value),
            _ => return None,
        })
    })
}
