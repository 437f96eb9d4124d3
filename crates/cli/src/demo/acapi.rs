//! ACAPI: events for whoever wants them, and requests whose replies come to a queue of their own.

use std::sync::Arc;
use std::time::Duration;

use leveret::{Attempt, Error, Failure, Rpc, State};
use leveret_profiles::{Acapi, AcapiSite};
use tokio::task::JoinSet;

use super::ledger::{Fate, Ledger, Party};
use super::scenario::{Play, Scenario, Stage};

pub(super) const SCENARIO: Scenario = Scenario {
    title: "ACAPI",
    about: "events for two applications, and requests with replies",
    total,
    open: |stage| Box::pin(open(stage)),
};

/// For so many events there is a request.
const EVENTS_PER_REQUEST: u64 = 20;
/// How many requests are made at a time.
const CLERKS: u64 = 8;
/// How long a request may take, cuts included, and when it is made again.
const CALL: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_millis(500);

const CREATED: &str = "info.events.policy.created";
const CHANGED: &str = "info.events.policy.changed";
const REQUEST: &str = "resource.policy";

/// How many messages there are for so many events.
fn total(events: u64) -> u64 {
    events + events.div_ceil(EVENTS_PER_REQUEST)
}

async fn open(stage: Stage) -> Result<Play, Error> {
    let retry = Acapi::new().interval(Duration::from_millis(500)).max_retries(2);
    let site = AcapiSite::new("leveret-demo", "acapi").retry(retry);
    let client = &stage.client;
    client.apply(&site.topology()).await?;
    let events = site.events(client);
    let subscribe = |application, pattern| {
        let consumer = site.subscribe(&events, application, "policies", [pattern])?;
        Ok::<_, Error>(consumer.workers(16).state(Arc::clone(&stage.ledger)))
    };
    let ledger = subscribe("ledger", "info.events.policy.#")?;
    let mailer = subscribe("mailer", CREATED)?;
    ledger.declare().await?;
    mailer.declare().await?;
    let service = site.serve(client, "ledger", "policy-requests", [REQUEST], policy).await?;
    service.declare().await?;
    let requests = site.requests(client).timeout(CALL).build().await?;
    let publisher = events.publisher().await?;
    let lot = format!("{}-error", site.queue_name("ledger", "policies"));
    Ok(Box::pin(async move {
        let (events, all) = (stage.messages, stage.ledger.total());
        let telling = async {
            let event = |number| (number, key(number), fate(number));
            stage.send(&publisher, (0..events).map(event)).await;
        };
        let asking = ask(requests, events..all, Arc::clone(&stage.ledger));
        let all = async {
            tokio::join!(telling, asking);
            stage.end().await;
        };
        let (booked, mailed, served, parked, ()) = tokio::join!(
            ledger.handle(book).run_until(stage.over()),
            mailer.handle(mail).run_until(stage.over()),
            service.run_until(stage.over()),
            stage.watch_lot(&lot),
            all
        );
        for summary in [booked?, mailed?, served?, parked?] {
            stage.ledger.add(&summary);
        }
        Ok(())
    }))
}

fn key(event: u64) -> &'static str {
    if event.is_multiple_of(2) { CREATED } else { CHANGED }
}

fn is_odd_one(event: u64) -> bool {
    event % 200 == 11
}

fn fate(event: u64) -> Fate {
    match key(event) {
        CREATED => Fate::DoneByTwo,
        _ if is_odd_one(event) => Fate::Parked,
        _ => Fate::Done,
    }
}

/// The ledger takes all events; sometimes its database is locked.
async fn book(
    event: String,
    Attempt(attempt): Attempt,
    State(ledger): State<Arc<Ledger>>,
) -> Result<(), Failure> {
    let number = event.parse()?;
    if is_odd_one(number) {
        ledger.failed();
        return Err(Failure::permanent("a policy of a kind that nobody knows").kind("unknown"));
    }
    if number % 25 == 4 && attempt == 1 {
        ledger.failed();
        return Err(Failure::retry("the database is locked").kind("locked"));
    }
    ledger.done_by(number, Party::First);
    Ok(())
}

/// The mailer wants to know of new policies only.
async fn mail(event: String, State(ledger): State<Arc<Ledger>>) -> Result<(), Failure> {
    ledger.done_by(event.parse()?, Party::Second);
    Ok(())
}

async fn policy(number: String) -> String {
    format!("policy {number}")
}

/// Makes requests, and checks that each gets the reply that is meant for it.
async fn ask(requests: Rpc, numbers: std::ops::Range<u64>, ledger: Arc<Ledger>) {
    let mut clerks = JoinSet::new();
    for clerk in 0..CLERKS {
        let (requests, ledger) = (requests.clone(), Arc::clone(&ledger));
        let numbers = numbers.clone().skip(clerk as usize).step_by(CLERKS as usize);
        clerks.spawn(async move {
            for number in numbers {
                ledger.sent(number, Fate::Done);
                let call = requests.call::<String>(REQUEST, number.to_string()).resend_after(AGAIN);
                match call.await {
                    Ok(reply) => {
                        ledger.confirmed(number);
                        if reply == format!("policy {number}") {
                            ledger.done(number);
                        } else {
                            ledger.fault(format!("request {number} got the reply {reply:?}"));
                        }
                    }
                    Err(error) => ledger.fault(error.to_string()),
                }
            }
        });
    }
    while clerks.join_next().await.is_some() {}
}
