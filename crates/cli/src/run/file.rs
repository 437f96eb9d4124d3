//! The file of a service.
//!
//! ```toml
//! name = "shop"
//! url = "amqp://localhost"              # or a list; --url and LEVERET_URL go before it
//!
//! [[topology.exchange]]                 # the form of `leveret topology`; or topology-file = "topology.toml"
//! name = "orders"
//! type = "topic"
//!
//! [[topology.queue]]
//! name = "billing"
//! type = "quorum"
//! bind = [{ exchange = "orders", key = "order.*" }]
//!
//! [[consumer]]
//! queue = "billing"
//! command = ["./bill", "--fast"]        # the message on stdin; 0: done, 75: try again, 65: park it
//! workers = 4
//! timeout = "30s"
//! retry = { wait = "2s", multiplier = 1.5, longest = "1m", times = 5 }
//!
//! [[consumer]]
//! queue = "audit"
//! http = "http://localhost:8080/audit"  # POST; 2xx: done, 429 and 5xx: try again, other 4xx: park it
//! batch = { size = 100, within = "1s" } # lines of JSON
//!
//! [[service]]
//! name = "prices"
//! command = ["./quote"]                 # what it writes is the reply
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use leveret::{
    Acapi, BatchOptions, Chandra, CoverArt, Exchange, ExchangeKind, Orb, QueueType, Retry,
    RetryPolicy, Topology,
};
use serde::Deserialize;
use serde::de::{self, Deserializer};

use crate::failure::Failure;
use crate::message::with;

/// What a file says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct File {
    /// The name of the client, which the broker's management pages show.
    #[serde(default = "File::default_name")]
    pub(super) name: String,
    #[serde(default)]
    url: Urls,
    #[serde(default)]
    topology: Topology,
    /// Beside the file, if it is relative.
    topology_file: Option<PathBuf>,
    #[serde(default)]
    pub(super) consumer: Vec<Consumer>,
    #[serde(default)]
    pub(super) service: Vec<Service>,
}

/// One URL, or several.
#[derive(Debug, Default, Deserialize)]
#[serde(untagged, expecting = "a URL in quotes, or a list of them")]
enum Urls {
    #[default]
    None,
    One(String),
    Several(Vec<String>),
}

/// A queue, and what is done with its messages.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Consumer {
    pub(super) queue: String,
    pub(super) command: Option<Vec<String>>,
    pub(super) http: Option<String>,
    #[serde(default = "default_timeout")]
    pub(super) timeout: Time,
    #[serde(default = "one")]
    pub(super) workers: usize,
    pub(super) prefetch: Option<u16>,
    #[serde(default = "one")]
    pub(super) subscribers: usize,
    pub(super) batch: Option<Batch>,
    pub(super) retry: Option<RetryOptions>,
}

/// A service, and what answers its requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Service {
    pub(super) name: String,
    pub(super) exchange: Option<String>,
    pub(super) command: Option<Vec<String>>,
    pub(super) http: Option<String>,
    #[serde(default = "default_timeout")]
    pub(super) timeout: Time,
    #[serde(default = "one")]
    pub(super) workers: usize,
    pub(super) prefetch: Option<u16>,
    pub(super) retry: Option<RetryOptions>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Batch {
    size: u16,
    #[serde(default = "default_within")]
    within: Time,
}

impl From<Batch> for BatchOptions {
    fn from(batch: Batch) -> Self {
        BatchOptions { size: batch.size, within: batch.within.0 }
    }
}

/// What becomes of messages that fail.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RetryOptions {
    profile: Profile,
    /// The name with which those of its objects begin, of Orb and Cover Art.
    name: Option<String>,
    /// The exchange by which messages come back, of Chandra: a topic exchange.
    exchange: Option<String>,
    wait: Option<Time>,
    waits: Option<Vec<Time>>,
    multiplier: Option<f64>,
    longest: Option<Time>,
    times: Option<u32>,
    jitter: Option<f64>,
    #[serde(deserialize_with = "yes")]
    immediate_first: bool,
    max_age: Option<Time>,
    queue_type: Option<FileQueueType>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Profile {
    #[default]
    Leveret,
    Acapi,
    CoverArt,
    Orb,
    Chandra,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FileQueueType {
    Classic,
    Quorum,
}

/// `4h`, `1500ms`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Time(pub(super) Duration);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let named = |error| de::Error::custom(format!("{text:?}: {error}"));
        crate::reach::duration(&text).map(Time).map_err(named)
    }
}

fn yes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    bool::deserialize(deserializer)
}

fn one() -> usize {
    1
}

fn default_timeout() -> Time {
    Time(Duration::from_secs(60))
}

fn default_within() -> Time {
    Time(Duration::from_secs(1))
}

impl File {
    fn default_name() -> String {
        "leveret run".to_owned()
    }

    /// Reads a file: TOML, or YAML if its name ends in `.yaml` or `.yml`. The failure names the line, the field and what is
    /// allowed.
    pub(super) fn read(path: &Path) -> Result<File, Failure> {
        let named = |error: &dyn std::fmt::Display| {
            Failure::wrong(format_args!("{}: {error}", path.display()))
        };
        let text = std::fs::read_to_string(path).map_err(|error| named(&error))?;
        let is_yaml = path.extension().is_some_and(|ending| {
            ending.eq_ignore_ascii_case("yaml") || ending.eq_ignore_ascii_case("yml")
        });
        let read = match is_yaml {
            true => serde_saphyr::from_str(&text).map_err(|error| named(&error)),
            false => toml::from_str(&text).map_err(|error| named(&error)),
        };
        let mut file: File = read?;
        if let Some(topology) = &file.topology_file {
            let beside = path.parent().unwrap_or(Path::new(".")).join(topology);
            let read = Topology::read(beside).map_err(|error| named(&error))?;
            file.topology = std::mem::take(&mut file.topology).and(read);
        }
        file.check().map_err(|text| named(&text))?;
        Ok(file)
    }

    /// What only makes sense together.
    fn check(&self) -> Result<(), String> {
        if self.consumer.is_empty() && self.service.is_empty() {
            return Err(
                "there is nothing to run: neither a [[consumer]] nor a [[service]]".to_owned()
            );
        }
        for consumer in &self.consumer {
            let whose = format!("the consumer of {:?}", consumer.queue);
            check_work(&whose, &consumer.command, &consumer.http)?;
            check_workers(&whose, consumer.workers)?;
            check_workers(&whose, consumer.subscribers)?;
            match consumer.batch {
                Some(batch) if batch.size == 0 => {
                    return Err(format!("{whose}: a batch has a size of at least 1"));
                }
                Some(_) if consumer.workers > 1 => {
                    return Err(format!(
                        "{whose}: batches are handled one after the other; leave out workers or batch"
                    ));
                }
                _ => {}
            }
            self.retry_of(&consumer.retry).map_err(|text| format!("{whose}: {text}"))?;
        }
        for service in &self.service {
            let whose = format!("the service {:?}", service.name);
            check_work(&whose, &service.command, &service.http)?;
            check_workers(&whose, service.workers)?;
            self.retry_of(&service.retry).map_err(|text| format!("{whose}: {text}"))?;
        }
        Ok(())
    }

    pub(super) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Where the brokers are, by the file.
    pub(super) fn urls(&self) -> Vec<String> {
        match &self.url {
            Urls::None => Vec::new(),
            Urls::One(url) => vec![url.clone()],
            Urls::Several(urls) => urls.clone(),
        }
    }

    /// What becomes of messages that fail, if something is said of it.
    pub(super) fn retry_of(&self, options: &Option<RetryOptions>) -> Result<Option<Retry>, String> {
        options.as_ref().map(RetryOptions::retry).transpose()
    }
}

fn check_work(
    whose: &str,
    command: &Option<Vec<String>>,
    http: &Option<String>,
) -> Result<(), String> {
    match (command, http) {
        (Some(_), Some(_)) => {
            Err(format!("{whose} has both a command and http: one of them is to do the work"))
        }
        (None, None) => {
            Err(format!("{whose} has neither a command nor http: who is to do the work?"))
        }
        (Some(command), None) if command.is_empty() => Err(format!(
            "{whose}: the command is an empty list; write a program and its arguments, as in [\"./bill\", \"--fast\"]"
        )),
        (Some(_), None) => Ok(()),
        (None, Some(url)) => match reqwest::Url::parse(url) {
            Ok(url) if url.scheme() == "http" && url.has_host() => Ok(()),
            Ok(url) => Err(format!("{whose}: {url} is no URL that begins with http://")),
            Err(error) => Err(format!("{whose}: {url:?} is no URL: {error}")),
        },
    }
}

fn check_workers(whose: &str, number: usize) -> Result<(), String> {
    match number {
        1..=10_000 => Ok(()),
        _ => Err(format!("{whose}: {number} workers or subscribers; 1 to 10000 are allowed")),
    }
}

impl RetryOptions {
    fn retry(&self) -> Result<Retry, String> {
        self.check()?;
        let times = self.times;
        Ok(match self.profile {
            Profile::Leveret => self.policy().into(),
            Profile::Acapi => {
                let profile =
                    with(Acapi::new(), &self.wait, |profile, wait| profile.interval(wait.0));
                let profile = with(profile, &times, Acapi::max_retries);
                with(profile, &self.queue_type(), Acapi::queue_type).into()
            }
            Profile::CoverArt => {
                let profile =
                    with(CoverArt::new(), &self.wait, |profile, wait| profile.interval(wait.0));
                let profile = with(profile, &self.name, CoverArt::name);
                let profile = with(profile, &times, CoverArt::max_retries);
                with(profile, &self.queue_type(), CoverArt::queue_type).into()
            }
            Profile::Orb => {
                let profile = with(Orb::new(), &self.name, Orb::name);
                let profile =
                    with(profile, &self.wait, |profile, wait| profile.initial_interval(wait.0));
                let profile = with(profile, &self.multiplier, Orb::multiplier);
                let profile = with(profile, &self.longest, |profile, longest| {
                    profile.max_interval(longest.0)
                });
                let profile = with(profile, &times, Orb::max_attempts);
                with(profile, &self.queue_type(), Orb::queue_type).into()
            }
            Profile::Chandra => {
                let name = self.exchange.clone().unwrap_or_default();
                let profile = Chandra::new(Exchange::new(name, ExchangeKind::Topic));
                let profile = with(profile, &self.wait, |profile, wait| profile.interval(wait.0));
                let profile = with(profile, &times, Chandra::max_retries);
                with(profile, &self.queue_type(), Chandra::queue_type).into()
            }
        })
    }

    fn queue_type(&self) -> Option<QueueType> {
        self.queue_type.map(|kind| match kind {
            FileQueueType::Classic => QueueType::Classic,
            FileQueueType::Quorum => QueueType::Quorum,
        })
    }

    fn policy(&self) -> RetryPolicy {
        let wait = self.wait.map_or(Duration::from_secs(2), |wait| wait.0);
        let mut policy = match (&self.waits, self.multiplier) {
            (Some(waits), _) => RetryPolicy::steps(waits.iter().map(|wait| wait.0)),
            (None, Some(multiplier)) => RetryPolicy::exponential(wait, multiplier),
            (None, None) => RetryPolicy::fixed(wait),
        };
        policy = with(policy, &self.longest, |policy, longest| policy.capped(longest.0));
        policy = with(policy, &self.times, RetryPolicy::max_retries);
        policy = with(policy, &self.jitter, RetryPolicy::jitter);
        policy = with(policy, &self.max_age, |policy, age| policy.max_age(age.0));
        match self.immediate_first {
            true => policy.immediate_first(),
            false => policy,
        }
    }

    /// A field that the profile has no use for is a mistake.
    fn check(&self) -> Result<(), String> {
        use Profile::{Acapi, Chandra, CoverArt, Leveret, Orb};
        let fields: [(&str, bool, &[Profile]); 10] = [
            ("name", self.name.is_some(), &[CoverArt, Orb]),
            ("exchange", self.exchange.is_some(), &[Chandra]),
            ("waits", self.waits.is_some(), &[Leveret]),
            ("multiplier", self.multiplier.is_some(), &[Leveret, Orb]),
            ("longest", self.longest.is_some(), &[Leveret, Orb]),
            ("jitter", self.jitter.is_some(), &[Leveret]),
            ("immediate-first", self.immediate_first, &[Leveret]),
            ("max-age", self.max_age.is_some(), &[Leveret]),
            ("queue-type", self.queue_type.is_some(), &[Acapi, CoverArt, Orb, Chandra]),
            ("wait", self.wait.is_some() && self.waits.is_some(), &[]),
        ];
        for (name, is_given, profiles) in fields {
            if is_given && !profiles.contains(&self.profile) {
                return Err(match name {
                    "wait" => "retry: both wait and waits are given".to_owned(),
                    name => {
                        format!("retry: {name} has no meaning for the profile {:?}", self.profile)
                    }
                });
            }
        }
        match self.profile == Chandra && self.exchange.is_none() {
            true => {
                Err("retry: the profile chandra needs the exchange by which messages come back"
                    .to_owned())
            }
            false => Ok(()),
        }
    }
}
