//! Reaching a broker: the options that all commands share, and what becomes of a command that is stopped.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use leveret::amqp::Options;
use leveret::{Client, ClientBuilder, ConnectLimits, IntoEndpoints};
use tokio::time::{Instant, timeout, timeout_at};

use crate::failure::{Failure, Status};
use crate::signals::{self, GRACE, Signals};

/// Which broker, and how patient to be with it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Broker")]
pub(crate) struct Reach {
    #[command(flatten)]
    urls: Urls,

    /// How long the broker may be silent: a command that only asks it something ends in that time.
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
/// How long a connection to a broker that does not answer may take to close.
const PARTING: Duration = Duration::from_millis(100);

/// Between these is the heartbeat interval that is asked for: AMQP counts in seconds, and the longest is the library's own.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(10);

/// A time as a person writes it: `500ms`, `10s`, `5m`, `4h`, `7d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "a time is needed: a number and ms, s, m, h or d, as in 30s or 4h".to_owned())
}

/// How much of a command the timeout bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bound {
    /// All of it together.
    Whole,
    /// Connecting, each answer of the broker, and closing: the command may have any number of messages.
    Steps,
}

impl Reach {
    /// Connects, runs a command of any length, and closes the client whatever the outcome: messages taken out of queues are
    /// back before the program ends. A signal stops it.
    pub(crate) async fn with_client<T>(
        &self,
        command: impl AsyncFnOnce(&Client) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.run(Bound::Steps, command).await
    }

    /// The same for a command that asks the broker a few things: it ends within the timeout, closing included.
    pub(crate) async fn with_client_briefly<T>(
        &self,
        command: impl AsyncFnOnce(&Client) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.run(Bound::Whole, command).await
    }

    async fn run<T>(
        &self,
        bound: Bound,
        command: impl AsyncFnOnce(&Client) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        signals::enforce()?;
        let mut signals = Signals::new()?;
        let deadline = deadline_in(self.timeout);
        let connecting = async {
            let endpoints = self.endpoints()?;
            for options in &endpoints {
                check_files(options).await?;
            }
            Ok(self.builder(endpoints)?.connect().await?)
        };
        let connecting = timeout_at(deadline + PARTING, connecting);
        let client = tokio::select! {
            connected = connecting => connected.unwrap_or_else(|_| Err(self.silent()))?,
            signal = signals.next() => return Err(Failure::stopped(signal, "nothing was done")),
        };
        let bounded = async {
            match bound {
                Bound::Steps => command(&client).await,
                Bound::Whole => timeout_at(deadline, command(&client))
                    .await
                    .unwrap_or_else(|_| Err(self.silent())),
            }
        };
        let result = tokio::select! {
            result = bounded => result,
            signal = signals.next() => Err(Failure::stopped(signal, "its work up to then is done")),
        };
        let patience = match (&result, bound) {
            (Err(failure), _) if failure.is_by_signal() => GRACE.min(self.timeout) / 2,
            (Err(failure), _) if failure.status() == Status::NoBroker => PARTING,
            (_, Bound::Whole) => deadline.saturating_duration_since(Instant::now()).max(PARTING),
            (_, Bound::Steps) => self.timeout,
        };
        let _ = timeout(patience, client.close()).await;
        result
    }

    /// The broker has not answered.
    fn silent(&self) -> Failure {
        let timeout = humantime::format_duration(self.timeout);
        Failure::no_broker(format_args!(
            "no answer of the broker within {timeout}; --timeout allows more"
        ))
    }

    /// The same for the first broker that answers alone: what is done in several steps is done on one broker.
    pub(crate) async fn to_first(&self) -> Result<(Reach, Options), Failure> {
        let mut failed = None;
        for url in self.urls()? {
            let reach = Reach { urls: Urls::of(url), timeout: self.timeout };
            let [options] = reach.endpoints()?.try_into().map_err(|_| Failure::wrong("--url"))?;
            match reach.with_client_briefly(async |_| Ok(())).await {
                Ok(()) => return Ok((reach, options)),
                Err(failure) => failed = failed.or(Some(failure)),
            }
        }
        Err(failed.unwrap_or_else(|| Failure::wrong("--url: no broker is given")))
    }

    /// The same brokers, with less time.
    pub(crate) fn until(&self, deadline: Instant) -> Reach {
        let timeout = deadline.saturating_duration_since(Instant::now());
        Reach { urls: self.urls.clone(), timeout }
    }

    /// Where the brokers are, and how long each may take.
    pub(crate) fn endpoints(&self) -> Result<Vec<Options>, Failure> {
        let mut endpoints = endpoints(&self.urls()?)?;
        // One that is silent leaves time for the others.
        let each = self.timeout / u32::try_from(endpoints.len().max(1)).unwrap_or(u32::MAX);
        for options in &mut endpoints {
            options.connection_timeout = options.connection_timeout.min(each);
            // A broker that falls silent while a command waits for messages is noticed by this alone.
            options.heartbeat.get_or_insert((self.timeout / 2).clamp(SHORTEST, LONGEST));
            options.limits.reply_timeout = self.timeout;
            options.limits.publish_timeout = self.timeout;
        }
        Ok(endpoints)
    }

    fn urls(&self) -> Result<Vec<String>, Failure> {
        let urls = self.urls.given()?;
        Ok(if urls.is_empty() { vec!["amqp://localhost".to_owned()] } else { urls })
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    fn builder(&self, endpoints: Vec<Options>) -> Result<ClientBuilder, Failure> {
        // A person sees that nobody answers, and tries again.
        let limits = ConnectLimits { max_retries: 0, within: self.timeout };
        let builder = Client::builder().endpoint(endpoints)?.name("leveret");
        Ok(builder.timeout(self.timeout).connect_limits(limits).give_up_after(self.timeout))
    }
}

/// The brokers at these URLs.
pub(crate) fn endpoints(urls: &[String]) -> Result<Vec<Options>, Failure> {
    // A comma separates them, so one within a password leaves pieces that are no URLs. None is quoted.
    if urls.len() > 1 && urls.iter().any(|url| !url.contains("://")) {
        return Err(Failure::wrong(
            "--url: what follows a comma has to be a whole URL, as in amqp://user:password@host1,amqp://user:password@host2; \
             write a comma in a password as %2C",
        ));
    }
    Ok(urls.to_vec().into_endpoints()?)
}

/// Certificates and keys that cannot be used are no fault of a broker.
pub(crate) async fn check_files(options: &Options) -> Result<(), Failure> {
    match &options.tls {
        Some(tls) => tls.client_config().await.map(drop).map_err(Failure::wrong),
        None => Ok(()),
    }
}

/// That long from now; a time too long to be reckoned with is a year.
pub(crate) fn deadline_in(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}
