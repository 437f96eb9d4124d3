//! TLS, by rustls: whom to trust, what to show, and the handshake.
//!
//! The cryptography is always *ring*'s, whichever a program chose as rustls's default, so that this works in any
//! program and needs nothing to be installed at its start.

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OnceCell;
use tokio::task::spawn_blocking;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::client::{WantsClientCert, WebPkiServerVerifier};
use tokio_rustls::rustls::crypto::{self, CryptoProvider};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    self, ClientConfig, ConfigBuilder, DigitallySignedStruct, InconsistentKeys, RootCertStore,
    SignatureScheme,
};

use super::error::{Error, ErrorKind};
use super::options::{Options, Tls};
use files::PemFile;

mod failure;
mod files;
#[cfg(test)]
mod tests;

pub(super) use failure::refused_by_server;

/// One side of a TLS handshake that is yet to happen.
pub(super) struct Client<'o> {
    options: &'o Options,
    connector: TlsConnector,
    server_name: ServerName<'static>,
}

impl<'o> Client<'o> {
    /// Reads the files. It is done for every connection, so that the next one after a renewal uses the renewed.
    pub(super) async fn new(options: &'o Options, tls: &Tls) -> Result<Self, Error> {
        let server_name = server_name(options)?;
        let config = tls.client_config().await?;
        Ok(Client { options, connector: TlsConnector::from(Arc::new(config)), server_name })
    }

    pub(super) async fn shake_hands<S>(self, stream: S) -> Result<TlsStream<S>, Error>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let done = self.connector.connect(self.server_name, stream).await;
        done.map_err(|error| failure::of_handshake(error, self.options))
    }
}

impl Tls {
    /// For another protocol with the same authorities and certificates. The program uses it; it is not a part of what is promised,
    /// or rustls would be one, too.
    #[doc(hidden)]
    pub async fn client_config(&self) -> Result<ClientConfig, Error> {
        show(self, trust(self).await?).await
    }
}

fn server_name(options: &Options) -> Result<ServerName<'static>, Error> {
    let name = options.server_name();
    ServerName::try_from(name.to_owned()).map_err(|error| {
        let text = format!(
            "the server's certificate cannot be checked against {name:?}, which is neither a DNS name nor an IP \
             address: give the name in the certificate as server_name_indication=…"
        );
        Error::caused(ErrorKind::Tls, text, error)
    })
}

type Trusting = ConfigBuilder<ClientConfig, WantsClientCert>;

/// Which servers to believe.
async fn trust(tls: &Tls) -> Result<Trusting, Error> {
    let provider = Arc::new(crypto::ring::default_provider());
    let verifier: Arc<dyn ServerCertVerifier> = match &tls.ca_file {
        _ if !tls.verify => Arc::new(Anyone(Arc::clone(&provider))),
        Some(path) => {
            let file = PemFile::read("cacertfile", path).await?;
            believing(Arc::new(file.authorities()?), &provider)?
        }
        None => believing(system_authorities().await?, &provider)?,
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(unusable)?;
    Ok(builder.dangerous().with_custom_certificate_verifier(verifier))
}

fn believing(
    authorities: Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ServerCertVerifier>, Error> {
    let builder =
        WebPkiServerVerifier::builder_with_provider(authorities, Arc::clone(provider)).build();
    Ok(builder.map_err(unusable)?)
}

/// Neither happens: ring knows the versions of TLS, and there is an authority at least.
fn unusable(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::caused(ErrorKind::Tls, "TLS cannot be set up", error)
}

/// The authorities that the system trusts. They are many, and finding them takes a while, so that is done once: what
/// is changed among them later counts for the next start of the program.
async fn system_authorities() -> Result<Arc<RootCertStore>, Error> {
    static AUTHORITIES: OnceCell<Arc<RootCertStore>> = OnceCell::const_new();
    let found = AUTHORITIES.get_or_try_init(|| async {
        let found = spawn_blocking(rustls_native_certs::load_native_certs).await;
        let found = found.map_err(unusable)?;
        let mut authorities = RootCertStore::empty();
        // A system's collection may hold some that are too old to be understood; the rest is good.
        authorities.add_parsable_certificates(found.certs);
        if authorities.is_empty() {
            let text = "the system trusts no authority that could vouch for the server: install its ca-certificates, \
                        or give the authority as cacertfile=…";
            return Err(match found.errors.into_iter().next() {
                Some(error) => Error::caused(ErrorKind::Tls, text, error),
                None => Error::new(ErrorKind::Tls, text),
            });
        }
        Ok(Arc::new(authorities))
    });
    Ok(Arc::clone(found.await?))
}

/// Which certificate to show, if the server asks for one.
async fn show(tls: &Tls, builder: Trusting) -> Result<ClientConfig, Error> {
    let (certificate, key) = match (&tls.cert_file, &tls.key_file) {
        (None, None) => return Ok(builder.with_no_client_auth()),
        (Some(certificate), Some(key)) => (certificate, key),
        (Some(lonely), None) => {
            let text = format!("certfile {} needs its key: give keyfile, too", lonely.display());
            return Err(Error::new(ErrorKind::Tls, text));
        }
        (None, Some(lonely)) => {
            let text =
                format!("keyfile {} needs its certificate: give certfile, too", lonely.display());
            return Err(Error::new(ErrorKind::Tls, text));
        }
    };
    let chain = PemFile::read("certfile", certificate).await?.certificates()?;
    let secret = PemFile::read("keyfile", key).await?.key()?;
    if let Err(error) = crypto::ring::sign::any_supported_type(&secret) {
        let text = format!(
            "keyfile {} holds a key of a kind that cannot be used: RSA of 2048 to 8192 bits, P-256, P-384 and Ed25519 can, \
             P-521 cannot",
            key.display()
        );
        return Err(Error::caused(ErrorKind::Tls, text, error));
    }
    builder.with_client_auth_cert(chain, secret).map_err(|error| {
        let (key, certificate) = (key.display(), certificate.display());
        let text = match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => format!(
                "keyfile {key} is not the key of the first certificate in certfile {certificate}: put the client's own \
                 certificate first there, and give the key it was made with"
            ),
            _ => format!("keyfile {key} and certfile {certificate} cannot be used together"),
        };
        Error::caused(ErrorKind::Tls, text, error)
    })
}

/// Believes whoever answers, which is what `verify_none` asks for and protects from nobody who can get between.
///
/// The server must still have the key of the certificate it shows, or what it shows would not even be its own.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        crypto::verify_tls12_signature(message, certificate, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        crypto::verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
