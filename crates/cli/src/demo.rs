//! `leveret demo`: a small system that publishes, consumes, tries again and parks while its connections are cut, and
//! balances its books.

mod books;
mod cutter;

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use leveret::amqp::GetOptions;
use leveret::{
    Attempt, Client, Exchange, Incoming, Publisher, Queue, RetryPolicy, State, Topology,
};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::failure::{Failure, say};
use books::Books;
use cutter::Cutter;

/// Runs a small system that publishes and consumes while its connections are cut, and balances its books.
///
/// Some orders fail at first and are tried again; some fail for good and are parked. Without a URL it runs on a broker of
/// its own in memory. It ends by itself; the exit status is 0 only if every order that was sent was confirmed, and every one
/// that was confirmed was billed, or is in the parking lot and should be.
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
const SHOPS: u64 = 4;
/// One order of so many finds that the bank does not answer, once or twice.
const BANK_OFFLINE: u64 = 20;
/// One order of so many is paid with a card that the bank declines.
const DECLINED: u64 = 500;

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
         answer; all connections are cut {} times",
        arguments.messages, arguments.cuts
    ));

    let books = Arc::new(Books::new(arguments.messages));
    let progress = progress(arguments.messages);
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
    let (all_done, mut until_done) = watch::channel(false);
    let billing = client
        .consumer(QUEUE)
        .workers(16)
        .prefetch(200)
        .retry(RetryPolicy::exponential(Duration::from_millis(200), 2.0).max_retries(3))
        .state(Arc::clone(books))
        .handle(bill)
        .run_until(async move { drop(until_done.wait_for(|done| *done).await) });
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
        // The last acks are on their way; without them the last messages would come again, which is no loss.
        all_done.send_replace(true);
    };
    let (billed, (), ()) = tokio::join!(billing, cutting, selling);
    events.abort();
    books.retried(billed.map_err(Failure::new)?.retried);
    look_into_parking_lot(client, books).await
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
    State(books): State<Arc<Books>>,
) -> Result<(), leveret::Failure> {
    let order: u64 = body.parse()?;
    if order % DECLINED == DECLINED / 2 {
        books.note_declined(order);
        return Err(leveret::Failure::permanent("the card was declined").kind("declined"));
    }
    if order % BANK_OFFLINE == 3 && attempt <= 1 + (order / BANK_OFFLINE % 2) as u32 {
        return Err(leveret::Failure::retry("the bank does not answer").kind("offline"));
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

/// On a terminal only: a bar in a file or a pipe is noise.
fn progress(total: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} done, {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}

async fn show(books: Arc<Books>, progress: ProgressBar) {
    loop {
        progress.set_position(books.settled());
        progress.set_message(format!("{} confirmed, {} cuts", books.confirmed(), books.cuts()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
