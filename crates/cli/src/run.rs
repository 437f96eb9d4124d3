//! `leveret run`: a service from a file, whose handlers are commands and HTTP endpoints.

mod command;
mod facts;
mod file;
mod http;
mod limited;
mod listen;
mod names;
mod pools;
pub(crate) mod reaper;
mod reload;
mod retry;
mod running;
mod wanted;
mod work;

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use clap::Args;
use leveret::amqp::Options;
use leveret::{Client, ConnectLimits, Retry};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::failure::Failure;
use crate::output::{counted, note, say};
use crate::reach::{self, Urls, duration};
use crate::signals::{self, GRACE, Signals};
use file::File;
use listen::Listening;
use pools::Pools;
use reload::Reloaded;
use running::{Context, Definition, Ended, MissingQueue, Prepared, Tasks, needed};

/// A service that starts together with its broker waits for it for so long.
const CONNECT_WITHIN: Duration = Duration::from_secs(60);

/// How long reading the file again may take.
const READING: Duration = Duration::from_secs(30);

/// Runs a service from a TOML or YAML file: for each queue a command or an HTTP endpoint that handles its messages.
///
/// A command gets the message on its standard input, and what is known of it in variables as LEVERET_ROUTING_KEY. Its exit status
/// decides: 0 done; 65 park it; 75 and any other, or none in time, try again by the retry policy, and then park it. An
/// endpoint gets it by POST, with headers as Leveret-Routing-Key: 2xx done; 408, 425, 429 and 5xx, or none in time, try again;
/// anything else park it. What a service writes or answers is the reply to the call.
///
/// SIGTERM and Ctrl-C finish what is at work and stop; SIGHUP reads the file again. The guide has an example of a file.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The file.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Only read the file and tell what is wrong with it.
    #[arg(long)]
    check: bool,

    /// Answer on this address whether it is well (/health), what it has counted, for Prometheus (/metrics), and what it has
    /// declared (/topology).
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,

    /// Instead of the brokers in the file.
    #[command(flatten)]
    urls: Urls,

    /// How often to try again if no broker answers at the start.
    #[arg(
        long,
        visible_alias = "mq-connect-max-retries",
        env = "LEVERET_CONNECT_MAX_RETRIES",
        value_name = "COUNT",
        default_value_t = 25
    )]
    connect_max_retries: u32,

    /// How many subscriptions a connection has before another one is opened.
    #[arg(
        long,
        visible_aliases = ["mq-max-connection-subscriptions", "mq-max-connection-subscription"],
        env = "LEVERET_MAX_CONNECTION_SUBSCRIPTIONS",
        value_name = "COUNT",
        default_value_t = 1000
    )]
    max_connection_subscriptions: usize,

    /// How long handlers get to finish when the service is stopped.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    drain: Duration,

    #[command(flatten)]
    pools: Pools,
}

/// How the consumer of a queue retries, by a file.
pub(crate) fn retry_in(file: &Path, queue: &str) -> Result<Retry, Failure> {
    let missing = || {
        Failure::wrong(format_args!("{} has no [[consumer]] of queue {queue:?}", file.display()))
    };
    File::read(file)?.retry_of(queue).ok_or_else(missing)
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let file = File::read(&arguments.file)?;
    if arguments.check {
        say(&format!("{} is right: {}", arguments.file.display(), described(&file)));
        return Ok(());
    }
    let endpoints = arguments.endpoints(&file)?;
    let counted = arguments.listen.as_ref().map(|_| listen::count()).transpose()?;
    // Only now, since a signal without a handler ends even a read that blocks. Before connecting, which takes up to a minute.
    let mut reloads = Reloads::new()?;
    signals::enforce_second()?;
    let mut signals = Signals::new()?;
    let client = tokio::select! {
        connected = arguments.connect(&file, endpoints) => connected?,
        _ = signals.next() => return Ok(()),
    };
    let result = serve(&arguments, file, &client, counted, &mut signals, &mut reloads).await;
    // Its handlers are done.
    let _ = timeout(GRACE, client.close()).await;
    result
}

fn described(file: &File) -> String {
    let relay = if file.relay_delays { ", a relay of delays" } else { "" };
    format!(
        "{}, {}{relay}",
        counted(file.consumer.len() as u64, "consumer"),
        counted(file.service.len() as u64, "service")
    )
}

impl Arguments {
    fn endpoints(&self, file: &File) -> Result<Vec<Options>, Failure> {
        let mut urls = self.urls.given()?;
        if urls.is_empty() {
            urls = file.urls();
        }
        if urls.is_empty() {
            urls.push("amqp://localhost".to_owned());
        }
        reach::endpoints(&urls)
    }

    async fn connect(&self, file: &File, endpoints: Vec<Options>) -> Result<Client, Failure> {
        for options in &endpoints {
            reach::check_files(options).await?;
        }
        let limits =
            ConnectLimits { max_retries: self.connect_max_retries, within: CONNECT_WITHIN };
        let builder = Client::builder().endpoint(endpoints)?;
        let builder = builder.name(&file.name).connect_limits(limits);
        Ok(builder.max_subscriptions(self.max_connection_subscriptions).connect().await?)
    }
}

/// A reload that is under way, in steps.
type Reloading = Pin<Box<dyn Future<Output = Result<Step, Failure>> + Send>>;

enum Step {
    /// The new file has no mistake.
    Read(File),
    /// The new file can be run.
    Prepared(Reloaded),
    /// What is new of it gets messages.
    Ready { file: File, definitions: Vec<Definition> },
}

/// Runs what the file says, and what it says later, until it is stopped.
async fn serve(
    arguments: &Arguments,
    mut file: File,
    client: &Client,
    counted: Option<PrometheusHandle>,
    signals: &mut Signals,
    reloads: &mut Reloads,
) -> Result<(), Failure> {
    let context = Context::new(client, &arguments.pools, arguments.drain);
    let mut tasks = Tasks::new(&context);
    let definitions = Definition::all(&file, &arguments.pools);
    tasks.expect(&definitions);
    let _listening = match (&arguments.listen, counted) {
        (Some(address), Some(counted)) => {
            Some(Listening::begin(address, client, counted, tasks.wanted()).await?)
        }
        _ => None,
    };
    let started = tokio::select! {
        started = first(&context, &file, definitions) => started?,
        _ = signals.next() => return Ok(()),
    };
    tasks.start(started);
    say(&format!("running: {}", described(&file)));
    let mut reloading: Option<Reloading> = None;
    loop {
        tasks.note_reloading(reloading.is_some());
        tokio::select! {
            // A second one ends the process.
            _ = signals.next() => {
                say(&format!("stopped: {}", tasks.stop().await?));
                return Ok(());
            }
            ended = tasks.ended() => match ended {
                Ended::Stopped => {}
                Ended::New(failure) => {
                    tasks.give_up_new();
                    reloading = None;
                    goes_on(&failure);
                }
                Ended::Current(failure) => {
                    let drain = humantime::format_duration(arguments.drain);
                    note(&format!("stops, within {drain}, after a failure: {failure}"));
                    let _ = tasks.stop().await;
                    return Err(failure);
                }
            },
            step = step(&mut reloading) => {
                reloading = None;
                match step {
                    Ok(Step::Read(new)) => {
                        let definitions = Definition::all(&new, &arguments.pools);
                        let new_ones = tasks.new_among(definitions.clone());
                        let preparing =
                            reload::prepare(context.clone(), new, definitions, new_ones);
                        reloading = Some(Box::pin(async { preparing.await.map(Step::Prepared) }));
                    }
                    Ok(Step::Prepared(Reloaded { file, definitions, new })) => {
                        let (client, ready) = (client.clone(), tasks.start_beside(new));
                        reloading = Some(Box::pin(async move {
                            ready.await?;
                            // Last of all that can fail: it ends only with the client.
                            if file.relay_delays {
                                client.delays().relay().await?;
                            }
                            Ok(Step::Ready { file, definitions })
                        }));
                    }
                    Ok(Step::Ready { file: new, definitions }) => {
                        let (started, stopped) = tasks.replace(&definitions);
                        if let Some(text) = reload::unheard_changes(&file, &new, &arguments.file) {
                            note(&text);
                        }
                        let path = arguments.file.display();
                        say(&format!("read {path} again: {started} started, {stopped} stopped"));
                        say(&format!("running: {}", described(&new)));
                        file = new;
                    }
                    Err(failure) => {
                        tasks.give_up_new();
                        goes_on(&failure);
                    }
                }
            }
            () = reloads.next(), if reloading.is_none() => {
                reloading = Some(Box::pin(read_again(arguments.file.clone())));
            }
        }
    }
}

/// Reads the file on a thread of its own: a pipe or a file system that is away may never answer.
async fn read_again(path: PathBuf) -> Result<Step, Failure> {
    let late = |_| Failure::new(format!("{} could not be read within {READING:?}", path.display()));
    let file = path.clone();
    let read = timeout(READING, spawn_blocking(move || File::read(&file))).await.map_err(late)?;
    read.map_err(Failure::new)?.map(Step::Read)
}

/// What runs from the beginning.
async fn first(
    context: &Context,
    file: &File,
    definitions: Vec<Definition>,
) -> Result<Vec<Prepared>, Failure> {
    let prepared = context.prepare(definitions, MissingQueue::IsAwaited).await?;
    context.client.apply(&needed(file, &prepared)).await?;
    if file.relay_delays {
        context.client.delays().relay().await?;
    }
    Ok(prepared)
}

async fn step(reloading: &mut Option<Reloading>) -> Result<Step, Failure> {
    match reloading {
        Some(reloading) => reloading.await,
        None => std::future::pending().await,
    }
}

fn goes_on(failure: &Failure) {
    note(&format!("goes on with what it has: {failure}"));
}

/// The wish to read the file again.
struct Reloads(#[cfg(unix)] tokio::signal::unix::Signal);

impl Reloads {
    #[cfg(unix)]
    fn new() -> Result<Self, Failure> {
        use tokio::signal::unix::{SignalKind, signal};
        let hangup = signal(SignalKind::hangup());
        hangup
            .map(Reloads)
            .map_err(|error| Failure::new(format_args!("cannot wait for signals: {error}")))
    }

    #[cfg(not(unix))]
    fn new() -> Result<Self, Failure> {
        Ok(Reloads())
    }

    async fn next(&mut self) {
        #[cfg(unix)]
        {
            self.0.recv().await;
        }
        #[cfg(not(unix))]
        std::future::pending().await
    }
}
