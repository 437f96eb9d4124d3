use leveret::{ErrorKind, ExchangeKind, Queue};
use leveret_profiles::{Acapi, AcapiSite, AcapiTraffic};

use crate::embedded::{broker, client_of, depth, soon};
use crate::*;

/// The exchanges of ACAPI's document on exchanges, for the site `dc0` and the environment `qa`: "all events are published to
/// the fanout exchange", and "are copied via exchange-to-exchange bindings to other exchanges".
const EVENTS: &str = "
    exchange dc0.qa.e.fanout.events fanout
    exchange dc0.qa.e.topic.events topic
    exchange dc0.qa.e.header.events headers
    exchange dc0.qa.e.direct.events direct
    binding dc0.qa.e.fanout.events -> dc0.qa.e.topic.events [#]
    binding dc0.qa.e.fanout.events -> dc0.qa.e.header.events [#]
    binding dc0.qa.e.fanout.events -> dc0.qa.e.direct.events [#]
";

/// "Event clients subscribe by creating a client queue, and a binding between their queue and one or more of the desired
/// client exchanges", and steps 1 to 7 of "Configuration" for that queue.
const SUBSCRIBER: &str = "
    queue dc0.qa.q.ledger.policies x-dead-letter-exchange=dc0.qa.q.ledger.policies-retry
    binding dc0.qa.e.topic.events -> dc0.qa.q.ledger.policies [info.events.policy.#]
    exchange dc0.qa.q.ledger.policies-retry fanout
    exchange dc0.qa.q.ledger.policies-retry-requeue fanout
    queue dc0.qa.q.ledger.policies-retry x-dead-letter-exchange=dc0.qa.q.ledger.policies-retry-requeue x-message-ttl=30000
    binding dc0.qa.q.ledger.policies-retry -> dc0.qa.q.ledger.policies-retry [#]
    binding dc0.qa.q.ledger.policies-retry-requeue -> dc0.qa.q.ledger.policies [#]
    exchange dc0.qa.q.ledger.policies-error fanout
    queue dc0.qa.q.ledger.policies-error
    binding dc0.qa.q.ledger.policies-error -> dc0.qa.q.ledger.policies-error [#]
";

fn site() -> AcapiSite {
    AcapiSite::new("dc0", "qa").retry(Acapi::new().interval(30 * SECOND))
}

#[test]
fn the_exchanges_are_those_of_the_document() {
    let requests = EVENTS.replace("events", "requests");
    assert_eq!(lines(&site().topology()), listed(&(EVENTS.to_owned() + &requests)));
    let name = |kind| site().exchange_name(&kind, AcapiTraffic::Requests);
    assert_eq!(name(ExchangeKind::Headers), "dc0.qa.e.header.requests");
    assert_eq!(name(ExchangeKind::Direct), "dc0.qa.e.direct.requests");
}

#[test]
fn exchanges_of_other_names_can_be_used() {
    let (all, patterns) = ("all-events", "dc0.qa.e.pattern.events");
    let site = site().exchange(ExchangeKind::Fanout, AcapiTraffic::Events, "not this one");
    let site = site.exchange(ExchangeKind::Fanout, AcapiTraffic::Events, all);
    let site = site.exchange(ExchangeKind::Topic, AcapiTraffic::Events, patterns);
    let renamed = EVENTS.replace("dc0.qa.e.fanout.events", all);
    let renamed = renamed.replace("dc0.qa.e.topic.events", patterns);
    let requests = EVENTS.replace("events", "requests");
    assert_eq!(lines(&site.topology()), listed(&(renamed + &requests)));
}

#[tokio::test(start_paused = true)]
async fn publishing_declares_the_exchanges_of_events() {
    let broker = broker();
    let client = client_of(&broker).await;
    site().events(&client).publish("info.events.policy.created", "{}").await.unwrap();
    assert_eq!(lines(&client.topology()), listed(EVENTS));
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_has_a_queue_with_all_that_the_document_puts_beside_it() {
    let broker = broker();
    let client = client_of(&broker).await;
    let site = site();
    let queue = Queue::new(site.queue_name("ledger", "policies"));
    let patterns = ["info.events.policy.#"];
    let subscription = site.subscribe_queue(&site.events(&client), queue, patterns).unwrap();
    subscription.declare().await.unwrap();
    let document = listed(&(EVENTS.to_owned() + SUBSCRIBER));
    assert_eq!(lines(&client.topology()), document);
    // And running it adds nothing.
    let runner = subscription.handle(async || ());
    runner.run_until(tokio::time::sleep(SECOND)).await.unwrap();
    assert_eq!(lines(&client.topology()), document);
}

#[tokio::test(start_paused = true)]
async fn a_failed_event_waits_and_ends_in_the_error_queue() {
    let broker = broker();
    let client = client_of(&broker).await;
    let site = AcapiSite::new("dc0", "qa").retry(Acapi::new().interval(30 * SECOND).max_retries(2));
    let events = site.events(&client);
    let subscription = site.subscribe(&events, "ledger", "policies", ["info.#"]).unwrap();
    subscription.declare().await.unwrap();
    events.publish("info.created", "{}").await.unwrap();
    let runner = subscription.handle(async || Err::<(), _>(Failure::retry("not yet")));
    let summary = runner.run_until(tokio::time::sleep(LATER)).await.unwrap();
    assert_eq!((summary.failed, summary.retried, summary.parked), (3, 2, 1));
    let parked = take(&client, "dc0.qa.q.ledger.policies-error").await;
    assert_eq!(text(&parked, "x-leveret-exchange"), "dc0.qa.e.fanout.events");
    assert_eq!(text(&parked, "x-leveret-routing-key"), "info.created");
}

#[tokio::test(start_paused = true)]
async fn names_of_a_site_are_taken_as_they_are_and_refused_when_they_are_too_long() {
    let broker = broker();
    let client = client_of(&broker).await;
    let long = "n".repeat(250);
    for (site, application, is_possible) in
        [("a.b c", "d.e/f#*", true), ("", "", true), (&long, "a", false), ("s", &long, false)]
    {
        let site = AcapiSite::new(site, "env");
        let events = site.events(&client);
        let declare =
            async { site.subscribe(&events, application, "name", ["#"])?.declare().await };
        match soon("an outcome", declare).await {
            Ok(()) => {
                assert!(is_possible);
                soon("a publish", events.publish("key", "event")).await.unwrap();
                let queue = site.queue_name(application, "name");
                assert_eq!(depth(&broker, &queue), Some(1));
            }
            Err(error) => assert!(!is_possible && error.kind() == ErrorKind::Invalid, "{error:?}"),
        }
    }
}
