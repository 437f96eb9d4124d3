//! Where brokers are: an ordered list, of which the first that answers is used.

use std::fmt;
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;

use crate::amqp::{self, Connection, Connector, Options, lock};
use crate::error::Error;

/// A broker that can be connected to.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    options: Options,
    /// In place of TCP.
    connector: Option<Arc<dyn Dial>>,
    /// In place of the address.
    name: Option<&'static str>,
}

impl Endpoint {
    /// The broker at an address.
    pub(crate) fn at(options: Options) -> Self {
        Endpoint { options, connector: None, name: None }
    }

    /// A broker in this process.
    #[cfg(feature = "embedded")]
    pub(crate) fn embedded(broker: &leveret_broker::Broker) -> Self {
        let connector: Arc<dyn Dial> = Arc::new(Embedded(broker.clone()));
        let name = Some("the embedded broker");
        Endpoint { options: Options::default(), connector: Some(connector), name }
    }

    pub(crate) fn options_mut(&mut self) -> &mut Options {
        &mut self.options
    }

    /// Its streams are opened by this connector, unless it has one or the broker is in this process.
    pub(crate) fn use_connector(&mut self, connector: Option<&Arc<dyn Dial>>) {
        if !self.options.memory {
            self.connector = self.connector.take().or(connector.cloned());
        }
    }

    /// Connects once, under this name. The error does not name the endpoint.
    pub(crate) async fn connect(&self, name: &str) -> Result<Connection, amqp::Error> {
        let mut options = self.options.clone();
        options.connection_name.get_or_insert_with(|| name.to_owned());
        match &self.connector {
            None => Connection::dial(&options).await,
            Some(connector) => connector.dial(&options).await,
        }
    }
}

/// As for logs: without the password, and without parameters.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "{:#}", self.options),
        }
    }
}

/// Any [`Connector`].
pub(crate) trait Dial: Send + Sync {
    fn dial<'a>(&'a self, options: &'a Options) -> BoxFuture<'a, Result<Connection, amqp::Error>>;
}

impl<C: Connector> Dial for C {
    fn dial<'a>(&'a self, options: &'a Options) -> BoxFuture<'a, Result<Connection, amqp::Error>> {
        Box::pin(Connection::dial_with(options, self))
    }
}

impl fmt::Debug for dyn Dial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a connector")
    }
}

#[cfg(feature = "embedded")]
struct Embedded(leveret_broker::Broker);

#[cfg(feature = "embedded")]
impl Connector for Embedded {
    type Stream = tokio::io::DuplexStream;

    async fn connect(&self, _broker: &Options) -> std::io::Result<Self::Stream> {
        Ok(self.0.connect())
    }
}

/// The brokers of a client, in the order of preference.
#[derive(Debug)]
pub(crate) struct Endpoints {
    list: Vec<Endpoint>,
    in_use: Mutex<InUse>,
}

/// Which endpoints the client's connections are with.
#[derive(Debug)]
struct InUse {
    /// How many each has.
    counts: Vec<usize>,
    /// Which one home is with.
    home: Option<usize>,
}

impl Endpoints {
    pub(crate) fn new(list: Vec<Endpoint>) -> Self {
        let in_use = InUse { counts: vec![0; list.len()], home: None };
        Endpoints { list, in_use: Mutex::new(in_use) }
    }

    /// All of them, in the order in which to try. Those come first that the client is connected to already, home's
    /// before the others: a publisher on one broker and a consumer on its standby would not find each other.
    pub(crate) fn in_order(&self) -> Vec<(usize, &Endpoint)> {
        let mut order: Vec<_> = self.list.iter().enumerate().collect();
        let in_use = lock(&self.in_use);
        order.sort_by_key(|(index, _)| (in_use.home != Some(*index), in_use.counts[*index] == 0));
        order
    }

    pub(crate) fn get(&self, index: usize) -> &Endpoint {
        &self.list[index]
    }

    /// The endpoint that home is with, if it is another one than this.
    pub(crate) fn home_elsewhere(&self, index: usize) -> Option<(usize, &Endpoint)> {
        let home = lock(&self.in_use).home.filter(|home| *home != index)?;
        Some((home, &self.list[home]))
    }

    pub(crate) fn connected(&self, index: usize, is_home: bool) {
        let mut in_use = lock(&self.in_use);
        in_use.counts[index] += 1;
        if is_home {
            in_use.home = Some(index);
        }
    }

    pub(crate) fn disconnected(&self, index: usize, is_home: bool) {
        let mut in_use = lock(&self.in_use);
        in_use.counts[index] -= 1;
        if is_home {
            in_use.home = None;
        }
    }
}

/// What [`Client::connect`](super::Client::connect) takes: one URL, or a list of them in the order of preference.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the address of a broker",
    label = "not a URL, nor a list of them",
    note = "an address is a URL as `&str` or `String`, such as \"amqp://localhost\", an `Options`, or an array or `Vec` of them"
)]
pub trait IntoEndpoints {
    /// Their options.
    fn into_endpoints(self) -> Result<Vec<Options>, Error>;
}

impl IntoEndpoints for &str {
    fn into_endpoints(self) -> Result<Vec<Options>, Error> {
        Ok(vec![Options::from_uri(self)?])
    }
}

impl IntoEndpoints for &String {
    fn into_endpoints(self) -> Result<Vec<Options>, Error> {
        self.as_str().into_endpoints()
    }
}

impl IntoEndpoints for String {
    fn into_endpoints(self) -> Result<Vec<Options>, Error> {
        self.as_str().into_endpoints()
    }
}

impl IntoEndpoints for Options {
    fn into_endpoints(self) -> Result<Vec<Options>, Error> {
        Ok(vec![self])
    }
}

impl<T: IntoEndpoints> IntoEndpoints for Vec<T> {
    fn into_endpoints(self) -> Result<Vec<Options>, Error> {
        let lists = self.into_iter().map(T::into_endpoints);
        Ok(lists.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
    }
}

impl<T: IntoEndpoints, const N: usize> IntoEndpoints for [T; N] {
    fn into_endpoints(self) -> Result<Vec<Options>, Error> {
        Vec::from(self).into_endpoints()
    }
}

impl<T: AsRef<str>> IntoEndpoints for &[T] {
    fn into_endpoints(self) -> Result<Vec<Options>, Error> {
        self.iter().map(|url| Ok(Options::from_uri(url.as_ref())?)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints() -> Endpoints {
        let options = ["amqp://one", "amqp://two", "amqp://three"].into_endpoints().unwrap();
        Endpoints::new(options.into_iter().map(Endpoint::at).collect())
    }

    fn order(endpoints: &Endpoints) -> Vec<usize> {
        endpoints.in_order().into_iter().map(|(index, _)| index).collect()
    }

    #[test]
    fn the_first_comes_first() {
        assert_eq!(order(&endpoints()), [0, 1, 2]);
    }

    #[test]
    fn connections_of_one_client_stay_together() {
        let endpoints = endpoints();
        endpoints.connected(1, false);
        assert_eq!(order(&endpoints), [1, 0, 2]);
        endpoints.connected(2, true);
        assert_eq!(order(&endpoints), [2, 1, 0]);
        assert_eq!(endpoints.home_elsewhere(1).map(|(index, _)| index), Some(2));
        assert!(endpoints.home_elsewhere(2).is_none());
        endpoints.disconnected(2, true);
        endpoints.disconnected(1, false);
        assert_eq!(order(&endpoints), [0, 1, 2]);
    }

    #[test]
    fn a_wrong_url_in_a_list_is_an_error() {
        let error = ["amqp://one", "http://two"].into_endpoints().unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid);
    }
}
