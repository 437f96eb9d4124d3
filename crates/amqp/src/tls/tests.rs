use std::path::PathBuf;
use std::time::Duration;

use leveret_testkit::ScratchFolder;
use leveret_testkit::certificates::{Authority, Identity};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;

use super::*;
use crate::Connection;

const SOON: Duration = Duration::from_secs(10);

/// A folder for the files that a test's URI names.
struct Files(ScratchFolder);

impl Files {
    fn new() -> Self {
        Files(ScratchFolder::new())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), content).unwrap();
        self.path(name).display().to_string()
    }
}

async fn open(uri: &str) -> Error {
    let options = Options::from_uri(uri).unwrap();
    let opened = timeout(SOON, Connection::open(&options)).await.expect("an end in time");
    opened.expect_err("nothing there speaks AMQP")
}

fn assert_says(error: &Error, kind: ErrorKind, words: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error} does not say {word:?}");
    }
}

/// Does the server's part of the handshake for all who come, and then says nothing.
async fn tls_server(identity: Identity) -> u16 {
    let chain = CertificateDer::pem_slice_iter(identity.certificate.as_bytes());
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain.map(Result::unwrap).collect(), key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if let Ok(mut stream) = acceptor.accept(stream).await {
                let _ = stream.read_to_end(&mut Vec::new()).await;
            }
        }
    });
    port
}

/// Answers all who come with these bytes, and hangs up when they do.
async fn server_saying(bytes: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(bytes).await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    });
    port
}

async fn shake_hands(uri: &str) -> Result<(), Error> {
    let options = Options::from_uri(uri).unwrap();
    let client = Client::new(&options, options.tls.as_ref().unwrap()).await?;
    let stream = TcpStream::connect(options.address()).await.unwrap();
    timeout(SOON, client.shake_hands(stream)).await.expect("an end in time").map(drop)
}

#[tokio::test]
async fn a_file_that_cannot_be_used_is_named_with_what_is_wrong() {
    let files = Files::new();
    let authority = Authority::new("authority");
    let (client, other) = (authority.client("client"), authority.client("other"));
    let good = files.write("good.pem", &client.certificate);
    let good_key = files.write("good.key", &client.key);
    let other_key = files.write("other.key", &other.key);
    let empty = files.write("empty.pem", "");
    let cut = files.write("cut.pem", &client.key[..100]);
    let broken = files.write("broken.pem", client.certificate.replace("MII", "!!!"));
    let hollow =
        files.write("hollow.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let der = CertificateDer::from_pem_slice(client.certificate.as_bytes()).unwrap();
    let der = files.write("cert.der", der);
    let encrypted = client.key.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
    let encrypted = files.write("encrypted.key", encrypted);
    let large = files.write("large.pem", vec![b'-'; 5 << 20]);
    let odd_key = files.write("odd.key", include_str!("../../tests/keys/p521_key.pem"));
    let pipe = files.path("pipe.pem").display().to_string();
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let missing = files.path("missing.pem").display().to_string();
    let folder = files.0.path().display().to_string();

    let authorities = [
        (&missing, "cannot be read"),
        (&folder, "cannot be read"),
        (&empty, "holds no certificate"),
        (&good_key, "holds no certificate"),
        (&broken, "no base64"),
        (&hollow, "number 1, that is malformed"),
        (&der, "openssl x509"),
        (&large, "larger than 4 MiB"),
        (&pipe, "no regular file"),
    ];
    for (path, words) in authorities {
        let error = open(&format!("amqps://localhost:1?cacertfile={path}")).await;
        assert_says(&error, ErrorKind::Tls, &["cacertfile", path, words]);
    }
    let clients = [
        (&missing, &good_key, &missing, "cannot be read"),
        (&good_key, &good_key, &good_key, "holds no certificate"),
        (&good, &missing, &missing, "cannot be read"),
        (&good, &good, &good, "holds no key"),
        (&good, &cut, &cut, "cut off"),
        (&good, &encrypted, &encrypted, "decrypt it"),
        (&good, &der, &der, "openssl pkey"),
        (&good, &other_key, &other_key, "is not the key"),
        (&good, &odd_key, &odd_key, "P-521 cannot"),
        (&hollow, &good_key, &hollow, "cannot be used"),
    ];
    for (certificate, key, blamed, words) in clients {
        let uri =
            format!("amqps://localhost:1?verify=verify_none&certfile={certificate}&keyfile={key}");
        assert_says(&open(&uri).await, ErrorKind::Tls, &[blamed, words]);
    }
}

#[tokio::test]
async fn a_certificate_without_its_key_is_refused() {
    let mut options = Options::from_uri("amqps://localhost:1").unwrap();
    options.tls = Some(Tls { cert_file: Some("c.pem".into()), verify: false, ..Tls::default() });
    let error = Connection::open(&options).await.unwrap_err();
    assert_says(&error, ErrorKind::Tls, &["certfile c.pem", "give keyfile"]);
    options.tls = Some(Tls { key_file: Some("k.pem".into()), verify: false, ..Tls::default() });
    let error = Connection::open(&options).await.unwrap_err();
    assert_says(&error, ErrorKind::Tls, &["keyfile k.pem", "give certfile"]);
}

#[tokio::test]
async fn no_part_of_a_key_gets_into_an_error() {
    let files = Files::new();
    let key = Authority::new("authority").client("client").key;
    let secret = key.lines().nth(1).unwrap();
    for broken in
        [key.replace("-----END", "----END"), key.replace(secret, &secret.replace('M', "!"))]
    {
        let path = files.write("broken.key", broken);
        let file = PemFile::read("keyfile", path.as_ref()).await.unwrap();
        let error = file.key().unwrap_err();
        let shown = format!("{error} {error:?}");
        let (begin, rest) = secret[1..].split_at(8);
        assert!(!shown.contains(begin) && !shown.contains(rest), "{shown}");
    }
}

#[tokio::test]
async fn keys_are_read_in_every_usual_form() {
    let files = Files::new();
    let pkcs8 = Authority::new("authority").client("client").key;
    let (pkcs1, sec1) =
        (include_str!("../../tests/keys/rsa_key.pem"), include_str!("../../tests/keys/ec_key.pem"));
    let with_certificate = format!("{}{pkcs8}", Authority::new("another").certificate());
    for key in [&pkcs8, pkcs1, sec1, &with_certificate] {
        let path = files.write("some.key", key);
        let file = PemFile::read("keyfile", path.as_ref()).await.unwrap();
        crypto::ring::sign::any_supported_type(&file.key().unwrap()).unwrap();
    }
}

#[tokio::test]
async fn a_server_is_believed_by_authority_and_name() {
    let files = Files::new();
    let (authority, other) = (Authority::new("authority"), Authority::new("other"));
    let port = tls_server(authority.server(&["127.0.0.1", "rabbit.test"])).await;
    let own = files.write("own.pem", authority.certificate());
    let foreign = files.write("foreign.pem", other.certificate());
    let both = files.write("both.pem", other.certificate() + &authority.certificate());

    let name = "server_name_indication";
    shake_hands(&format!("amqps://127.0.0.1:{port}?cacertfile={own}")).await.unwrap();
    shake_hands(&format!("amqps://127.0.0.1:{port}?cacertfile={both}")).await.unwrap();
    shake_hands(&format!("amqps://localhost:{port}?cacertfile={own}&{name}=rabbit.test"))
        .await
        .unwrap();
    shake_hands(&format!("amqps://localhost:{port}?verify=verify_none")).await.unwrap();

    let error = open(&format!("amqps://127.0.0.1:{port}?cacertfile={foreign}")).await;
    assert_says(&error, ErrorKind::Tls, &["none of the authorities in cacertfile", &foreign]);
    let error = open(&format!("amqps://127.0.0.1:{port}")).await;
    assert_says(&error, ErrorKind::Tls, &["system trusts", "cacertfile="]);
    let error = open(&format!("amqps://localhost:{port}?cacertfile={own}")).await;
    assert_says(&error, ErrorKind::Tls, &["not made out to localhost", name, "rabbit.test"]);
}

#[tokio::test]
async fn what_is_wrong_with_a_servers_certificate_is_said() {
    let files = Files::new();
    let authority = Authority::new("authority");
    let own = files.write("own.pem", authority.certificate());
    let servers = [
        (authority.expired_server(&["localhost"]), "has expired"),
        (authority.server(&[]), "subjectAltName"),
        (authority.client("localhost"), "not for servers"),
        (authority.identity(), "without CA:TRUE"),
    ];
    for (identity, words) in servers {
        let port = tls_server(identity).await;
        let error = open(&format!("amqps://localhost:{port}?cacertfile={own}")).await;
        assert_says(&error, ErrorKind::Tls, &[words]);
    }
}

#[tokio::test]
async fn a_renewed_file_counts_for_the_next_connection() {
    let files = Files::new();
    let authority = Authority::new("authority");
    let port = tls_server(authority.server(&["localhost"])).await;
    let path = files.write("ca.pem", Authority::new("other").certificate());
    let uri = format!("amqps://localhost:{port}?cacertfile={path}");
    assert_eq!(shake_hands(&uri).await.unwrap_err().kind(), ErrorKind::Tls);
    files.write("ca.pem", authority.certificate());
    shake_hands(&uri).await.unwrap();
}

#[tokio::test]
async fn a_port_that_does_not_speak_tls_is_named_as_such() {
    for bytes in [&b"AMQP\x00\x00\x09\x01"[..], b"HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let port = server_saying(bytes).await;
        let error = open(&format!("amqps://localhost:{port}?verify=verify_none")).await;
        assert_says(&error, ErrorKind::Tls, &["does not speak TLS", "amqp://", "5671"]);
    }
}

#[tokio::test]
async fn a_silent_server_is_given_up_in_the_tls_handshake() {
    let port = server_saying(b"").await;
    let uri = format!("amqps://localhost:{port}?verify=verify_none&connection_timeout=200");
    assert_says(&open(&uri).await, ErrorKind::Timeout, &["the TLS handshake"]);
}

#[tokio::test]
async fn the_timeout_holds_for_amqp_over_tls_too() {
    let port = tls_server(Authority::new("authority").server(&["localhost"])).await;
    let uri = format!("amqps://localhost:{port}?verify=verify_none&connection_timeout=500");
    assert_says(&open(&uri).await, ErrorKind::Timeout, &["connection.start"]);
}

#[tokio::test]
async fn a_plain_connection_to_a_tls_port_says_so() {
    let port = tls_server(Authority::new("authority").server(&["localhost"])).await;
    let error = open(&format!("amqp://localhost:{port}")).await;
    assert_says(&error, ErrorKind::Tls, &["the port speaks TLS", "amqps://"]);
}

#[tokio::test]
async fn a_host_that_no_certificate_can_name_is_refused() {
    let mut options = Options::from_uri("amqps://localhost:1?verify=verify_none").unwrap();
    options.host = "no host".to_owned();
    let error = Connection::open(&options).await.unwrap_err();
    assert_says(&error, ErrorKind::Tls, &["\"no host\"", "server_name_indication="]);
}
