//! `leveret demo`: a small system that publishes, consumes, calls, tells events, tries again and parks while its connections
//! are cut, and balances its books.

mod books;
mod cutter;

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use leveret::amqp::GetOptions;
use leveret::{
    Attempt, Client, Events, Exchange, Incoming, OnLoss, Publisher, Queue, RetryPolicy, Rpc, State,
    Topology,
};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::failure::Failure;
use crate::output::say;
use crate::progress::bar;
use books::Books;
use cutter::Cutter;

/// Runs a small system that publishes and consumes while its connections are cut, and balances its books.
///
/// Some orders fail at first and are tried again; some fail for good and are parked. For some the bank is called, and what it
/// charged is told as an event. Without a URL it runs on a broker of its own in memory. It ends by itself; the exit status is
/// 0 only if every order that was sent was confirmed, every one that was confirmed was billed, or is in the parking lot and
/// should be, every call got its own reply, and every event was heard.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Run on the broker at this URL. Its objects are called `leveret-demo…`, and deleted afterwards.
    #[arg(long, value_name = "URL")]
    url: Option<String>,

    /// How many orders are sent.
    #[arg(long, value_name = "COUNT", default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    messages: u64,

    /// How often all connections are cut.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    cuts: u32,
}

const EXCHANGE: &str = "leveret-demo";
const QUEUE: &str = "leveret-demo.billing";
/// Where orders go that are not tried again.
const PARKED: &str = "leveret-demo.billing.parked";
/// The service that is called, and its queue.
const BANK: &str = "leveret-demo.bank";
/// The exchange of events, and the queue of who listens.
const EVENTS: &str = "leveret-demo.events";
const AUDIT: &str = "leveret-demo.audit";
const SHOPS: u64 = 4;
/// For one order of so many the bank is called.
const CHARGED: u64 = 10;
/// One order of so many finds that the bank does not answer, once or twice.
const BANK_OFFLINE: u64 = 20;
/// One order of so many is paid with a card that the bank declines.
const DECLINED: u64 = 500;

/// How long the bank may take to answer, cuts included.
const CALL: Duration = Duration::from_secs(30);

/// How long the orders that are under way may take once the last one was sent.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let (client, cutter) = match &arguments.url {
        None => {
            say("starting a broker in memory");
            let broker = leveret_broker::Broker::builder().start().map_err(Failure::new)?;
            (Client::builder().broker(&broker), Cutter::Embedded(broker))
        }
        Some(url) => {
            let proxy = cutter::Proxy::to(url).await?;
            let client = Client::builder().endpoint(proxy.options()).map_err(Failure::new)?;
            (client, Cutter::Proxy(Box::new(proxy)))
        }
    };
    let client = client.name("leveret demo").connect().await.map_err(Failure::new)?;
    let topology = Topology::new()
        .exchange(Exchange::topic(EXCHANGE))
        .queue(Queue::quorum(QUEUE).bind(EXCHANGE, "order.*"));
    client.apply(&topology).await.map_err(Failure::new)?;
    say(&format!(
        "{SHOPS} shops send {} orders to one exchange; billing handles them, 16 at a time, and tries again when the bank does not \
         answer; for one of {CHARGED} it calls the bank and tells the audit; all connections are cut {} times",
        arguments.messages, arguments.cuts
    ));

    let books = Arc::new(Books::new(arguments.messages));
    let progress = bar(arguments.messages, "done");
    let showing = tokio::spawn(show(Arc::clone(&books), progress.clone()));
    let result = work(&client, &cutter, &books, &arguments).await;
    showing.abort();
    progress.finish_and_clear();
    if arguments.url.is_some() {
        clean_up(&client).await;
    }
    client.close().await;
    result?;
    let report = books.balance();
    say(&report.to_string());
    match report.is_balanced() {
        true => Ok(()),
        false => Err(Failure::new("the books do not balance")),
    }
}

/// Deletes all that was declared, the queues in which orders waited included.
async fn clean_up(client: &Client) {
    let topology = client.topology();
    for queue in topology.queues() {
        let _ = client.delete_queue(queue.name(), Default::default()).await;
    }
    for exchange in topology.exchanges() {
        let _ = client.delete_exchange(exchange.name(), Default::default()).await;
    }
}

/// Sends and bills all orders, while connections are cut.
async fn work(
    client: &Client,
    cutter: &Cutter,
    books: &Arc<Books>,
    arguments: &Arguments,
) -> Result<(), Failure> {
    let (all_done, until_done) = watch::channel(false);
    let stop = || {
        let mut until_done = until_done.clone();
        async move { drop(until_done.wait_for(|done| *done).await) }
    };
    let bank = client.rpc(BANK).timeout(CALL).on_loss(OnLoss::Replay);
    let office = Office {
        books: Arc::clone(books),
        bank: bank.build().await.map_err(Failure::new)?,
        events: client.events(EVENTS),
    };
    let charging = client.service(BANK).method("charge", charge);
    client.apply(&charging.topology()).await.map_err(Failure::new)?;
    let auditing = office.events.subscribe(AUDIT, ["order.charged"]).state(Arc::clone(books));
    auditing.declare().await.map_err(Failure::new)?;
    let billing = client
        .consumer(QUEUE)
        .workers(16)
        .prefetch(200)
        .retry(RetryPolicy::exponential(Duration::from_millis(200), 2.0).max_retries(3))
        .state(office)
        .handle(bill);
    let mut shops = JoinSet::new();
    for shop in 0..SHOPS {
        let publisher =
            client.publisher(EXCHANGE).window(500).build().await.map_err(Failure::new)?;
        shops.spawn(sell(publisher, shop, Arc::clone(books)));
    }
    let events = tokio::spawn(count_reconnects(client.watch(), Arc::clone(books)));
    let cutting = async {
        for cut in 1..=arguments.cuts {
            // Spread over the run, by how much is done.
            let at = arguments.messages * u64::from(cut) / u64::from(arguments.cuts + 1);
            books.until_settled(at, PATIENCE).await;
            cutter.cut();
            books.cut();
        }
    };
    let selling = async {
        while shops.join_next().await.is_some() {}
        let all = books.confirmed();
        books.until_settled(all, PATIENCE).await;
        books.until_heard(PATIENCE).await;
        // The last acks are on their way; without them the last messages would come again, which is no loss.
        all_done.send_replace(true);
    };
    let (billed, charged, audited, (), ()) = tokio::join!(
        billing.run_until(stop()),
        charging.run_until(stop()),
        auditing.handle(audit).run_until(stop()),
        cutting,
        selling
    );
    events.abort();
    charged.and(audited).map_err(Failure::new)?;
    books.retried(billed.map_err(Failure::new)?.retried);
    look_into_parking_lot(client, books).await
}

/// What billing works with.
#[derive(Clone)]
struct Office {
    books: Arc<Books>,
    bank: Rpc,
    events: Events,
}

/// The bank: says what it has charged.
async fn charge(order: String) -> String {
    format!("charged {order}")
}

/// The audit: notes of which charges it heard.
async fn audit(
    order: String,
    State(books): State<Arc<Books>>,
) -> Result<(), std::num::ParseIntError> {
    books.note_heard(order.parse()?);
    Ok(())
}

/// Notes which orders are in the parking lot.
async fn look_into_parking_lot(client: &Client, books: &Books) -> Result<(), Failure> {
    let get = async || client.get(PARKED, GetOptions::default()).await.map_err(Failure::new);
    while let Some(order) = get().await? {
        if let Some(number) =
            std::str::from_utf8(order.body()).ok().and_then(|text| text.parse().ok())
        {
            books.note_parked(number);
        }
        order.ack().map_err(Failure::new)?;
    }
    Ok(())
}

/// A shop: sends its share of the orders, and notes which were confirmed.
async fn sell(publisher: Publisher, shop: u64, books: Arc<Books>) {
    let mut tickets = JoinSet::new();
    for order in (shop..books.total()).step_by(SHOPS as usize) {
        books.sent();
        let key = if order % 2 == 0 { "order.new" } else { "order.changed" };
        match publisher.send(key, order.to_string()).await {
            Ok(ticket) => {
                let books = Arc::clone(&books);
                tickets.spawn(async move {
                    match ticket.await {
                        Ok(()) => books.note_confirmed(order),
                        Err(error) => books.note_failed(&error),
                    }
                });
            }
            Err(error) => books.note_failed(&error),
        }
        while tickets.try_join_next().is_some() {}
    }
    while tickets.join_next().await.is_some() {}
}

/// Billing: notes that an order was handled, if the bank agrees.
async fn bill(
    body: String,
    incoming: Incoming,
    Attempt(attempt): Attempt,
    State(office): State<Office>,
) -> Result<(), leveret::Failure> {
    let order: u64 = body.parse()?;
    let books = &office.books;
    if order % DECLINED == DECLINED / 2 {
        books.note_declined(order);
        return Err(leveret::Failure::permanent("the card was declined").kind("declined"));
    }
    if order % BANK_OFFLINE == 3 && attempt <= 1 + (order / BANK_OFFLINE % 2) as u32 {
        return Err(leveret::Failure::retry("the bank does not answer").kind("offline"));
    }
    if order.is_multiple_of(CHARGED) {
        let charged: String = office.bank.call("charge", body.clone()).await?;
        books.note_charged(order, charged == format!("charged {order}"));
        office.events.publish("order.charged", body).await?;
    }
    books.note_consumed(order, incoming.redelivered());
    Ok(())
}

async fn count_reconnects(mut events: leveret::ClientEvents, books: Arc<Books>) {
    while let Some(event) = events.next().await {
        if matches!(event, leveret::ClientEvent::Connected { again: true, .. }) {
            books.reconnected();
        }
    }
}

async fn show(books: Arc<Books>, progress: ProgressBar) {
    loop {
        progress.set_position(books.settled());
        progress.set_message(format!("{} confirmed, {} cuts", books.confirmed(), books.cuts()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
