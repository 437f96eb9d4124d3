use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use UriPart::*;

fn error(uri: &str) -> UriError {
    match Options::from_uri(uri) {
        Ok(options) => panic!("{uri} was read as {options}"),
        Err(error) => error,
    }
}

fn options(uri: &str) -> Options {
    Options::from_uri(uri).unwrap_or_else(|error| panic!("{uri}: {error}"))
}

#[test]
fn the_examples_of_the_specification_are_read_as_it_says() {
    // Appendix A, each absent component with our default in its place.
    #[rustfmt::skip]
    let table = [
        ("amqp://user:pass@host:10000/vhost", "user", "pass", "host", 10000, "vhost"),
        ("amqp://user%61:%61pass@ho%61st:10000/v%2fhost", "usera", "apass", "hoast", 10000, "v/host"),
        ("amqp://", "guest", "guest", "localhost", 5672, "/"),
        ("amqp://:@/", "", "", "localhost", 5672, ""),
        ("amqp://user@", "user", "guest", "localhost", 5672, "/"),
        ("amqp://user:pass@", "user", "pass", "localhost", 5672, "/"),
        ("amqp://host", "guest", "guest", "host", 5672, "/"),
        ("amqp://:10000", "guest", "guest", "localhost", 10000, "/"),
        ("amqp:///vhost", "guest", "guest", "localhost", 5672, "vhost"),
        ("amqp://host/", "guest", "guest", "host", 5672, ""),
        ("amqp://host/%2f", "guest", "guest", "host", 5672, "/"),
        ("amqp://[::1]", "guest", "guest", "::1", 5672, "/"),
    ];
    for (uri, user, password, host, port, virtual_host) in table {
        let options = options(uri);
        assert_eq!(options.auth, Auth::plain(user, password), "{uri}");
        assert_eq!(options.address(), (host, port), "{uri}");
        assert_eq!(options.virtual_host, virtual_host, "{uri}");
        assert_eq!(options.tls, None, "{uri}");
    }
}

#[test]
fn amqps_means_tls_and_its_port() {
    let options = options("AmqpS://host");
    assert_eq!(options.tls, Some(Tls::default()));
    assert_eq!(options.address(), ("host", 5671));
}

#[test]
fn user_and_password_may_hold_anything_that_is_escaped_and_some_that_is_not() {
    let cases = [
        ("amqp://a%2Fb:%3A%40%2F%3F%23%25@h", "a/b", ":@/?#%"),
        ("amqp://user:pa:ss@h", "user", "pa:ss"),
        ("amqp://user:p@ss@h", "user", "p@ss"),
        ("amqp://us+er:p+w@h", "us+er", "p+w"),
        ("amqp://j%C3%BCrgen:p%20w@h", "jürgen", "p w"),
        ("amqp://jürgen:ä@h", "jürgen", "ä"),
        ("amqp://@h", "", "guest"),
        ("amqp://user:@h", "user", ""),
    ];
    for (uri, user, password) in cases {
        assert_eq!(options(uri).auth, Auth::plain(user, password), "{uri}");
        assert_eq!(options(uri).host, "h", "{uri}");
    }
}

#[test]
fn host_and_port_are_taken_apart() {
    let cases = [
        ("amqp://[::1]:7", ("::1", 7)),
        ("amqp://u:p@[fe80::1%25eth0]:7", ("fe80::1%eth0", 7)),
        ("amqp://[::ffff:10.0.0.1]", ("::ffff:10.0.0.1", 5672)),
        ("amqp://10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("amqp://my_host-1.example:", ("my_host-1.example", 5672)),
        ("amqps://:", ("localhost", 5671)),
        ("amqp://bücher.example", ("bücher.example", 5672)),
    ];
    for (uri, address) in cases {
        assert_eq!(options(uri).address(), address, "{uri}");
    }
}

#[test]
fn every_parameter_reaches_its_option() {
    let uri = "amqps://host/?heartbeat=0&connection_timeout=1500&channel_max=9&frame_max=4096\
               &cacertfile=/etc/c%26a.pem&certfile=c.pem&keyfile=k.pem&verify=verify_none\
               &server_name_indication=rabbit&connection_name=a+b%20c&";
    let options = options(uri);
    assert_eq!(options.heartbeat, Some(Duration::ZERO));
    assert_eq!(options.connection_timeout, Duration::from_millis(1500));
    assert_eq!((options.channel_max, options.frame_max), (9, 4096));
    assert_eq!(options.connection_name.as_deref(), Some("a+b c"));
    let tls = Tls {
        ca_file: Some("/etc/c&a.pem".into()),
        cert_file: Some("c.pem".into()),
        key_file: Some("k.pem".into()),
        verify: false,
        server_name: Some("rabbit".to_owned()),
    };
    assert_eq!(options.tls, Some(tls));
}

#[test]
fn a_query_follows_the_host_or_the_virtual_host() {
    assert_eq!(options("amqp://host?channel_max=0").virtual_host, "/");
    assert_eq!(options("amqp://host/?channel_max=0").virtual_host, "");
    assert_eq!(options("amqp://host/v?").virtual_host, "v");
}

#[test]
fn mechanisms_are_kept_in_their_order() {
    let (plain, external) = (Auth::plain("u", "p"), Auth::External);
    let amqplain = Auth::AmqPlain { user: "u".to_owned(), password: "p".into() };
    let cases = [
        ("", vec![&plain]),
        ("?auth_mechanism=AMQPLAIN", vec![&amqplain]),
        ("?auth_mechanism=external", vec![&external]),
        ("?auth_mechanism=external&heartbeat=1&auth_mechanism=plain", vec![&external, &plain]),
    ];
    for (query, expected) in cases {
        let options = options(&format!("amqp://u:p@host{query}"));
        let order: Vec<_> = options.auth_by_preference().collect();
        assert_eq!(order, expected, "{query}");
    }
}

#[test]
fn each_mistake_is_reported_for_its_part() {
    let cases = [
        ("", Scheme),
        ("localhost", Scheme),
        ("amqp:localhost", Scheme),
        ("http://localhost", Scheme),
        (" amqp://localhost", Scheme),
        ("amqp://us%er@host", User),
        ("amqp://us er@host", User),
        ("amqp://us%00er@host", User),
        ("amqp://user:%ff@host", Password),
        ("amqp://user:pa%@host", Password),
        ("amqp://user:%00@host", Password),
        ("amqp://user:pa/ss@host", Password),
        ("amqp://user:pa?ss@host", Password),
        ("amqp://user:pa#ss@host", Password),
        ("amqp://user:p@/ss@host", Password),
        ("amqp://host/v@host", Password),
        ("amqp://ho st", Host),
        ("amqp://host\n", Host),
        ("amqp://ho%2Fst", Host),
        ("amqp://ho%st", Host),
        ("amqp://::1", Host),
        ("amqp://[::1", Host),
        ("amqp://[::1]5672", Host),
        ("amqp://[host]", Host),
        ("amqp://[fe80::1%eth0]", Host),
        ("amqp://[fe80::1%25]", Host),
        ("amqp://u:p@h:0", Port),
        ("amqp://u:p@h:65536", Port),
        ("amqp://u:p@h:+5672", Port),
        ("amqp://user:password", Port),
        ("amqp://host/a/b", VirtualHost),
        ("amqp://host//", VirtualHost),
        ("amqp://host/%zz", VirtualHost),
        ("amqp://host/a b", VirtualHost),
        ("amqp://host/vhost#x", Fragment),
    ];
    for (uri, part) in cases {
        let error = error(uri);
        assert_eq!(error.part(), part, "{uri}: {error}");
    }
    assert_eq!(error(&format!("amqp://host/{}", "x".repeat(256))).part(), VirtualHost);
}

#[test]
fn each_mistake_in_a_parameter_is_reported_with_its_name() {
    let cases = [
        ("heartbeat=65536", Parameter("heartbeat")),
        ("heartbeat=-1", Parameter("heartbeat")),
        ("heartbeat=", Parameter("heartbeat")),
        ("heartbeat", Parameter("heartbeat")),
        ("heartbeat=1&heartbeat=1", Parameter("heartbeat")),
        ("connection_timeout=0", Parameter("connection_timeout")),
        ("connection_timeout=1s", Parameter("connection_timeout")),
        ("channel_max=65536", Parameter("channel_max")),
        ("frame_max=4095", Parameter("frame_max")),
        ("frame_max=4294967296", Parameter("frame_max")),
        ("auth_mechanism=crdemo", Parameter("auth_mechanism")),
        ("auth_mechanism=plain&auth_mechanism=PLAIN", Parameter("auth_mechanism")),
        ("connection_name=", Parameter("connection_name")),
        ("connection_name=%E4", Parameter("connection_name")),
        ("cacertfile=", Parameter("cacertfile")),
        ("cacertfile=a%00b", Parameter("cacertfile")),
        ("certfile=c.pem", Parameter("certfile")),
        ("keyfile=k.pem", Parameter("keyfile")),
        ("verify=true", Parameter("verify")),
        ("server_name_indication=disable", Parameter("server_name_indication")),
        ("password=zq", Parameter("password")),
        ("fail_if_no_peer_cert=true", Parameter("fail_if_no_peer_cert")),
        ("depth=2", Parameter("depth")),
        ("hartbeat=5", UnknownParameter),
        ("Heartbeat=5", UnknownParameter),
        ("=5", UnknownParameter),
    ];
    for (query, part) in cases {
        let error = error(&format!("amqps://host?{query}"));
        assert_eq!(error.part(), part, "{query}: {error}");
        assert!(!error.to_string().contains("zq"), "{error}");
    }
}

#[test]
fn tls_parameters_need_amqps() {
    for name in ["cacertfile", "certfile", "keyfile", "verify"] {
        let error = error(&format!("amqp://host?{name}=verify_peer"));
        assert_eq!(error.part(), Parameter(name));
        assert!(error.to_string().contains("amqps://"), "{error}");
    }
}

#[test]
fn an_unknown_parameter_is_told_the_known_ones() {
    let error = error("amqp://host?hartbeat=5");
    assert_eq!(error.value(), Some("hartbeat"));
    assert!(error.to_string().contains("heartbeat, "), "{error}");
}

#[test]
fn a_wrong_value_is_quoted_only_where_it_cannot_be_a_password() {
    let cases = [
        ("amqp://user:zq@host:http/", Some("http")),
        ("amqp://user:zq@host/a/b", Some("a/b")),
        ("amqp://host/a/b", Some("a/b")),
        ("zqx-1://host", None),
        ("user:zq://host", None),
        ("amqp://user:zq", None),
        ("amqp://user:zq/vhost", None),
        ("amqp://user:12345/zq/vhost", None),
        ("amqp://user:1?zq", None),
        ("amqp://us/er:zq/zq", None),
        ("amqp://user:zq%", None),
    ];
    for (uri, value) in cases {
        let error = error(uri);
        assert_eq!(error.value(), value, "{uri}");
        assert!(!format!("{error} {error:?}").contains("zq"), "{uri}");
    }
}

/// Text in which every letter is `Z`, with anything between that has a meaning in a URI. Nothing else
/// here contains a `Z`, so no error may show one.
fn secret() -> impl Strategy<Value = String> {
    "Z[Z0-9@/?#:%&=\\[\\]+ é\\\\-]{0,12}"
}

/// A URI with a mistake somewhere behind its credentials.
fn failing_uri(secret: &str) -> impl Strategy<Value = String> + use<> {
    let secret = secret.to_owned();
    let endings = [
        "@host:70000",
        "@host:port/v",
        "@ho st/v",
        "@[::1",
        "@host/a/b",
        "@host/%zz",
        "@host?nonsense=1",
        "@host/v?heartbeat=x",
        "@host/v?verify=verify_none",
        "@host#",
    ];
    (select(vec!["amqp", "AMQPS"]), select(endings.to_vec()))
        .prop_map(move |(scheme, ending)| format!("{scheme}://user:{secret}{ending}"))
}

proptest! {
    #[test]
    fn no_part_of_a_password_is_in_any_error(
        uri in secret().prop_flat_map(|secret| failing_uri(&secret))
    ) {
        if let Err(error) = Options::from_uri(&uri) {
            prop_assert!(!format!("{error} {error:?} {error:#?}").contains('Z'), "{uri}: {error}");
        }
    }

    #[test]
    fn a_password_without_host_or_scheme_is_in_no_error(secret in secret().prop_filter(
        "what follows an @ that is not escaped is a host, not a password",
        |secret| !secret.contains('@'),
    )) {
        for uri in [
            format!("amqp://user:{secret}"),
            format!("amqp://user:{secret}/a/b"),
            format!("amqp://user:{secret}/%zz"),
            format!("amqp://user:{secret}?nonsense"),
            format!("user:{secret}@host"),
            format!("user:{secret}://host"),
            format!("amqp:user:{secret}@host"),
        ] {
            if let Err(error) = Options::from_uri(&uri) {
                prop_assert!(!format!("{error} {error:?}").contains('Z'), "{uri}: {error}");
            }
        }
    }

    #[test]
    fn no_password_is_in_options_however_they_are_shown(password in "Z[ -~é]{0,12}") {
        let options = Options { auth: Auth::plain("user", password), ..Options::default() };
        let shown = format!("{options} {options:?} {options:#?}");
        prop_assert!(!shown.contains('Z'), "{shown}");
    }

    #[test]
    fn garbage_is_refused_or_read_without_panic(
        garbage in any::<String>(),
        dense in "[/?#@:%\\[\\]&=a0\\.é]{0,24}",
        query in "(heartbeat|verify|certfile|frame_max|auth_mechanism|x)=?[0-9%&=a-z]{0,9}",
    ) {
        for uri in [
            garbage.clone(),
            format!("amqp://{garbage}"),
            format!("amqps://{dense}"),
            format!("amqps://host/?{query}"),
        ] {
            if let Ok(options) = Options::from_uri(&uri) {
                prop_assert!(Options::from_uri(&options.to_string()).is_ok(), "{uri}");
            }
        }
    }

    #[test]
    fn the_displayed_uri_leads_to_the_same_options_but_for_the_password(options in any_options()) {
        let shown = options.to_string();
        prop_assert_eq!(Options::from_uri(&shown), Ok(options), "{}", shown);
    }
}

/// Options with the password that a URI without one stands for.
fn any_options() -> impl Strategy<Value = Options> {
    let host = prop_oneof!["[a-z0-9._-]{1,9}", Just("::1".into()), Just("fe80::1%eth0".into())];
    let auth = select(vec![
        vec!["plain"],
        vec!["amqplain"],
        vec!["plain", "amqplain"],
        vec!["external", "plain"],
    ]);
    let place = (host, 1..=u16::MAX, ".{0,60}", "[^\0]{0,9}", auth);
    let frame_max = prop_oneof![Just(0), 4096..=u32::MAX];
    let heartbeat = proptest::option::of((0..=65535u64).prop_map(Duration::from_secs));
    let timeout = (1..=u64::from(u32::MAX)).prop_map(Duration::from_millis);
    let limits = (frame_max, any::<u16>(), heartbeat, timeout);
    let text = || proptest::option::of(".{1,9}");
    let extras = (text(), proptest::option::of(any_tls()));
    (place, limits, extras).prop_map(|(place, limits, extras)| {
        let (host, port, virtual_host, user, mechanisms) = place;
        let (frame_max, channel_max, heartbeat, connection_timeout) = limits;
        let (connection_name, tls) = extras;
        let mut auth = mechanisms.into_iter().map(|name| with_user(name, &user));
        Options {
            host,
            port,
            virtual_host,
            auth: auth.next().expect("there is a first mechanism"),
            auth_alternatives: auth.collect(),
            tls,
            heartbeat,
            connection_timeout,
            channel_max,
            frame_max,
            connection_name,
            ..Options::default()
        }
    })
}

fn with_user(mechanism: &str, user: &str) -> Auth {
    let (user, password) = (user.to_owned(), "guest".into());
    match mechanism {
        "plain" => Auth::Plain { user, password },
        "amqplain" => Auth::AmqPlain { user, password },
        _ => Auth::External,
    }
}

fn any_tls() -> impl Strategy<Value = Tls> {
    let path = || proptest::option::of("[^\0]{1,9}".prop_map(PathBuf::from));
    let client = proptest::option::of(("[^\0]{1,9}", "[^\0]{1,9}"));
    let server_name = proptest::option::of("[a-c.]{1,9}");
    (path(), client, any::<bool>(), server_name).prop_map(
        |(ca_file, client, verify, server_name)| {
            let (cert_file, key_file) = client.unzip();
            Tls {
                ca_file,
                cert_file: cert_file.map(PathBuf::from),
                key_file: key_file.map(PathBuf::from),
                verify,
                server_name,
            }
        },
    )
}

#[test]
fn a_broker_in_memory_has_a_name_and_no_port() {
    let options = Options::from_uri("memory://me:pw@shop/orders").unwrap();
    assert!(options.memory);
    assert_eq!((options.host.as_str(), options.virtual_host.as_str()), ("shop", "orders"));
    assert_eq!(options.to_string(), "memory://me@shop/orders");
    assert_eq!(Options::from_uri("memory://").unwrap().to_string(), "memory://guest@localhost/%2F");
    assert_eq!(Options::from_uri("memory://shop:1234").unwrap_err().part(), UriPart::Port);
    assert_eq!(
        Options::from_uri("memory://shop?cacertfile=x").unwrap_err().part(),
        Options::from_uri("amqp://shop?cacertfile=x").unwrap_err().part()
    );
}
