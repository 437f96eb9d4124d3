//! `leveret run`: a service from a file, whose handlers are commands and HTTP endpoints.

mod command;
mod facts;
mod file;
mod http;
mod listen;
mod pools;
mod retry;
mod work;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use leveret::{Client, ConnectLimits, Incoming, Message, Summary};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::failure::Failure;
use crate::message::with;
use crate::output::{counted, say};
use crate::reach::{Stops, duration};
use file::{Consumer, File, Service};
use listen::Listening;
use pools::Pools;
use work::Work;

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

    /// The broker, instead of the one in the file. Of several, the first that answers is used.
    #[arg(
        long = "url",
        visible_alias = "mq-url",
        env = "LEVERET_URL",
        hide_env_values = true,
        value_name = "URL",
        value_delimiter = ','
    )]
    urls: Vec<String>,

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
        visible_alias = "mq-max-connection-subscriptions",
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

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let file = File::read(&arguments.file)?;
    if arguments.check {
        say(&format!("{} is right: {}", arguments.file.display(), described(&file)));
        return Ok(());
    }
    log();
    let counted = arguments.listen.as_ref().map(|_| listen::count()).transpose()?;
    let mut stops = Stops::new()?;
    let client = tokio::select! {
        connected = arguments.connect(&file) => connected?,
        () = stops.next() => return Ok(()),
    };
    let result = serve(&arguments, file, &client, counted, &mut stops).await;
    client.close().await;
    result
}

/// What happens goes to the standard error, for who runs it.
fn log() {
    use tracing_subscriber::EnvFilter;
    let filter =
        EnvFilter::try_from_env("LEVERET_LOG").unwrap_or_else(|_| EnvFilter::new("leveret=info"));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(console::colors_enabled_stderr())
        .try_init();
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
    async fn connect(&self, file: &File) -> Result<Client, Failure> {
        let mut urls = self.urls.clone();
        if urls.is_empty() {
            urls = file.urls();
        }
        if urls.is_empty() {
            urls.push("amqp://localhost".to_owned());
        }
        let limits =
            ConnectLimits { max_retries: self.connect_max_retries, ..ConnectLimits::default() };
        let builder = Client::builder().endpoint(urls)?.name(&file.name).connect_limits(limits);
        Ok(builder.max_subscriptions(self.max_connection_subscriptions).connect().await?)
    }
}

/// Runs what the file says, again and again with what it says by then, until it is stopped.
async fn serve(
    arguments: &Arguments,
    file: File,
    client: &Client,
    counted: Option<PrometheusHandle>,
    stops: &mut Stops,
) -> Result<(), Failure> {
    let _listening = match (&arguments.listen, counted) {
        (Some(address), Some(counted)) => Some(Listening::begin(address, client, counted).await?),
        _ => None,
    };
    let mut reloads = reloads()?;
    let mut file = file;
    loop {
        client.apply(file.topology()).await?;
        let mut running = Running::begin(client, &file, arguments).await?;
        say(&format!("running: {}", described(&file)));
        let next = loop {
            tokio::select! {
                () = stops.next() => {
                    let done = tokio::select! {
                        done = running.stop() => done?,
                        () = stops.next() => return Err(Failure::stopped("stopped before all handlers had finished")),
                    };
                    say(&format!("stopped: {done}"));
                    return Ok(());
                }
                ended = running.ended() => {
                    running.stop().await?;
                    return ended;
                }
                () = reloads.next() => match File::read(&arguments.file) {
                    Ok(next) => break next,
                    Err(failure) => eprintln!("leveret: goes on with what it has: {failure}"),
                },
            }
        };
        let done = running.stop().await?;
        say(&format!("read {} again: {done} until now", arguments.file.display()));
        file = next;
    }
}

/// The consumers and services of a file, each in a task.
struct Running {
    /// How many messages each has handled.
    tasks: JoinSet<Result<u64, leveret::Error>>,
    stop: watch::Sender<bool>,
    handled: u64,
}

impl Running {
    async fn begin(
        client: &Client,
        file: &File,
        arguments: &Arguments,
    ) -> Result<Running, Failure> {
        let mut running =
            Running { tasks: JoinSet::new(), stop: watch::Sender::new(false), handled: 0 };
        if file.relay_delays {
            client.delays().relay().await?;
        }
        for consumer in &file.consumer {
            running.consume(client, consumer, arguments).await?;
        }
        for service in &file.service {
            running.serve(client, file, service, arguments).await?;
        }
        for orb in file.orbs(&arguments.pools) {
            let redelivering = orb.redelivery(client).run_until(running.stopped());
            // What it sends back is not handled by that.
            running.tasks.spawn(async move { redelivering.await.map(|_| 0) });
        }
        Ok(running)
    }

    async fn consume(
        &mut self,
        client: &Client,
        consumer: &Consumer,
        arguments: &Arguments,
    ) -> Result<(), Failure> {
        let work = Work::new(&consumer.command, &consumer.http, consumer.timeout.0).await?;
        let retry = consumer.retry.as_ref().map(|retry| retry.retry(&arguments.pools));
        let builder = client
            .consumer(&consumer.queue)
            .workers(consumer.workers)
            .subscribers(consumer.subscribers(&arguments.pools))
            .drain(arguments.drain);
        let builder =
            with(builder, &consumer.prefetch, |builder, prefetch| builder.prefetch(prefetch));
        let builder = with(builder, &retry, |builder, retry| builder.retry(retry));
        let stop = self.stopped();
        match consumer.batch {
            None => {
                let handler = move |message: Incoming| {
                    let work = work.clone();
                    async move { work.on(message).await.map(drop) }
                };
                self.spawn(builder.handle(handler).run_until(stop));
            }
            Some(batch) => {
                let handler = move |messages| {
                    let work = work.clone();
                    async move { work.on_batch(messages).await }
                };
                self.spawn(builder.handle_batches(batch.into(), handler).run_until(stop));
            }
        }
        Ok(())
    }

    async fn serve(
        &mut self,
        client: &Client,
        file: &File,
        service: &Service,
        arguments: &Arguments,
    ) -> Result<(), Failure> {
        let work = Work::new(&service.command, &service.http, service.timeout.0).await?;
        let retry = service.retry.as_ref().map(|retry| retry.retry(&arguments.pools));
        let method = move |message: Incoming| {
            let work = work.clone();
            async move { work.on(message).await.map(Message::from) }
        };
        let declared = file.topology().queues().iter().find(|queue| queue.name() == service.name);
        let builder = client.service(&service.name).fallback(method).workers(service.workers);
        let builder = builder.drain(arguments.drain);
        let builder =
            with(builder, &service.prefetch, |builder, prefetch| builder.prefetch(prefetch));
        let builder =
            with(builder, &service.exchange, |builder, exchange| builder.exchange(exchange));
        let builder = with(builder, &declared.cloned(), |builder, queue| builder.queue(queue));
        let builder = with(builder, &retry, |builder, retry| builder.retry(retry));
        // Who calls once it is said to run finds its queue.
        builder.declare().await?;
        self.spawn(builder.run_until(self.stopped()));
        Ok(())
    }

    fn spawn(
        &mut self,
        running: impl Future<Output = Result<Summary, leveret::Error>> + Send + 'static,
    ) {
        self.tasks.spawn(async move { running.await.map(|summary| summary.handled) });
    }

    /// Until it is stopped.
    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut stop = self.stop.subscribe();
        async move { drop(stop.wait_for(|stop| *stop).await) }
    }

    /// Waits until one of them has ended by itself, which none should.
    async fn ended(&mut self) -> Result<(), Failure> {
        match self.tasks.join_next().await {
            Some(Ok(Err(error))) => Err(error.into()),
            Some(Err(error)) => Err(Failure::new(error)),
            Some(Ok(Ok(_))) => Err(Failure::new("a handler has ended by itself")),
            // Delays are relayed by the client itself.
            None => std::future::pending().await,
        }
    }

    /// Stops all of them, and waits until they have finished what they were at.
    async fn stop(mut self) -> Result<String, Failure> {
        self.stop.send_replace(true);
        let mut failed = None;
        while let Some(ended) = self.tasks.join_next().await {
            match ended {
                Ok(Ok(handled)) => self.handled += handled,
                Ok(Err(error)) => failed = Some(Failure::from(error)),
                Err(error) => failed = Some(Failure::new(error)),
            }
        }
        match failed {
            Some(failure) => Err(failure),
            None => Ok(format!("{} handled", counted(self.handled, "message"))),
        }
    }
}

/// The wish to read the file again.
struct Reloads(#[cfg(unix)] tokio::signal::unix::Signal);

#[cfg(unix)]
fn reloads() -> Result<Reloads, Failure> {
    use tokio::signal::unix::{SignalKind, signal};
    let hangup = signal(SignalKind::hangup());
    hangup
        .map(Reloads)
        .map_err(|error| Failure::new(format_args!("cannot wait for signals: {error}")))
}

#[cfg(not(unix))]
fn reloads() -> Result<Reloads, Failure> {
    Ok(Reloads())
}

impl Reloads {
    async fn next(&mut self) {
        #[cfg(unix)]
        {
            self.0.recv().await;
        }
        #[cfg(not(unix))]
        std::future::pending().await
    }
}
