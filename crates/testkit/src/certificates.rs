//! Certificates for TLS, made for the test and trusted by nobody else.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};

/// Whoever trusts it believes the certificates it issues.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as PEM.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// Its key, in PKCS#8.
    pub key: String,
}

impl Authority {
    /// Makes an authority of this name.
    pub fn new(name: &str) -> Authority {
        let mut params = params(name, &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        Authority(CertifiedIssuer::self_signed(params, key()).expect("an authority can be made"))
    }

    /// Its own certificate as PEM, for those who are to trust it.
    pub fn certificate(&self) -> String {
        self.0.pem()
    }

    /// Its own certificate with its key: something a server should not show.
    pub fn identity(&self) -> Identity {
        Identity { certificate: self.0.pem(), key: self.0.key().serialize_pem() }
    }

    /// Issues a certificate for a server of these DNS names and IP addresses.
    pub fn server(&self, names: &[&str]) -> Identity {
        let mut params = params("a server", names);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(params)
    }

    /// Issues a certificate for a server that has been out of date for years.
    pub fn expired_server(&self, names: &[&str]) -> Identity {
        let mut params = params("a server of old", names);
        params.not_after = date_time_ymd(2002, 1, 1);
        self.issue(params)
    }

    /// Issues a certificate for a client, whose common name is the user's.
    pub fn client(&self, user: &str) -> Identity {
        let mut params = params(user, &[]);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(params)
    }

    fn issue(&self, params: CertificateParams) -> Identity {
        let key = key();
        let certificate = params.signed_by(&key, &self.0).expect("a certificate can be issued");
        Identity { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

fn key() -> KeyPair {
    KeyPair::generate().expect("a key can be made")
}

fn params(common_name: &str, names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().copied().map(str::to_owned).collect();
    let mut params = CertificateParams::new(names).expect("the names are DNS names or addresses");
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.use_authority_key_identifier_extension = true;
    params.not_before = date_time_ymd(2001, 1, 1);
    params.not_after = date_time_ymd(2101, 1, 1);
    params
}
