//! The credentials of clients and servers, and sessions with either kind.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConnection, Connection, ServerConfig, ServerConnection};

use super::{TlsCredentials, TlsError, broken, certificates, keys, psk};

/// A client's side of TLS, with its credentials loaded.
#[derive(Clone, Debug)]
pub struct ClientTls(Client);

#[derive(Clone, Debug)]
enum Client {
    Certificates(certificates::Client),
    Key(Arc<psk::Client>),
}

impl ClientTls {
    /// Loads credentials, for a server of this name, which only certificates use. Without a name
    /// [`Verify::Name`](super::Verify::Name) verifies the authority only, as in QEMU.
    ///
    /// # Errors
    /// If a file cannot be used, or has no such key.
    pub fn load(credentials: &TlsCredentials, name: Option<&str>) -> Result<Self, TlsError> {
        let client = match credentials {
            TlsCredentials::Certificates(files) => {
                Client::Certificates(certificates::client(files, name)?)
            }
            TlsCredentials::Key(file) => {
                Client::Key(Arc::new(psk::Client::new(&keys::key_of(file)?)?))
            }
            _ => return Err(TlsError::Unusable("credentials of an unknown kind".into())),
        };
        Ok(ClientTls(client))
    }
}

/// A server's side of TLS, with its credentials loaded.
#[derive(Clone, Debug)]
pub struct ServerTls(Server);

#[derive(Clone, Debug)]
enum Server {
    Certificates(Arc<ServerConfig>),
    Keys(Arc<psk::Server>),
}

impl ServerTls {
    /// Loads `server-cert.pem` and `server-key.pem` of `directory`. With `verify` also
    /// `ca-cert.pem`: clients need a certificate that this authority has signed.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub fn with_certificates(directory: &Path, verify: bool) -> Result<Self, TlsError> {
        let config = certificates::server(directory, verify)?;
        Ok(ServerTls(Server::Certificates(config)))
    }

    /// Loads a file of pre-shared keys of users.
    ///
    /// # Errors
    /// If the file cannot be used, has no key, more than [`MAX_USERS`](super::MAX_USERS), or one of
    /// less than [`MIN_KEY`](super::MIN_KEY) bytes.
    pub fn with_keys(file: &Path) -> Result<Self, TlsError> {
        let server = psk::Server::new(&keys::load(file)?)?;
        Ok(ServerTls(Server::Keys(Arc::new(server))))
    }
}

/// TLS over a connection that the caller reads and writes. Its memory is bounded if
/// [`Session::write`] is called only when nothing waits to be written ([`Session::wants_write`]).
pub struct Session(Kind);

enum Kind {
    Certificates(Box<Connection>),
    Keys(Box<psk::Session>),
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Certificates(_) => "Session(certificates)",
            Kind::Keys(_) => "Session(keys)",
        })
    }
}

impl Session {
    /// A client's session, which begins with a write.
    pub fn client(tls: &ClientTls) -> io::Result<Self> {
        Ok(Session(match &tls.0 {
            Client::Certificates(client) => {
                let connection = ClientConnection::new(client.config.clone(), client.name.clone());
                let connection = connection.map_err(io::Error::other)?;
                Kind::Certificates(Box::new(connection.into()))
            }
            Client::Key(client) => Kind::Keys(Box::new(psk::Session::client(client)?)),
        }))
    }

    /// A server's session, which begins with a read.
    pub fn server(tls: &ServerTls) -> io::Result<Self> {
        Ok(Session(match &tls.0 {
            Server::Certificates(config) => {
                let connection = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
                Kind::Certificates(Box::new(connection.into()))
            }
            Server::Keys(server) => Kind::Keys(Box::new(psk::Session::server(server)?)),
        }))
    }

    /// Whether the handshake is not complete.
    pub fn is_handshaking(&self) -> bool {
        match &self.0 {
            Kind::Certificates(connection) => connection.is_handshaking(),
            Kind::Keys(session) => session.is_handshaking(),
        }
    }

    /// Takes decrypted bytes: at least one, or 0 after a close_notify.
    ///
    /// # Errors
    /// `WouldBlock` if there are none, `UnexpectedEof` at an end without a close_notify,
    /// `InvalidData` if the peer does not use TLS.
    pub fn read(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.reader().read_vectored(buffers),
            Kind::Keys(session) => session.read(buffers),
        }
    }

    /// Encrypts some of the bytes and returns how many. Called after the handshake, when nothing
    /// waits to be written.
    pub fn write(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.writer().write_vectored(bytes),
            Kind::Keys(session) => session.write(bytes),
        }
    }

    /// Receives from the connection once: the number of bytes, 0 at its end. The caller then calls
    /// [`Session::process`].
    pub fn read_tls(&mut self, from: &mut dyn Read) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.read_tls(from),
            Kind::Keys(session) => session.read_tls(from),
        }
    }

    /// Processes what was received.
    ///
    /// # Errors
    /// `InvalidData` if the peer cannot be authenticated or does not use TLS; there may be an alert
    /// to write then. If the peer ended a handshake with keys, a server gets `UnexpectedEof` and a
    /// client `ConnectionAborted` with a possible reason.
    pub fn process(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Kind::Certificates(connection) => {
                connection.process_new_packets().map(drop).map_err(broken)
            }
            Kind::Keys(session) => session.process(),
        }
    }

    /// Whether bytes wait to be sent.
    pub fn wants_write(&self) -> bool {
        match &self.0 {
            Kind::Certificates(connection) => connection.wants_write(),
            Kind::Keys(session) => session.wants_write(),
        }
    }

    /// Sends to the connection once: the number of bytes.
    pub fn write_tls(&mut self, to: &mut dyn Write) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.write_tls(to),
            Kind::Keys(session) => session.write_tls(to),
        }
    }

    /// Prepares a close_notify to be sent.
    pub fn send_close_notify(&mut self) {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.send_close_notify(),
            Kind::Keys(session) => session.send_close_notify(),
        }
    }
}
