//! What a file says of messages that fail.

use std::collections::BTreeMap;
use std::time::Duration;

use leveret::{Exchange, ExchangeKind, QueueType, Retry, RetryPolicy};
use leveret_profiles::{Acapi, Chandra, CoverArt, Orb};
use serde::Deserialize;
use serde::de::Deserializer;

use super::file::Time;
use super::names::{self, Names};
use super::pools::Pools;
use crate::message::with;

/// What becomes of messages that fail.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RetryOptions {
    profile: Profile,
    /// The name with which those of its objects begin, of Orb and Cover Art.
    name: Option<String>,
    /// The exchange by which messages come back, of Chandra: a topic exchange.
    exchange: Option<String>,
    /// The kind of that exchange; with Acapi, of all.
    exchange_type: Option<String>,
    /// What has waited comes back to its queue alone, of Chandra.
    only_to_queue: bool,
    /// Other names than the usual ones.
    names: Names,
    /// The queues of Cover Art's jobs, each with its key.
    jobs: BTreeMap<String, String>,
    /// No arguments of queues beyond those of the profile.
    plain_arguments: bool,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FileQueueType {
    Classic,
    Quorum,
}

impl RetryOptions {
    pub(super) fn retry(&self, pools: &Pools) -> Retry {
        match self.profile {
            Profile::Orb => self.orb(pools).into(),
            _ => self.without_pools(),
        }
    }

    /// The same without what flags say of Orb's times.
    pub(super) fn without_pools(&self) -> Retry {
        let times = self.times;
        match self.profile {
            Profile::Leveret => self.policy().into(),
            Profile::Acapi => {
                let profile = self.acapi().unwrap_or_default();
                let profile = with(profile, &self.wait, |profile, wait| profile.interval(wait.0));
                let profile = with(profile, &times, Acapi::max_retries);
                with(profile, &self.queue_type(), Acapi::queue_type).into()
            }
            Profile::CoverArt => {
                let profile = self.cover_art().unwrap_or_default();
                let profile = with(profile, &self.wait, |profile, wait| profile.interval(wait.0));
                let profile = with(profile, &times, CoverArt::max_retries);
                with(profile, &self.queue_type(), CoverArt::queue_type).into()
            }
            Profile::Orb => self.named_orb().unwrap_or_default().into(),
            Profile::Chandra => {
                let profile = self.chandra().unwrap_or_else(|_| Chandra::new(self.primary()));
                let profile = with(profile, &self.wait, |profile, wait| profile.interval(wait.0));
                let profile = with(profile, &times, Chandra::max_retries);
                with(profile, &self.queue_type(), Chandra::queue_type).into()
            }
        }
    }

    /// With its names, or the one that it does not know. [`check`](Self::check) has refused that before.
    fn acapi(&self) -> Result<Acapi, String> {
        let profile = match self.exchange_type.as_deref() {
            Some("topic") => Acapi::new().topic(),
            _ => Acapi::new(),
        };
        let profile = if self.plain_arguments { profile.plain_arguments() } else { profile };
        names::of_acapi(profile, &self.names)
    }

    fn chandra(&self) -> Result<Chandra, String> {
        let profile = Chandra::new(self.primary());
        let profile = if self.only_to_queue { profile.only_to_queue() } else { profile };
        let profile = if self.plain_arguments { profile.plain_arguments() } else { profile };
        names::of_chandra(profile, &self.names)
    }

    fn primary(&self) -> Exchange {
        let kind = self.exchange_type.as_deref().map_or(ExchangeKind::Topic, ExchangeKind::from);
        Exchange::new(self.exchange.clone().unwrap_or_default(), kind)
    }

    fn cover_art(&self) -> Result<CoverArt, String> {
        let profile = with(CoverArt::new(), &self.name, CoverArt::name);
        let profile = if self.plain_arguments { profile.plain_arguments() } else { profile };
        let jobs = self.jobs.iter();
        let profile = jobs.fold(profile, |profile, (queue, key)| profile.job(queue, key));
        names::of_cover_art(profile, &self.names)
    }

    fn named_orb(&self) -> Result<Orb, String> {
        let orb = with(Orb::new(), &self.name, Orb::name);
        let orb = if self.plain_arguments { orb.plain_arguments() } else { orb };
        names::of_orb(orb, &self.names)
    }

    /// The name that all share who use the design of Orb together; none if this is another.
    pub(super) fn orb_name(&self) -> Option<&str> {
        (self.profile == Profile::Orb).then(|| self.name.as_deref().unwrap_or("orb"))
    }

    /// The queue that rejected messages go to by the design of Orb, with this name.
    pub(super) fn redelivery_queue(&self, orb_name: &str) -> String {
        let named = self.names.get("redelivery-queue").cloned();
        named.unwrap_or_else(|| format!("{orb_name}.redelivery"))
    }

    /// The design of Orb: what the file does not say, flags do.
    pub(super) fn orb(&self, pools: &Pools) -> Orb {
        let time = |given: Option<Time>, flag| given.map_or(flag, |time| time.0);
        let orb = self
            .named_orb()
            .unwrap_or_default()
            .initial_interval(time(self.wait, pools.redelivery_initial_interval))
            .multiplier(self.multiplier.unwrap_or(pools.redelivery_multiplier))
            .max_interval(time(self.longest, pools.redelivery_max_interval))
            .max_attempts(self.times.unwrap_or(pools.redelivery_max_attempts));
        with(orb, &self.queue_type(), Orb::queue_type)
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
    pub(super) fn check(&self) -> Result<(), String> {
        use Profile::{Acapi, Chandra, CoverArt, Leveret, Orb};
        let fields: [(&str, bool, &[Profile]); 14] = [
            ("name", self.name.is_some(), &[CoverArt, Orb]),
            ("exchange", self.exchange.is_some(), &[Chandra]),
            ("exchange-type", self.exchange_type.is_some(), &[Acapi, Chandra]),
            ("only-to-queue", self.only_to_queue, &[Chandra]),
            ("jobs", !self.jobs.is_empty(), &[CoverArt]),
            ("plain-arguments", self.plain_arguments, &[Acapi, CoverArt, Orb, Chandra]),
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
        let unknown = match self.profile {
            Leveret => self.names.keys().next().cloned(),
            Acapi => self.acapi().err(),
            CoverArt => self.cover_art().err(),
            Orb => self.named_orb().err(),
            Chandra => self.chandra().err(),
        };
        if let Some(name) = unknown {
            return Err(format!(
                "retry: the profile {:?} has no name {name:?}; docs/operations.md lists those of each profile",
                self.profile
            ));
        }
        match (self.profile, self.exchange_type.as_deref()) {
            (Acapi, Some(kind)) if !["fanout", "topic"].contains(&kind) => {
                return Err(format!("retry: exchange-type {kind:?}; acapi has fanout or topic"));
            }
            _ => {}
        }
        self.policy().check().map_err(|error| format!("retry: {error}"))?;
        match self.profile == Chandra && self.exchange.is_none() {
            true => {
                Err("retry: the profile chandra needs the exchange by which messages come back"
                    .to_owned())
            }
            false => Ok(()),
        }
    }
}

fn yes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    bool::deserialize(deserializer)
}
