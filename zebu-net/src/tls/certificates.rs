//! Certificates in QEMU's and libnbd's layout: a directory with
//! `ca-cert.pem` (trusted authorities), and `server-cert.pem` and `server-key.pem`,
//! or optionally `client-cert.pem` and `client-key.pem` (this side's identity).
//!
//! TLS 1.2 and 1.3 by rustls.

use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};

use super::{TlsError, TlsFiles, Verify};

fn unreadable(path: &Path, why: impl ToString) -> TlsError {
    TlsError::File {
        path: path.into(),
        why: why.to_string(),
    }
}

fn unusable(why: impl ToString) -> TlsError {
    TlsError::Unusable(why.to_string())
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(path).map_err(|e| unreadable(path, e))?;
    let all: Result<Vec<_>, _> = read.collect();
    let all = all.map_err(|e| unreadable(path, e))?;
    match all.is_empty() {
        true => Err(unreadable(path, "no certificate in it")),
        false => Ok(all),
    }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|e| unreadable(path, e))
}

/// The trusted authorities; without a directory, those of the system.
fn authorities(directory: Option<&Path>) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    match directory {
        Some(directory) => {
            let path = directory.join("ca-cert.pem");
            for certificate in certificates(&path)? {
                store.add(certificate).map_err(|e| unreadable(&path, e))?;
            }
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            // A broken one is left out.
            store.add_parsable_certificates(found.certs);
            if store.is_empty() {
                return Err(unusable("this system trusts no certificate authority"));
            }
        }
    }
    Ok(store)
}

/// A client's configuration.
#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) config: Arc<ClientConfig>,
    /// For [`Verify::Name`], and for servers with several names.
    pub(super) name: ServerName<'static>,
}

/// Loads certificates, for a server of this name. Without a name [`Verify::Name`] verifies the
/// authority only, as in QEMU.
pub(super) fn client(files: &TlsFiles, name: Option<&str>) -> Result<Client, TlsError> {
    let verify = match (files.verify, name) {
        (Verify::Name, None) => Verify::Authority,
        (verify, _) => verify,
    };
    let provider = provider();
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(unusable)?;
    let directory = files.directory.as_deref();
    let builder = match verify {
        Verify::Name => builder.with_root_certificates(authorities(directory)?),
        _ => {
            let roots = match verify {
                Verify::Nothing => None,
                _ => Some(authorities(directory)?),
            };
            let verifier = Lenient::new(roots, &provider);
            builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
        }
    };
    let own = directory.map(|d| (d.join("client-cert.pem"), d.join("client-key.pem")));
    let config = match own.filter(|(chain, _)| chain.exists()) {
        Some((chain, private)) => builder
            .with_client_auth_cert(certificates(&chain)?, key(&private)?)
            .map_err(unusable)?,
        None => builder.with_no_client_auth(),
    };
    let name = name.unwrap_or("localhost").to_string();
    let why = format!("'{name}' is no name of a server");
    Ok(Client {
        config: Arc::new(config),
        name: ServerName::try_from(name).map_err(|_| unusable(why))?,
    })
}

/// Loads `server-cert.pem` and `server-key.pem`, and with `verify` also
/// `ca-cert.pem`: clients need a certificate that this authority has signed.
pub(super) fn server(directory: &Path, verify: bool) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = certificates(&directory.join("server-cert.pem"))?;
    let key = key(&directory.join("server-key.pem"))?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(unusable)?;
    let builder = match verify {
        true => {
            let roots = Arc::new(authorities(Some(directory))?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
                .build()
                .map_err(unusable)?;
            builder.with_client_cert_verifier(verifier)
        }
        false => builder.with_no_client_auth(),
    };
    let config = builder.with_single_cert(chain, key).map_err(|e| {
        let directory = directory.display();
        unusable(format!("the certificates in {directory}: {e}"))
    })?;
    Ok(Arc::new(config))
}

/// Verifies the authority alone, or nothing.
#[derive(Debug)]
struct Lenient {
    roots: Option<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Lenient {
    fn new(roots: Option<RootCertStore>, provider: &CryptoProvider) -> Self {
        Lenient {
            roots,
            algorithms: provider.signature_verification_algorithms,
        }
    }
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if let Some(roots) = &self.roots {
            let certificate = ParsedCertificate::try_from(certificate)?;
            let algorithms = self.algorithms.all;
            verify_server_cert_signed_by_trust_anchor(
                &certificate,
                roots,
                intermediates,
                now,
                algorithms,
            )?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
