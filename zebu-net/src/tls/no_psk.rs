//! A library without pre-shared keys: no client or server can be created, so there are no sessions.

use std::convert::Infallible;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};

use super::TlsError;
use super::keys::Key;

fn absent<T>() -> Result<T, TlsError> {
    Err(TlsError::Unusable(
        "pre-shared keys are not part of this program (feature psk)".to_string(),
    ))
}

/// A client's key.
#[derive(Debug)]
pub(super) struct Client(Infallible);

impl Client {
    /// Always an error without the feature `psk`.
    pub(super) fn new(_: &Key) -> Result<Self, TlsError> {
        absent()
    }
}

/// A server's keys.
#[derive(Debug)]
pub(super) struct Server(Infallible);

impl Server {
    /// Always an error without the feature `psk`.
    pub(super) fn new(_: &[Key]) -> Result<Self, TlsError> {
        absent()
    }
}

/// A session, of which there is none.
pub(super) struct Session(Infallible);

impl Session {
    pub(super) fn client(client: &Client) -> io::Result<Self> {
        match client.0 {}
    }

    pub(super) fn server(server: &Server) -> io::Result<Self> {
        match server.0 {}
    }

    pub(super) fn is_handshaking(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn read(&mut self, _: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn write(&mut self, _: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn read_tls(&mut self, _: &mut dyn Read) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn process(&mut self) -> io::Result<()> {
        match self.0 {}
    }

    pub(super) fn wants_write(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn write_tls(&mut self, _: &mut dyn Write) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn send_close_notify(&mut self) {
        match self.0 {}
    }
}
