//! A library without TLS: no client or server can be created, so there are no sessions.

use std::convert::Infallible;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::path::Path;

use super::{TlsCredentials, TlsError};

fn absent<T>() -> Result<T, TlsError> {
    Err(TlsError::Unusable(
        "it is not part of this program".to_string(),
    ))
}

/// A client's side of TLS.
#[derive(Clone, Debug)]
pub struct ClientTls(Infallible);

impl ClientTls {
    /// Always an error without the feature `tls`.
    pub fn load(_: &TlsCredentials, _: Option<&str>) -> Result<Self, TlsError> {
        absent()
    }
}

/// A server's side of TLS.
#[derive(Clone, Debug)]
pub struct ServerTls(Infallible);

impl ServerTls {
    /// Always an error without the feature `tls`.
    pub fn with_certificates(_: &Path, _: bool) -> Result<Self, TlsError> {
        absent()
    }

    /// Always an error without the feature `tls`.
    pub fn with_keys(_: &Path) -> Result<Self, TlsError> {
        absent()
    }
}

/// TLS over a connection, of which there is none without the feature `tls`.
#[derive(Debug)]
pub struct Session(Infallible);

impl Session {
    /// A client's session.
    pub fn client(tls: &ClientTls) -> io::Result<Self> {
        match tls.0 {}
    }

    /// A server's session.
    pub fn server(tls: &ServerTls) -> io::Result<Self> {
        match tls.0 {}
    }

    /// Whether the handshake is not complete.
    pub fn is_handshaking(&self) -> bool {
        match self.0 {}
    }

    /// Takes decrypted bytes.
    pub fn read(&mut self, _: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self.0 {}
    }

    /// Encrypts some of the bytes.
    pub fn write(&mut self, _: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.0 {}
    }

    /// Receives from the connection.
    pub fn read_tls(&mut self, _: &mut dyn Read) -> io::Result<usize> {
        match self.0 {}
    }

    /// Processes what was received.
    pub fn process(&mut self) -> io::Result<()> {
        match self.0 {}
    }

    /// Whether bytes wait to be sent.
    pub fn wants_write(&self) -> bool {
        match self.0 {}
    }

    /// Sends to the connection.
    pub fn write_tls(&mut self, _: &mut dyn Write) -> io::Result<usize> {
        match self.0 {}
    }

    /// Prepares a close_notify.
    pub fn send_close_notify(&mut self) {
        match self.0 {}
    }
}
