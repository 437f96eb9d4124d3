//! Certificates and keys as they lie in files, in PEM.

use std::path::Path;

use tokio::fs::{File, metadata};
use tokio::io::AsyncReadExt;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::{Error, ErrorKind};

/// All authorities that a system trusts take a quarter of a megabyte. Whatever is larger than this is something else,
/// and not worth its memory.
const LARGEST: u64 = 4 << 20;

/// A file that was read.
pub(super) struct PemFile<'p> {
    /// The parameter that named it.
    parameter: &'static str,
    path: &'p Path,
    content: Vec<u8>,
}

impl<'p> PemFile<'p> {
    pub(super) async fn read(parameter: &'static str, path: &'p Path) -> Result<Self, Error> {
        let mut file = PemFile { parameter, path, content: Vec::new() };
        if let Err(error) = file.fill().await {
            let what = "cannot be read; check the path, and that this process may read it";
            return Err(file.wrong_because(what, error));
        }
        if file.content.len() as u64 > LARGEST {
            let what = format!("is larger than {} MiB, so it is no file of PEM", LARGEST >> 20);
            return Err(file.wrong(&what));
        }
        Ok(file)
    }

    async fn fill(&mut self) -> std::io::Result<()> {
        // Opening a named pipe would wait for its other end, which no deadline ends.
        if !metadata(self.path).await?.is_file() {
            return Err(std::io::Error::other("it is no regular file"));
        }
        let file = File::open(self.path).await?;
        file.take(LARGEST + 1).read_to_end(&mut self.content).await?;
        Ok(())
    }

    /// All certificates, of which there is one at least.
    pub(super) fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, Error> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.content).collect();
        let found = found.map_err(|error| self.malformed(error))?;
        if found.is_empty() {
            return Err(self.wrong(if self.is_der() {
                "is not PEM but DER: convert it with `openssl x509 -inform der`"
            } else {
                "holds no certificate, which would begin with -----BEGIN CERTIFICATE-----"
            }));
        }
        Ok(found)
    }

    /// All certificates, to be trusted.
    pub(super) fn authorities(&self) -> Result<RootCertStore, Error> {
        let mut authorities = RootCertStore::empty();
        for (index, certificate) in self.certificates()?.into_iter().enumerate() {
            authorities.add(certificate).map_err(|error| {
                let what = format!("holds a certificate, number {}, that is malformed", index + 1);
                self.wrong_because(&what, error)
            })?;
        }
        Ok(authorities)
    }

    /// The first key.
    pub(super) fn key(&self) -> Result<PrivateKeyDer<'static>, Error> {
        PrivateKeyDer::from_pem_slice(&self.content).map_err(|error| match error {
            // Its headers, or its being the only key, tell an encrypted one.
            _ if self.says("ENCRYPTED") => {
                self.wrong("holds a key that is encrypted: decrypt it with `openssl pkey`")
            }
            pem::Error::NoItemsFound if self.is_der() => {
                self.wrong("is not PEM but DER: convert it with `openssl pkey -inform der`")
            }
            pem::Error::NoItemsFound => self.wrong(
                "holds no key, which would begin with -----BEGIN PRIVATE KEY-----, -----BEGIN RSA PRIVATE KEY----- or \
                 -----BEGIN EC PRIVATE KEY-----",
            ),
            error => self.malformed(error),
        })
    }

    /// Every certificate and key is a sequence, which is what this byte begins in DER. No text does.
    fn is_der(&self) -> bool {
        self.content.starts_with(&[0x30]) && !self.content.is_ascii()
    }

    fn says(&self, word: &str) -> bool {
        self.content.windows(word.len()).any(|window| window == word.as_bytes())
    }

    /// The parser's own words quote the file, and a part of a key must not get into a log.
    fn malformed(&self, error: pem::Error) -> Error {
        self.wrong(match error {
            pem::Error::MissingSectionEnd { .. } => {
                "is not valid PEM: a -----BEGIN…----- has no -----END…-----, so the file may be cut off"
            }
            pem::Error::IllegalSectionStart { .. } => "is not valid PEM: a -----BEGIN… is broken",
            _ => "is not valid PEM: what is between -----BEGIN…----- and -----END…----- is no base64",
        })
    }

    fn wrong(&self, what: &str) -> Error {
        Error::new(ErrorKind::Tls, self.text(what))
    }

    fn wrong_because(
        &self,
        what: &str,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> Error {
        Error::caused(ErrorKind::Tls, self.text(what), error)
    }

    fn text(&self, what: &str) -> String {
        format!("{} {} {what}", self.parameter, self.path.display())
    }
}
