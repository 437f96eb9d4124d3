//! HTTP for tests, and TLS before what has none.

use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::certificates::Identity;

/// A client that neither encrypts nor asks a proxy.
///
/// # Panics
/// Never: what it needs comes with the program.
pub fn client() -> reqwest::ClientBuilder {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring knows the versions of TLS")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    reqwest::Client::builder().no_proxy().tls_backend_preconfigured(config)
}

/// Takes connections with TLS on a port of its own, and passes what comes on to another port of this machine. It ends when it is
/// dropped.
#[derive(Debug)]
pub struct TlsFront {
    port: u16,
    task: JoinHandle<()>,
}

impl TlsFront {
    /// In front of a port.
    ///
    /// # Panics
    /// If the identity is none, or no port is free.
    pub async fn before(port: u16, server: &Identity) -> TlsFront {
        let certificates = CertificateDer::pem_slice_iter(server.certificate.as_bytes());
        let certificates = certificates.collect::<Result<Vec<_>, _>>().expect("certificates");
        let key = PrivateKeyDer::from_pem_slice(server.key.as_bytes()).expect("a key");
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring knows the versions of TLS")
            .with_no_client_auth()
            .with_single_cert(certificates, key)
            .expect("a certificate and its key");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let own = listener.local_addr().expect("an address").port();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                // It ends with either side.
                tokio::spawn(async move {
                    let mut outside = acceptor.accept(stream).await?;
                    let mut inside = TcpStream::connect(("127.0.0.1", port)).await?;
                    tokio::io::copy_bidirectional(&mut outside, &mut inside).await
                });
            }
        });
        TlsFront { port: own, task }
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for TlsFront {
    fn drop(&mut self) {
        self.task.abort();
    }
}
