//! Certificates, laid out as QEMU and libnbd have them: a directory with
//! `ca-cert.pem` (who is trusted), `server-cert.pem` and `server-key.pem`.
//!
//! TLS 1.2 and 1.3 by rustls. It has no pre-shared keys, so neither has zebu.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file that cannot be read, or holds something else.
    #[error("Unable to load {path}: {why}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// What is in the files does not fit together.
    #[error("Unable to use the certificates in {path}: {why}")]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

fn unreadable(path: &Path, why: impl ToString) -> TlsError {
    TlsError::File {
        path: path.into(),
        why: why.to_string(),
    }
}

fn unusable(path: &Path, why: impl ToString) -> TlsError {
    TlsError::Unusable {
        path: path.into(),
        why: why.to_string(),
    }
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

fn authorities(directory: &Path) -> Result<RootCertStore, TlsError> {
    let path = directory.join("ca-cert.pem");
    let mut store = RootCertStore::empty();
    for certificate in certificates(&path)? {
        store.add(certificate).map_err(|e| unreadable(&path, e))?;
    }
    Ok(store)
}

/// What a server needs for TLS.
#[derive(Clone, Debug)]
pub struct ServerTls(pub(crate) Arc<ServerConfig>);

impl ServerTls {
    /// Loads `ca-cert.pem`, `server-cert.pem` and `server-key.pem`. With
    /// `verify` only clients are served whose certificate the authority signed.
    pub fn load(directory: &Path, verify: bool) -> Result<Self, TlsError> {
        let chain = certificates(&directory.join("server-cert.pem"))?;
        let key = key(&directory.join("server-key.pem"))?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|e| unusable(directory, e))?;
        let builder = match verify {
            true => {
                let roots = Arc::new(authorities(directory)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
                    .build()
                    .map_err(|e| unusable(directory, e))?;
                builder.with_client_cert_verifier(verifier)
            }
            false => builder.with_no_client_auth(),
        };
        let config = builder
            .with_single_cert(chain, key)
            .map_err(|e| unusable(directory, e))?;
        Ok(ServerTls(Arc::new(config)))
    }
}
