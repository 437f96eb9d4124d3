//! The generations of RabbitMQ that the tests know.

use std::fmt;
use std::str::FromStr;

/// A generation of RabbitMQ that `scripts/install-servers` can install.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// The package of Debian 12.
    V3_10,
    /// From Debian trixie, in a folder of its own.
    V4_0,
    /// From Debian forky, in a folder of its own.
    V4_3,
}

impl Version {
    /// Every version, oldest first.
    pub const ALL: [Version; 3] = [Version::V3_10, Version::V4_0, Version::V4_3];

    /// The version this test run is about: `LEVERET_RABBITMQ`, or 3.10 where that is not set.
    ///
    /// # Panics
    /// If `LEVERET_RABBITMQ` is something else.
    pub fn under_test() -> Version {
        match std::env::var("LEVERET_RABBITMQ") {
            Ok(text) => text.parse().unwrap_or_else(|error| panic!("LEVERET_RABBITMQ: {error}")),
            Err(_) => Version::V3_10,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Version::V3_10 => "3.10",
            Version::V4_0 => "4.0",
            Version::V4_3 => "4.3",
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Version {
    type Err = UnknownVersion;

    fn from_str(text: &str) -> Result<Version, UnknownVersion> {
        Version::ALL
            .into_iter()
            .find(|version| version.name() == text)
            .ok_or_else(|| UnknownVersion(text.to_owned()))
    }
}

/// A text that names no [`Version`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownVersion(String);

impl fmt::Display for UnknownVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no RabbitMQ version known here; there are 3.10, 4.0 and 4.3", self.0)
    }
}

impl std::error::Error for UnknownVersion {}
