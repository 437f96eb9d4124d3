//! Reaching a broker: the options that all commands share, and what becomes of a command that is stopped.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use leveret::amqp::{self, Options};
use leveret::{Client, ClientBuilder, ClientEvent, ClientEvents, ConnectLimits, IntoEndpoints};
use tokio::time::{Instant, timeout, timeout_at};

use crate::failure::{Failure, Status};
use crate::signals::{self, GIVING_BACK, Signals};

/// Which broker, and how patient to be with it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Broker")]
pub(crate) struct Reach {
    #[command(flatten)]
    urls: Urls,

    /// How long the broker may be silent: a command that only asks it something ends in that time.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    timeout: Duration,

    /// When all of it has to be over, if it is a part of something larger.
    #[arg(skip)]
    deadline: Option<Instant>,
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
/// How long closing may take at least, and how long the client's own words for a broker that does not answer are waited for.
const PARTING: Duration = Duration::from_millis(100);
/// How much of the timeout is kept for closing at most: what a command holds goes back then.
const CLOSING: Duration = Duration::from_secs(1);

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
    /// Connecting, each answer of the broker, and closing: the command may have any number of messages. A broker that falls
    /// silent on one connection after the other ends it.
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
        let connected_by = Instant::now() + self.left();
        let deadline = self.deadline.unwrap_or(connected_by);
        let closing = (self.timeout / 4).min(CLOSING);
        let connecting = async {
            let endpoints = self.endpoints()?;
            for options in &endpoints {
                check_files(options).await?;
            }
            Ok(self.builder(endpoints)?.connect().await?)
        };
        let connecting = timeout_at(connected_by + PARTING, connecting);
        let client = tokio::select! {
            connected = connecting => connected.unwrap_or_else(|_| Err(self.silent()))?,
            signal = signals.next() => return Err(Failure::stopped(signal, "nothing was done")),
        };
        let events = client.watch();
        let bounded = async {
            let done = async {
                tokio::select! {
                    result = command(&client) => result,
                    failure = self.until_silent(events) => Err(failure),
                }
            };
            match bound {
                Bound::Steps => done.await,
                Bound::Whole => timeout_at(deadline - closing, done)
                    .await
                    .unwrap_or_else(|_| Err(self.silent())),
            }
        };
        let (result, stopped) = tokio::select! {
            result = bounded => (result, None),
            signal = signals.next() => {
                (Err(Failure::stopped(signal, "its work up to then is done")), Some(signal))
            }
        };
        let patience = match (&result, bound) {
            _ if stopped.is_some() => GIVING_BACK,
            (_, Bound::Whole) => deadline.saturating_duration_since(Instant::now()).max(PARTING),
            (Err(failure), _) if failure.status() == Status::NoBroker => closing.max(PARTING),
            (_, Bound::Steps) => self.timeout,
        };
        let closed = timeout(patience, client.close()).await;
        match (closed, stopped) {
            (Err(_), Some(signal)) => Err(Failure::stopped(
                signal,
                "its work up to then is done. The broker did not answer in time: messages that were out go back to their \
                 queue, and may count as delivered once more",
            )),
            _ => result,
        }
    }

    /// Waits until the broker has fallen silent on a connection soon after it did on the one before: it lets clients connect,
    /// and answers nothing else. The client would try again and again.
    async fn until_silent(&self, mut events: ClientEvents) -> Failure {
        let soon = (4 * self.heartbeat()).max(self.timeout.saturating_mul(2));
        let mut silences: HashMap<String, Instant> = HashMap::new();
        while let Some(event) = events.next().await {
            let ClientEvent::Lost { connection, error } = event else { continue };
            let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<amqp::Error>());
            if cause.is_none_or(|cause| cause.kind() != amqp::ErrorKind::HeartbeatLost) {
                continue;
            }
            let before = silences.insert(connection, Instant::now());
            if before.is_some_and(|before| before.elapsed() < soon) {
                return self.silent();
            }
        }
        std::future::pending().await
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
        let (urls, mut failed) = (self.urls()?, None);
        endpoints(&urls)?;
        let until = Instant::now() + self.left();
        for (url, left) in urls.iter().zip((1..=urls.len() as u32).rev()) {
            let share = until.saturating_duration_since(Instant::now()) / left;
            let urls = Urls::of(url.clone());
            let reach = Reach { urls, timeout: self.timeout, deadline: self.deadline };
            let [options] = reach.endpoints()?.try_into().map_err(|_| Failure::wrong("--url"))?;
            let brief = reach.until(Instant::now() + share);
            match brief.with_client_briefly(async |_| Ok(())).await {
                Ok(()) => return Ok((reach, options)),
                Err(failure) => failed = failed.or(Some(failure)),
            }
        }
        Err(failed.unwrap_or_else(|| Failure::wrong("--url: no broker is given")))
    }

    /// The same brokers, for a part of a command that has to be over at that time.
    pub(crate) fn until(&self, deadline: Instant) -> Reach {
        Reach { deadline: Some(deadline), ..self.clone() }
    }

    /// How long the broker may still be silent.
    pub(crate) fn left(&self) -> Duration {
        let bounded = deadline_in(self.timeout);
        let end = self.deadline.map_or(bounded, |deadline| deadline.min(bounded));
        end.saturating_duration_since(Instant::now())
    }

    /// Where the brokers are, and how long each may take.
    pub(crate) fn endpoints(&self) -> Result<Vec<Options>, Failure> {
        let mut endpoints = endpoints(&self.urls()?)?;
        // One that is silent leaves time for the others.
        let each = self.left() / u32::try_from(endpoints.len().max(1)).unwrap_or(u32::MAX);
        for options in &mut endpoints {
            options.connection_timeout = options.connection_timeout.min(each);
            // A broker that falls silent while a command waits for messages is noticed by this alone.
            options.heartbeat.get_or_insert(self.heartbeat());
            options.limits.reply_timeout = self.timeout;
            options.limits.publish_timeout = self.timeout;
        }
        Ok(endpoints)
    }

    fn heartbeat(&self) -> Duration {
        (self.timeout / 2).clamp(SHORTEST, LONGEST)
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
        let limits = ConnectLimits { max_retries: 0, within: self.left() };
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
