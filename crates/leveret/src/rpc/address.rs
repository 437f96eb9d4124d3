//! Addresses: where the requests for a service go, and where its replies do.

use std::borrow::Cow;

use crate::amqp::{DIRECT_REPLIES, ShortStr};

/// Where a service is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServiceAddress {
    pub(crate) service: String,
    pub(crate) style: Style,
}

/// How requests are addressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// Straight to the queue of the service; the property `type` has the method.
    Queue,
    /// To an exchange of the service's own; the routing key is the method.
    Own(String),
    /// To an exchange of several services; the routing key is service, dot, method.
    Shared(String),
}

impl ServiceAddress {
    pub(crate) fn new(service: String) -> Self {
        ServiceAddress { service, style: Style::Queue }
    }

    pub(crate) fn exchange(&self) -> &str {
        match &self.style {
            Style::Queue => "",
            Style::Own(exchange) | Style::Shared(exchange) => exchange,
        }
    }

    /// The routing key of requests for a method.
    pub(crate) fn routing_key<'a>(&'a self, method: &'a str) -> Cow<'a, str> {
        match &self.style {
            Style::Queue => self.service.as_str().into(),
            Style::Own(_) => method.into(),
            Style::Shared(_) => format!("{}.{method}", self.service).into(),
        }
    }

    /// What requests for a method have as their property `type`, if they need one. Without a method, they have none.
    pub(crate) fn kind<'a>(&self, method: &'a str) -> Option<&'a str> {
        (self.style == Style::Queue && !method.is_empty()).then_some(method)
    }

    /// The method that a request is for. One that came another way than over the exchange of the service is taken as if
    /// it was sent to its queue.
    pub(crate) fn method<'r>(
        &self,
        exchange: &[u8],
        routing_key: &'r [u8],
        kind: Option<&'r [u8]>,
    ) -> &'r [u8] {
        let is_over_exchange = exchange == self.exchange().as_bytes();
        match &self.style {
            Style::Own(_) if is_over_exchange => routing_key,
            Style::Shared(_) if is_over_exchange => {
                let rest = routing_key.strip_prefix(self.service.as_bytes());
                rest.and_then(|rest| rest.strip_prefix(b".")).unwrap_or(routing_key)
            }
            _ => kind.unwrap_or_default(),
        }
    }
}

/// Where a reply goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReplyAddress {
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
}

impl ReplyAddress {
    /// Reads a `reply-to`: `fanout://exchange/key`, or the same with `direct`, `topic` or `headers`, and anything else as the
    /// name of a queue. `None` if it is empty, which asks for no reply.
    ///
    /// The exchange ends at the first slash and may be empty, which is the default exchange; the key is all the rest.
    /// What is no text names nothing that can be published to, and is taken as text as far as it goes.
    pub(crate) fn parse(reply_to: &ShortStr<'_>) -> Option<Self> {
        if reply_to.is_empty() {
            return None;
        }
        let text = match reply_to.to_str() {
            Ok(text) => Cow::Borrowed(text),
            // A name that is no text gets longer by being one.
            Err(_) => {
                ShortStr::truncated(&reply_to.to_str_lossy()).to_str_lossy().into_owned().into()
            }
        };
        let (exchange, routing_key) = exchange_and_key(&text).unwrap_or(("", &text));
        Some(ReplyAddress { exchange: exchange.to_owned(), routing_key: routing_key.to_owned() })
    }

    /// Whether it is that of direct replies, which go to no queue.
    pub(crate) fn is_direct(&self) -> bool {
        self.exchange.is_empty() && self.routing_key.starts_with(DIRECT_REPLIES)
    }
}

fn exchange_and_key(text: &str) -> Option<(&str, &str)> {
    let (exchange_type, rest) = text.split_once(':')?;
    match exchange_type {
        "direct" | "fanout" | "headers" | "topic" => rest.strip_prefix("//")?.split_once('/'),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_to_is_an_address_or_the_name_of_a_queue() {
        for (reply_to, exchange, routing_key) in [
            ("fanout://x/k", "x", "k"),
            ("direct:///k", "", "k"),
            ("direct://x/", "x", ""),
            ("headers://x/k", "x", "k"),
            ("topic://e/a.b", "e", "a.b"),
            ("topic://e/a/b//c", "e", "a/b//c"),
            ("direct://amq.direct/k", "amq.direct", "k"),
            ("direct://a:b/k", "a:b", "k"),
            ("fanout://x y/ä", "x y", "ä"),
            // Names of queues, odd ones too.
            ("replies", "", "replies"),
            ("a/b", "", "a/b"),
            ("amq.gen-JzTY20BRgKO-HjmUJj0wLg", "", "amq.gen-JzTY20BRgKO-HjmUJj0wLg"),
            ("amq.rabbitmq.reply-to.g2dk.x==", "", "amq.rabbitmq.reply-to.g2dk.x=="),
            ("amqp://x/k", "", "amqp://x/k"),
            ("FANOUT://x/k", "", "FANOUT://x/k"),
            ("fanout:/x/k", "", "fanout:/x/k"),
            ("fanout://x", "", "fanout://x"),
            ("://x/k", "", "://x/k"),
            (" fanout://x/k", "", " fanout://x/k"),
            ("http://fanout://x/k", "", "http://fanout://x/k"),
            ("/", "", "/"),
        ] {
            let parsed = ReplyAddress::parse(&reply_to.try_into().unwrap());
            let (exchange, routing_key) = (exchange.to_owned(), routing_key.to_owned());
            assert_eq!(parsed, Some(ReplyAddress { exchange, routing_key }), "{reply_to}");
        }
        assert_eq!(ReplyAddress::parse(&ShortStr::default()), None);
    }

    #[test]
    fn a_reply_to_that_is_no_text_can_be_published_to_all_the_same() {
        let odd = ShortStr::from_bytes(vec![0xff; 255]).unwrap();
        let address = ReplyAddress::parse(&odd).unwrap();
        assert!(ShortStr::try_from(address.routing_key).is_ok());
    }

    #[test]
    fn direct_replies_are_known_by_their_address() {
        let is_direct = |text: &'static str| {
            ReplyAddress::parse(&text.try_into().unwrap()).unwrap().is_direct()
        };
        assert!(is_direct("amq.rabbitmq.reply-to.abc"));
        assert!(!is_direct("replies"));
        assert!(!is_direct("direct://x/amq.rabbitmq.reply-to.abc"));
    }

    #[test]
    fn requests_are_addressed_in_three_styles() {
        let address = |style| ServiceAddress { service: "prices".to_owned(), style };
        let queue = address(Style::Queue);
        let own = address(Style::Own("x".to_owned()));
        let shared = address(Style::Shared("services".to_owned()));
        for (address, exchange, key) in
            [(&queue, "", "prices"), (&own, "x", "quote"), (&shared, "services", "prices.quote")]
        {
            assert_eq!((address.exchange(), &*address.routing_key("quote")), (exchange, key));
            let kind = address.kind("quote").map(str::as_bytes);
            assert_eq!(address.method(exchange.as_bytes(), key.as_bytes(), kind), b"quote");
            assert_eq!(address.kind(""), None);
        }
        assert_eq!(own.method(b"", b"prices", Some(b"quote")), b"quote");
        assert_eq!(own.method(b"", b"prices", None), b"");
        assert_eq!(shared.method(b"services", b"other", None), b"other");
        assert_eq!(shared.method(b"services", b"prices.a.b", None), b"a.b");
    }
}
