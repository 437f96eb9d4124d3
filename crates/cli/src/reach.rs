//! Reaching a broker: the options that all commands share, and what becomes of a command that is stopped.

use std::time::Duration;

use clap::Args;
use leveret::amqp::Options;
use leveret::{Client, ClientBuilder, ConnectLimits, IntoEndpoints};

use crate::failure::Failure;

/// Which broker, and how patient to be with it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Broker")]
pub(crate) struct Reach {
    /// The broker: amqp://user:password@host:port/vhost, or amqps://… Of several, the first that answers is used.
    #[arg(
        long = "url",
        visible_alias = "mq-url",
        env = "LEVERET_URL",
        hide_env_values = true,
        value_name = "URL",
        value_delimiter = ',',
        default_value = "amqp://localhost"
    )]
    urls: Vec<String>,

    /// How long an answer of the broker may take.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    timeout: Duration,
}

/// A time as a person writes it: `500ms`, `10s`, `5m`, `4h`, `7d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "a time is needed: a number and ms, s, m, h or d, as in 30s or 4h".to_owned())
}

impl Reach {
    /// Connects, does something, and closes the client whatever comes: what was taken out of queues is back before the program
    /// ends. Ctrl-C stops it.
    pub(crate) async fn with_client<T>(
        &self,
        command: impl AsyncFnOnce(&Client) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let connecting = self.builder()?.connect();
        let client = tokio::select! {
            connected = connecting => connected?,
            stopped = until_stopped() => return Err(stopped.err().unwrap_or_else(|| Failure::stopped("stopped"))),
        };
        let result = tokio::select! {
            result = command(&client) => result,
            stopped = until_stopped() => Err(stopped.err().unwrap_or_else(|| {
                Failure::stopped("stopped; what was done until then is done")
            })),
        };
        client.close().await;
        result
    }

    /// The same for the first broker that answers alone: what is done in several steps is done on one broker.
    pub(crate) async fn to_first(&self) -> Result<(Reach, Options), Failure> {
        let mut failed = None;
        for url in &self.urls {
            let reach = Reach { urls: vec![url.clone()], timeout: self.timeout };
            let [options] = reach.endpoints()?.try_into().map_err(|_| Failure::wrong("--url"))?;
            match reach.with_client(async |_| Ok(())).await {
                Ok(()) => return Ok((reach, options)),
                Err(failure) => failed = failed.or(Some(failure)),
            }
        }
        Err(failed.unwrap_or_else(|| Failure::wrong("--url: no broker is given")))
    }

    /// Where the brokers are.
    pub(crate) fn endpoints(&self) -> Result<Vec<Options>, Failure> {
        Ok(self.urls.clone().into_endpoints()?)
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    fn builder(&self) -> Result<ClientBuilder, Failure> {
        // A person sees that nobody answers, and tries again.
        let limits = ConnectLimits { max_retries: 0, within: self.timeout };
        let builder = Client::builder().endpoint(self.endpoints()?)?;
        Ok(builder.name("leveret").timeout(self.timeout).connect_limits(limits))
    }
}

/// Waits for Ctrl-C, or for the signal by which services are stopped.
pub(crate) async fn until_stopped() -> Result<(), Failure> {
    Stops::new()?.next().await;
    Ok(())
}

/// Wishes to stop: Ctrl-C, and the signal by which services are stopped. None is missed that comes while it is there.
#[derive(Debug)]
pub(crate) struct Stops {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Stops {
    #[cfg(unix)]
    pub(crate) fn new() -> Result<Self, Failure> {
        use tokio::signal::unix::{SignalKind, signal};
        let failed = |error| Failure::new(format_args!("cannot wait for signals: {error}"));
        let interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        let terminate = signal(SignalKind::terminate()).map_err(failed)?;
        Ok(Stops { interrupt, terminate })
    }

    #[cfg(not(unix))]
    pub(crate) fn new() -> Result<Self, Failure> {
        Ok(Stops {})
    }

    pub(crate) async fn next(&mut self) {
        #[cfg(unix)]
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
        #[cfg(not(unix))]
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
