//! Reaching a broker: the options that all commands share, and what becomes of a command that is stopped.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use leveret::amqp::Options;
use leveret::{Client, ClientBuilder, ConnectLimits, IntoEndpoints};

use crate::failure::Failure;

/// Which broker, and how patient to be with it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Broker")]
pub(crate) struct Reach {
    #[command(flatten)]
    urls: Urls,

    /// How long an answer of the broker may take.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    timeout: Duration,
}

/// Where the brokers are. A list of processes shows arguments, so a URL with a password is better in a file.
#[derive(Clone, Debug, Args)]
pub(crate) struct Urls {
    /// The broker: amqp://user:password@host:port/vhost, or amqps://… Of several, the first that answers is used. Without it, the
    /// variable LEVERET_URL says so; else it is amqp://localhost.
    #[arg(
        long = "url",
        visible_alias = "mq-url",
        value_name = "URL",
        value_delimiter = ',',
        conflicts_with = "url_file"
    )]
    urls: Vec<String>,

    /// A file with the URL, or with several, each on a line of its own: other users see no password in the list of processes.
    /// The variable LEVERET_URL_FILE names one, too.
    #[arg(long, value_name = "FILE")]
    url_file: Option<PathBuf>,
}

impl Urls {
    pub(crate) fn of(url: String) -> Self {
        Urls { urls: vec![url], url_file: None }
    }

    /// Those that were given: by an argument or, if there is none, by the environment. None of them is empty.
    pub(crate) fn given(&self) -> Result<Vec<String>, Failure> {
        if !self.urls.is_empty() {
            return Ok(self.urls.clone());
        }
        if let Some(path) = &self.url_file {
            return read_urls(path);
        }
        if let Some(urls) = variable("LEVERET_URL") {
            let urls = urls.into_string().map_err(|_| Failure::wrong("LEVERET_URL is no text"))?;
            return Ok(urls.split(',').map(str::to_owned).collect());
        }
        variable("LEVERET_URL_FILE").map_or(Ok(Vec::new()), |path| read_urls(Path::new(&path)))
    }
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn read_urls(path: &Path) -> Result<Vec<String>, Failure> {
    let wrong = |why: &dyn std::fmt::Display| {
        Failure::wrong(format_args!("the file with the broker's URL, {}: {why}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    let lines = text.lines().map(str::trim);
    let urls: Vec<String> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    match urls.is_empty() {
        true => Err(wrong(&"there is no URL in it")),
        false => Ok(urls),
    }
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
        for url in self.urls()? {
            let reach = Reach { urls: Urls::of(url), timeout: self.timeout };
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
        Ok(self.urls()?.into_endpoints()?)
    }

    fn urls(&self) -> Result<Vec<String>, Failure> {
        let urls = self.urls.given()?;
        Ok(if urls.is_empty() { vec!["amqp://localhost".to_owned()] } else { urls })
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
