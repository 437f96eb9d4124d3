//! `docs/on-the-wire.md`: its tables of the profiles are what the broker has and gets.

use leveret::{Client, Exchange, Queue, Runner};
use leveret_profiles::{Acapi, AcapiSite, Chandra, CoverArt, Orb};

use crate::embedded::{broker, client_of};
use crate::on_the_wire::{called, check, first, retrying};

async fn acapi() -> String {
    let profile = Acapi::new();
    let topology = profile.topology(Queue::quorum("Q")).unwrap();
    retrying(topology, profile.into(), ["Q", "Q-retry", "Q-error"], None).await
}

async fn chandra() -> String {
    let profile = Chandra::new(Exchange::topic("orders"));
    let topology = profile.topology(Queue::quorum("Q").bind("orders", "order.*")).unwrap();
    retrying(topology, profile.into(), ["Q", "Q.retry", "Q.parking_lot"], None).await
}

async fn cover_art() -> String {
    let profile = CoverArt::new().name("art").jobs(["index"]);
    let topology = profile.topology().unwrap();
    retrying(topology, profile.into(), ["art.index", "art.retry", "art.failed"], None).await
}

async fn orb() -> String {
    let orb = Orb::new();
    let topology = orb.topology(Queue::new("Q")).unwrap();
    let names = ["Q", "orb.wait", "orb.parked"];
    let service: fn(&Client) -> Runner = |client| Orb::new().redelivery(client);
    retrying(topology, orb.into(), names, Some(service)).await
}

/// The exchanges and queues of a site, while a call waits for its reply.
async fn acapi_site() -> String {
    let broker = broker();
    let client = client_of(&broker).await;
    let site = AcapiSite::new("dc0", "preprod");
    client.apply(&site.topology()).await.unwrap();
    let events = site.events(&client);
    let ledger = Queue::classic(site.queue_name("ledger", "policies"));
    let subscription = site.subscribe_queue(&events, ledger, ["info.#"]).unwrap();
    subscription.declare().await.unwrap();
    let method = async || ();
    let service = site.serve(&client, "ledger", "requests", ["resource.#"], method).await.unwrap();
    service.declare().await.unwrap();
    events.publish("info.changed", "{}").await.unwrap();
    let queue = site.queue_name("ledger", "requests");
    let called = called(&broker, site.requests(&client), "resource.policy", &queue).await;
    called + &first(&broker, &site.queue_name("ledger", "policies"))
}

#[tokio::test(start_paused = true)]
async fn the_page_of_objects_on_the_wire_is_what_the_broker_has() {
    check(&[
        ("acapi", acapi().await),
        ("acapi-site", acapi_site().await),
        ("chandra", chandra().await),
        ("cover-art", cover_art().await),
        ("orb", orb().await),
    ]);
}
