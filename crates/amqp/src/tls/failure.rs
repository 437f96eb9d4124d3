//! What went wrong between two sides of TLS, in words that say what to do.

use std::io;

use tokio_rustls::rustls::{self, AlertDescription, CertificateError, InvalidMessage};

use crate::error::{Error, ErrorKind};
use crate::options::Options;

/// Why a handshake failed.
pub(super) fn of_handshake(error: io::Error, options: &Options) -> Error {
    let Some(cause) = rustls_error(&error) else {
        // Nobody's refusal, so it may go well the next time.
        let text = "the connection broke during the TLS handshake; if that happens every time, the port may not speak TLS";
        return Error::caused(ErrorKind::ConnectionLost, text, error);
    };
    let text = match cause {
        rustls::Error::InvalidCertificate(reason) => certificate(reason, options),
        rustls::Error::InvalidMessage(
            InvalidMessage::InvalidContentType
            | InvalidMessage::UnknownProtocolVersion
            | InvalidMessage::MessageTooLarge,
        ) => format!(
            "port {} does not speak TLS: use amqp:// for a plain connection, or give the port that does, usually {}",
            options.port,
            Options::DEFAULT_TLS_PORT
        ),
        rustls::Error::AlertReceived(alert) => refusal(*alert).to_owned(),
        rustls::Error::PeerIncompatible(_) => {
            "the server has no version or cipher of TLS in common with this client, which knows TLS 1.2 and 1.3"
                .to_owned()
        }
        _ => "the TLS handshake failed".to_owned(),
    };
    match cause {
        // Its own words are names of types.
        rustls::Error::InvalidCertificate(CertificateError::Other(_)) => {
            Error::new(ErrorKind::Tls, text)
        }
        cause => Error::caused(ErrorKind::Tls, text, cause.clone()),
    }
}

/// The server's refusal, if that is why reading failed. In TLS 1.3 the client is done before the server has looked at
/// the client's certificate, so that its word on it comes when the client believes to be talking AMQP already.
pub(crate) fn refused_by_server(error: &io::Error) -> Option<Error> {
    match rustls_error(error)? {
        cause @ rustls::Error::AlertReceived(alert) => {
            Some(Error::caused(ErrorKind::Tls, refusal(*alert), cause.clone()))
        }
        _ => None,
    }
}

fn rustls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// What is wrong with the server's certificate.
fn certificate(reason: &CertificateError, options: &Options) -> String {
    use CertificateError::*;
    match reason {
        UnknownIssuer => {
            match options.tls.as_ref().and_then(|tls| tls.ca_file.as_ref()) {
                Some(file) => format!(
                    "the server's certificate comes from none of the authorities in cacertfile {}: put that of its \
                     authority there",
                    file.display()
                ),
                None => "the server's certificate comes from none of the authorities that this system trusts: give the \
                         file of its authority as cacertfile=…"
                    .to_owned(),
            }
        }
        NotValidForNameContext { presented, .. } if presented.is_empty() => format!(
            "the server's certificate names no host, so not {} either (a common name does not count): it must be made \
             again with a subjectAltName",
            options.server_name()
        ),
        NotValidForName | NotValidForNameContext { .. } => format!(
            "the server's certificate is not made out to {}: connect to the name that it is made out to, or give that \
             as server_name_indication=…",
            options.server_name()
        ),
        Expired | ExpiredContext { .. } => {
            "the server's certificate has expired: it must be renewed on the server, unless this machine's clock is \
             wrong"
                .to_owned()
        }
        NotValidYet | NotValidYetContext { .. } => {
            "the server's certificate is not valid yet: is this machine's clock right, and the server's?".to_owned()
        }
        InvalidPurpose | InvalidPurposeContext { .. } => {
            "the server's certificate is not for servers: it must be made again for the purpose serverAuth".to_owned()
        }
        // By webpki's own name, since its type is out of reach here.
        Other(other) if other.to_string() == "CaUsedAsEndEntity" => {
            "the server shows the certificate of an authority as its own: it must be made again without CA:TRUE"
                .to_owned()
        }
        Other(other) if other.to_string() == "EndEntityUsedAsCa" => {
            "the server's certificate, or what cacertfile says vouches for it, is that of a server and not of an authority: a \
             certificate that vouches for itself or others has to be made with CA:TRUE"
                .to_owned()
        }
        Other(other) => format!("the server's certificate is not acceptable ({other})"),
        UnsupportedSignatureAlgorithmContext { .. }
        | UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "the server's certificate has a key or signature of a kind that cannot be checked: RSA, P-256, P-384 and Ed25519 \
             can, P-521 cannot"
                .to_owned()
        }
        _ => "the server's certificate is not acceptable".to_owned(),
    }
}

/// What a server means by an alert.
fn refusal(alert: AlertDescription) -> &'static str {
    use AlertDescription::*;
    match alert {
        CertificateRequired | NoCertificate => {
            "the server wants a client certificate: give certfile=… and keyfile=…"
        }
        UnknownCA => "the server does not trust the authority of the client's certificate",
        CertificateExpired => {
            "the server says that the client's certificate has expired, or is not valid yet"
        }
        CertificateRevoked => "the server says that the client's certificate was revoked",
        BadCertificate
        | UnsupportedCertificate
        | CertificateUnknown
        | AccessDenied
        | DecryptError => "the server does not accept the client's certificate",
        UnrecognisedName => {
            "the server does not know the name it was asked for: give another as server_name_indication=…"
        }
        ProtocolVersion => {
            "the server has no version of TLS in common with this client, which knows TLS 1.2 and 1.3"
        }
        HandshakeFailure | InsufficientSecurity => {
            "the server refused the TLS handshake: it may want a client certificate (certfile=… and keyfile=…), or have \
             no cipher or kind of key in common with this client, which does not know P-521"
        }
        _ => "the server broke off TLS",
    }
}
