//! The parameters of Orb, as flags and variables: what a file does not say of its pools and of redelivery.

use std::time::Duration;

use clap::Args;
use leveret::RetryPolicy;

use crate::reach::duration;

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Pools and redelivery, as of Orb")]
pub(super) struct Pools {
    /// How many subscribers a consumer with `pool = "op"` has.
    #[arg(
        long,
        visible_alias = "mq-op-pool",
        env = "LEVERET_OP_POOL",
        value_name = "COUNT",
        default_value_t = 5,
        value_parser = subscribers
    )]
    pub(super) op_pool: usize,

    /// How many subscribers a consumer with `pool = "observer"` has.
    #[arg(
        long,
        visible_alias = "mq-observer-pool",
        env = "LEVERET_OBSERVER_POOL",
        value_name = "COUNT",
        default_value_t = 5,
        value_parser = subscribers
    )]
    pub(super) observer_pool: usize,

    /// How often a message is tried again, with the profile orb, where the file does not say.
    #[arg(
        long,
        visible_alias = "mq-redelivery-max-attempts",
        env = "LEVERET_REDELIVERY_MAX_ATTEMPTS",
        value_name = "COUNT",
        default_value_t = 30
    )]
    pub(super) redelivery_max_attempts: u32,

    /// The first wait, with the profile orb.
    #[arg(
        long,
        visible_alias = "mq-redelivery-initial-interval",
        env = "LEVERET_REDELIVERY_INITIAL_INTERVAL",
        value_name = "TIME",
        default_value = "2s",
        value_parser = interval
    )]
    pub(super) redelivery_initial_interval: Duration,

    /// How much longer each wait is than the one before, with the profile orb.
    #[arg(
        long,
        visible_alias = "mq-redelivery-multiplier",
        env = "LEVERET_REDELIVERY_MULTIPLIER",
        value_name = "NUMBER",
        default_value_t = 1.5,
        value_parser = multiplier
    )]
    pub(super) redelivery_multiplier: f64,

    /// The longest wait, with the profile orb.
    #[arg(
        long,
        visible_alias = "mq-redelivery-max-interval",
        env = "LEVERET_REDELIVERY_MAX_INTERVAL",
        value_name = "TIME",
        default_value = "1m",
        value_parser = interval
    )]
    pub(super) redelivery_max_interval: Duration,
}

fn subscribers(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..=10_000) => Ok(number),
        _ => Err("a number from 1 to 10000 is needed".to_owned()),
    }
}

/// No longer than a wait in a file may be.
fn interval(text: &str) -> Result<Duration, String> {
    let wait = duration(text)?;
    let policy = RetryPolicy::fixed(wait).max_retries(1);
    policy.check().map_err(|error| error.to_string())?;
    Ok(wait)
}

fn multiplier(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 1.0 => Ok(number),
        _ => Err("a number of at least 1 is needed, as in 1.5".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        pools: Pools,
    }

    #[test]
    fn the_defaults_are_those_of_orb() {
        let Flags { pools } = Flags::parse_from(["run"]);
        assert_eq!((pools.op_pool, pools.observer_pool, pools.redelivery_max_attempts), (5, 5, 30));
        assert_eq!(pools.redelivery_initial_interval, Duration::from_secs(2));
        assert_eq!(pools.redelivery_max_interval, Duration::from_secs(60));
        assert!((pools.redelivery_multiplier - 1.5).abs() < f64::EPSILON);
    }

    #[test]
    fn an_interval_is_no_longer_than_a_queue_keeps_a_message() {
        for flag in ["--redelivery-initial-interval", "--mq-redelivery-max-interval"] {
            assert!(Flags::try_parse_from(["run", flag, "49d"]).is_ok(), "{flag}");
            let error = Flags::try_parse_from(["run", flag, "50d"]).unwrap_err().to_string();
            assert!(error.contains("49 days"), "{error}");
        }
    }
}
