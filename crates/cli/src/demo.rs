//! `leveret demo`: small systems on one broker, whose connections are cut while they work, and whose books balance.

mod acapi;
#[cfg(feature = "demo-bank")]
mod bank;
mod books;
mod chandra;
mod cover_art;
mod cutter;
mod ledger;
mod orb;
mod scenario;

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use console::style;
use leveret::{Client, ClientBuilder, ClientEvent, ClientEvents, ConnectLimits, Topology};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::failure::Failure;
use crate::output::{counted, say};
use crate::progress::{Bars, is_shown};
use crate::signals::{self, GIVING_BACK, Signals};
use books::Books;
use cutter::Cutter;
use ledger::Ledger;
use scenario::{Scenario, Stage};

/// Runs small systems on one broker while their connections are cut, and balances their books.
///
/// Each is the scenario of a design that is in use: the Cover Art Archive's indexer with jobs that are tried again hours later,
/// ACAPI's events and requests, Orb's redelivery with its pools, Chandra's batches with confirms, and, where
/// the program was built with the feature `demo-bank`, a bank whose transfers are called for more than once and done exactly
/// once, in SQLite. Without a URL it runs on a broker of its own in memory. It
/// ends by itself, with a table; the exit status is 0 only if nothing was lost, what was parked should be, and every reply and
/// every balance is right.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Run on the broker at this URL. All objects are called `leveret-demo…`, and deleted afterwards.
    #[arg(long, value_name = "URL")]
    url: Option<String>,

    /// How many messages each system sends; the bank has a fifth of that.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    messages: u64,

    /// How often all connections are cut.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    cuts: u32,
}

/// So few consumers share a connection, that Orb's pool of subscribers needs several.
const SUBSCRIPTIONS: usize = 8;

/// How often it is looked how far they are.
const LOOK: Duration = Duration::from_millis(20);

/// How long cleaning up may take.
const CLEAN_UP: Duration = Duration::from_secs(20);

/// The systems that take part.
const SCENARIOS: &[Scenario] = &[
    cover_art::SCENARIO,
    acapi::SCENARIO,
    orb::SCENARIO,
    chandra::SCENARIO,
    #[cfg(feature = "demo-bank")]
    bank::SCENARIO,
];

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    signals::enforce()?;
    let mut signals = Signals::new()?;
    let (builder, cutter) = broker(&arguments).await?;
    let cutter = Arc::new(cutter);
    let connecting = builder.name("leveret demo").max_subscriptions(SUBSCRIPTIONS).connect();
    let client = tokio::select! {
        connected = connecting => connected?,
        signal = signals.next() => return Err(Failure::stopped(signal, "nothing was done")),
    };
    let books = Arc::new(Books::new(
        SCENARIOS
            .iter()
            .map(|scenario| Ledger::new(scenario.title, (scenario.total)(arguments.messages))),
    ));
    introduce(&books, arguments.cuts);
    let began = Instant::now();
    let (result, stopped) = tokio::select! {
        result = play(&client, &cutter, &books, &arguments) => (result, None),
        signal = signals.next() => (Ok(()), Some(signal)),
    };
    let took = began.elapsed();
    // Once the client is closed, nobody declares again what is deleted.
    let topology = client.topology();
    let leaving = async {
        client.close().await;
        match &arguments.url {
            Some(url) => clean_up(url, &topology).await,
            None => Ok(()),
        }
    };
    if let Some(signal) = stopped {
        let has_left = timeout(GIVING_BACK, leaving).await.is_ok_and(|left| left.is_ok());
        let is_clean = has_left || arguments.url.is_none();
        return Err(Failure::stopped(
            signal,
            match is_clean {
                true => "the books are not balanced",
                false => {
                    "what is called leveret-demo… is still on the broker; another run deletes it"
                }
            },
        ));
    }
    leaving.await?;
    result?;
    let report = books.balance(took);
    say(&report.to_string());
    match report.is_balanced() {
        true => Ok(()),
        false => Err(Failure::new("the books do not balance")),
    }
}

/// The broker, and what cuts the connections to it.
async fn broker(arguments: &Arguments) -> Result<(ClientBuilder, Cutter), Failure> {
    match &arguments.url {
        None => {
            let broker = leveret_broker::Broker::builder().start().map_err(Failure::new)?;
            Ok((Client::builder().broker(&broker), Cutter::Embedded(broker)))
        }
        Some(url) => {
            let proxy = cutter::Proxy::to(url).await?;
            let builder = Client::builder().endpoint(proxy.options())?;
            Ok((builder, Cutter::Proxy(Box::new(proxy))))
        }
    }
}

fn introduce(books: &Books, cuts: u32) {
    let systems = SCENARIOS.len();
    let times = counted(cuts.into(), "time");
    say(&format!("{systems} systems share a broker. All connections are cut {times} meanwhile."));
    for (Scenario { title, about, .. }, ledger) in SCENARIOS.iter().zip(books.ledgers()) {
        let title = style(format!("{title:<9}")).bold();
        say(&format!("  {title} {:>6} {about}", ledger.total()));
    }
    say("");
}

/// Has all scenarios played at the same time, while connections are cut.
async fn play(
    client: &Client,
    cutter: &Arc<Cutter>,
    books: &Arc<Books>,
    arguments: &Arguments,
) -> Result<(), Failure> {
    let mut plays = Vec::new();
    for (scenario, ledger) in SCENARIOS.iter().zip(books.ledgers()) {
        plays.push((scenario.open)(Stage::new(client, ledger, arguments.messages)).await?);
    }
    // An earlier run that was killed may have left something.
    for queue in client.topology().queues() {
        client.purge_queue(queue.name()).await?;
    }
    let mut others = JoinSet::new();
    others.spawn(count_reconnects(client.watch(), Arc::clone(books)));
    others.spawn(cut(Arc::clone(cutter), Arc::clone(books), arguments.cuts));
    others.spawn(show(Arc::clone(books)));
    let mut playing = JoinSet::new();
    for (play, ledger) in plays.into_iter().zip(books.ledgers()) {
        let ledger = Arc::clone(ledger);
        playing.spawn(async move {
            if let Err(error) = play.await {
                ledger.fault(error.to_string());
            }
        });
    }
    playing.join_all().await;
    others.shutdown().await;
    Ok(())
}

/// Cuts all connections, again and again: spread over the run, by how much is done.
async fn cut(cutter: Arc<Cutter>, books: Arc<Books>, cuts: u32) {
    for cut in 1..=cuts {
        let at = books.total() * u64::from(cut) / u64::from(cuts + 1);
        while books.settled() < at {
            sleep(LOOK).await;
        }
        cutter.cut();
        books.cut();
        if !is_shown() {
            say(&format!(
                "{} of {} messages settled; cut {cut} of {cuts}",
                books.settled(),
                books.total()
            ));
        }
    }
}

async fn count_reconnects(mut events: ClientEvents, books: Arc<Books>) {
    while let Some(event) = events.next().await {
        if matches!(event, ClientEvent::Connected { again: true, .. }) {
            books.reconnected();
        }
    }
}

/// Shows how far the scenarios are, for as long as it lives.
async fn show(books: Arc<Books>) {
    let bars = Bars::new(books.ledgers().iter().map(|ledger| (ledger.title(), ledger.total())));
    loop {
        for (bar, ledger) in bars.iter().zip(books.ledgers()) {
            bar.set_position(ledger.settled());
            bar.set_message(ledger.in_short());
        }
        bars.say(books.in_short());
        sleep(LOOK).await;
    }
}

/// Deletes all that was declared, the queues in which messages waited included.
async fn clean_up(url: &str, topology: &Topology) -> Result<(), Failure> {
    let cleaning = async {
        let limits = ConnectLimits { max_retries: 0, within: CLEAN_UP };
        let builder = Client::builder().endpoint(url)?.name("leveret demo, cleaning up");
        let client = builder.connect_limits(limits).connect().await?;
        // All at once: after a signal there is little time, and each takes a round trip or, in a quorum queue, several.
        let mut deleting = JoinSet::new();
        for queue in topology.queues() {
            let (client, queue) = (client.clone(), queue.name().to_owned());
            deleting.spawn(async move {
                client.delete_queue(&queue, Default::default()).await.map(drop)
            });
        }
        for exchange in topology.exchanges() {
            let (client, exchange) = (client.clone(), exchange.name().to_owned());
            deleting
                .spawn(async move { client.delete_exchange(&exchange, Default::default()).await });
        }
        for deleted in deleting.join_all().await {
            deleted?;
        }
        client.close().await;
        Ok(())
    };
    let cleaned = timeout(CLEAN_UP, cleaning).await;
    let cleaned: Result<(), leveret::Error> =
        cleaned.map_err(|_| Failure::new("the broker's queues were not all deleted in time"))?;
    cleaned.map_err(|error| Failure::new(format_args!("not all queues could be deleted: {error}")))
}
