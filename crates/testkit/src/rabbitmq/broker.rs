//! A RabbitMQ one can talk to, whoever started it.

use reqwest::Url;

use super::{Management, Vhost};

/// A RabbitMQ one can talk to: its AMQP address, and its management API.
#[derive(Clone, Debug)]
pub struct Broker {
    url: Url,
    management: Management,
}

impl Broker {
    /// A broker at an `amqp://user:password@host:port` URL, whose virtual host, if any, is ignored.
    ///
    /// # Panics
    /// If the URL is none.
    pub fn new(url: &str, management: Management) -> Broker {
        let mut url =
            Url::parse(url).unwrap_or_else(|error| panic!("{url:?} is no AMQP URL: {error}"));
        assert!(url.has_host(), "{url} is no AMQP URL: it names no host");
        url.set_path("");
        Broker { url, management }
    }

    /// The AMQP URL without a virtual host, which means the default one.
    pub fn url(&self) -> String {
        self.url.to_string()
    }

    /// Whether this is Leveret's embedded broker, which has no management API. Each virtual host is then a broker of its
    /// own, in the process of the test.
    pub fn is_embedded(&self) -> bool {
        self.url.scheme() == "memory"
    }

    /// The AMQP URL of a virtual host; its name is percent-encoded.
    pub fn url_for(&self, vhost: &str) -> String {
        if self.is_embedded() {
            return format!("memory://{vhost}");
        }
        let mut url = self.url.clone();
        url.path_segments_mut().expect("an AMQP URL has a host").push(vhost);
        url.to_string()
    }

    /// `host:port` of the AMQP listener, for what connects by itself, such as a proxy.
    pub fn addr(&self) -> String {
        const AMQP_PORT: u16 = 5672;
        let host = self.url.host_str().expect("an AMQP URL has a host");
        format!("{host}:{}", self.url.port().unwrap_or(AMQP_PORT))
    }

    /// The user of the AMQP URL.
    pub(super) fn user(&self) -> &str {
        match self.url.username() {
            "" => "guest",
            user => user,
        }
    }

    /// The management API.
    pub fn management(&self) -> &Management {
        &self.management
    }

    /// Makes a fresh virtual host.
    pub async fn vhost(&self) -> Vhost {
        Vhost::create(self.clone()).await
    }
}
