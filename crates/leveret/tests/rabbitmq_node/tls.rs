//! TLS with a real RabbitMQ.

use std::time::Duration;

use leveret::amqp::{
    Channel, Confirm, Connection, ConsumeOptions, Error, ErrorKind, Options, Publish, QueueOptions,
};
use leveret_testkit::certificates::{Authority, Identity};
use leveret_testkit::rabbitmq::{Builder, RabbitNode, Version};
use leveret_testkit::{SOON, ScratchFolder, eventually};
use serde_json::json;
use tokio::time::timeout;

/// Files that the URIs of a test name.
struct Files(ScratchFolder);

impl Files {
    fn new() -> Self {
        Files(ScratchFolder::new())
    }

    fn write(&self, name: &str, pem: &str) -> String {
        let path = self.0.path().join(name);
        std::fs::write(&path, pem).unwrap();
        path.display().to_string()
    }

    /// The parameters that show this identity.
    fn client(&self, name: &str, client: &Identity) -> String {
        let certificate = self.write(&format!("{name}.pem"), &client.certificate);
        let key = self.write(&format!("{name}.key"), &client.key);
        format!("certfile={certificate}&keyfile={key}")
    }
}

/// A node whose certificate is for `localhost` alone. It does not ask clients for theirs.
fn node(authority: &Authority) -> Builder {
    RabbitNode::builder(Version::under_test()).tls(authority, authority.server(&["localhost"]))
}

async fn open(uri: &str) -> Result<Connection, Error> {
    let options = Options::from_uri(uri).unwrap();
    timeout(SOON, Connection::open(&options)).await.expect("an end in time")
}

async fn refused(uri: &str) -> Error {
    open(uri).await.expect_err("the connection to be refused")
}

fn assert_says(error: &Error, kind: ErrorKind, words: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error} does not say {word:?}");
    }
}

/// Sends a message and gets it back, and closes.
async fn works(connection: Connection) {
    let work = async {
        let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
        channel.declare_queue("q", QueueOptions::default()).await.unwrap();
        send_and_receive(&channel, &[b"hello".to_vec()]).await;
        connection.close().await.unwrap();
    };
    timeout(SOON, work).await.expect("an end in time");
}

async fn send_and_receive(channel: &Channel<Confirm>, bodies: &[Vec<u8>]) {
    let mut consumer = channel.consume("q", ConsumeOptions::default()).await.unwrap();
    let mut confirmations = Vec::new();
    for body in bodies {
        let body = body.clone().into();
        let publish = Publish { routing_key: "q", mandatory: true, body, ..Publish::default() };
        confirmations.push(channel.publish(&publish).await.unwrap());
    }
    for body in bodies {
        let delivery = consumer.next().await.expect("the consumer goes on").unwrap();
        assert!(delivery.body() == body, "a body of {} bytes was changed", body.len());
        delivery.ack().unwrap();
    }
    for confirmation in confirmations {
        assert!(confirmation.await.is_acked());
    }
    consumer.cancel().await.unwrap();
}

/// One node serves all of these. It would like to see a certificate of its clients, and does not insist.
#[tokio::test]
async fn tls_works_with_a_node_that_asks_for_no_certificate() {
    let authority = Authority::new("authority");
    let node = node(&authority)
        .config("ssl_options.verify = verify_peer")
        .config("ssl_options.fail_if_no_peer_cert = false")
        .start()
        .await;
    a_server_is_believed_by_its_authority_and_its_name(&node, &authority).await;
    a_port_of_the_other_sort_is_named_as_such(&node, &authority).await;
    much_goes_through_tls_in_both_directions(&node, &authority).await;
}

async fn a_server_is_believed_by_its_authority_and_its_name(
    node: &RabbitNode,
    authority: &Authority,
) {
    let files = Files::new();
    let port = node.tls_port();
    let own = files.write("own.pem", &authority.certificate());
    let foreign = files.write("foreign.pem", &Authority::new("other").certificate());

    works(open(&format!("amqps://localhost:{port}?cacertfile={own}")).await.unwrap()).await;

    let error = refused(&format!("amqps://localhost:{port}?cacertfile={foreign}")).await;
    assert_says(&error, ErrorKind::Tls, &["none of the authorities", &foreign]);
    let error = refused(&format!("amqps://localhost:{port}")).await;
    assert_says(&error, ErrorKind::Tls, &["system trusts", "cacertfile="]);

    let by_address = format!("amqps://127.0.0.1:{port}?cacertfile={own}");
    let error = refused(&by_address).await;
    assert_says(&error, ErrorKind::Tls, &["not made out to 127.0.0.1", "server_name_indication="]);
    works(open(&format!("{by_address}&server_name_indication=localhost")).await.unwrap()).await;

    works(open(&format!("amqps://127.0.0.1:{port}?verify=verify_none")).await.unwrap()).await;

    let error = refused(&format!("amqps://localhost:{port}?cacertfile={own}.gone")).await;
    assert_says(&error, ErrorKind::Tls, &["cannot be read", &format!("{own}.gone")]);
    // Who speaks TLS has not logged in yet.
    let error = refused(&format!("amqps://guest:wrong@localhost:{port}?cacertfile={own}")).await;
    assert_says(&error, ErrorKind::Authentication, &[]);
}

async fn a_port_of_the_other_sort_is_named_as_such(node: &RabbitNode, authority: &Authority) {
    let files = Files::new();
    let own = files.write("own.pem", &authority.certificate());

    for _ in 0..50 {
        let error = refused(&format!("amqps://localhost:{}?cacertfile={own}", node.port())).await;
        assert_says(&error, ErrorKind::Tls, &["does not speak TLS", "amqp://"]);
        let error = refused(&format!("amqp://localhost:{}", node.tls_port())).await;
        assert_says(&error, ErrorKind::Tls, &["the port speaks TLS", "amqps://"]);
    }
}

async fn much_goes_through_tls_in_both_directions(node: &RabbitNode, authority: &Authority) {
    let files = Files::new();
    let own = files.write("own.pem", &authority.certificate());
    let uri = format!("amqps://localhost:{}?cacertfile={own}", node.tls_port());

    let connection = open(&uri).await.unwrap();
    let channel = connection.open_channel().await.unwrap().into_confirm().await.unwrap();
    channel.declare_queue("q", QueueOptions::default()).await.unwrap();
    let small = (0..20_000u32).map(|n| n.to_be_bytes().to_vec());
    let large = (0..16u8).map(|n| vec![n; 1 << 20]);
    let bodies: Vec<_> = small.chain(large).collect();
    timeout(Duration::from_secs(60), send_and_receive(&channel, &bodies))
        .await
        .expect("an end in time");
    connection.close().await.unwrap();
}

#[tokio::test]
async fn a_client_certificate_is_asked_for_and_logs_in() {
    asks_for_client_certificates(&[]).await;
}

/// Here the server looks at the client's certificate during the handshake, and in TLS 1.3 after it.
#[tokio::test]
async fn a_client_certificate_is_asked_for_and_logs_in_with_tls_1_2() {
    asks_for_client_certificates(&["ssl_options.versions.1 = tlsv1.2"]).await;
}

async fn asks_for_client_certificates(config: &[&str]) {
    let files = Files::new();
    let (authority, other) = (Authority::new("authority"), Authority::new("other"));
    let node = config
        .iter()
        .fold(node(&authority), |node, line| node.config(*line))
        .config("ssl_options.verify = verify_peer")
        .config("ssl_options.fail_if_no_peer_cert = true")
        .plugin("rabbitmq_auth_mechanism_ssl")
        .config("auth_mechanisms.1 = PLAIN")
        .config("auth_mechanisms.2 = EXTERNAL")
        .config("ssl_cert_login_from = common_name")
        .start()
        .await;
    let user = json!({ "password": "unused", "tags": "" });
    node.management().put(&["users", "courier"], user).await.unwrap();
    let all = json!({ "configure": ".*", "write": ".*", "read": ".*" });
    node.management().put(&["permissions", "/", "courier"], all).await.unwrap();
    let own = files.write("own.pem", &authority.certificate());
    let uri = format!("amqps://localhost:{}?cacertfile={own}", node.tls_port());

    // By password, and by the certificate alone.
    let courier = files.client("courier", &authority.client("courier"));
    works(open(&format!("{uri}&{courier}")).await.unwrap()).await;
    let connection = open(&format!("{uri}&{courier}&auth_mechanism=external")).await.unwrap();
    // The connection before this one may still be listed for a moment.
    eventually(SOON, "the only connection to be courier's", async || {
        let list = node.management().get(&["connections"]).await.unwrap();
        let users: Vec<_> = list.as_array().unwrap().iter().map(|one| &one["user"]).collect();
        users == ["courier"]
    })
    .await;
    works(connection).await;

    let stranger = files.client("stranger", &authority.client("stranger"));
    let error = refused(&format!("{uri}&{stranger}&auth_mechanism=external")).await;
    assert_says(&error, ErrorKind::Authentication, &[]);

    // A refusal comes with its reason every time, whichever side is the first to find the connection gone.
    let foreign = files.client("foreign", &other.client("courier"));
    for _ in 0..50 {
        let error = refused(&uri).await;
        assert_says(&error, ErrorKind::Tls, &["client certificate", "certfile=", "keyfile="]);
        let error = refused(&format!("{uri}&{foreign}")).await;
        assert_says(&error, ErrorKind::Tls, &["does not trust the authority"]);
    }
}
