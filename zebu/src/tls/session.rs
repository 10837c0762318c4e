//! What a client and a server need, and a session with either kind of credentials.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConnection, Connection, ServerConfig, ServerConnection};

use super::{TlsCredentials, TlsError, broken, certificates, keys, psk};

/// What a client needs for TLS.
#[derive(Clone, Debug)]
pub struct ClientTls(Client);

#[derive(Clone, Debug)]
enum Client {
    Certificates(certificates::Client),
    Key(Arc<psk::Client>),
}

impl ClientTls {
    /// Loads what `credentials` mean, for a server of this name, which only
    /// certificates are looked at for; without it [`Verify::Name`](super::Verify::Name) looks at
    /// the authority only, as in QEMU.
    pub fn load(credentials: &TlsCredentials, name: Option<&str>) -> Result<Self, TlsError> {
        let client = match credentials {
            TlsCredentials::Certificates(files) => {
                Client::Certificates(certificates::client(files, name)?)
            }
            TlsCredentials::Key(file) => Client::Key(Arc::new(psk::Client::new(&file.load()?)?)),
        };
        Ok(ClientTls(client))
    }
}

/// What a server needs for TLS.
#[derive(Clone, Debug)]
pub struct ServerTls(Server);

#[derive(Clone, Debug)]
enum Server {
    Certificates(Arc<ServerConfig>),
    Keys(Arc<psk::Server>),
}

impl ServerTls {
    /// Loads `server-cert.pem` and `server-key.pem` of `directory`. With
    /// `verify` also `ca-cert.pem`: only clients are served then whose
    /// certificate the authority signed.
    pub fn with_certificates(directory: &Path, verify: bool) -> Result<Self, TlsError> {
        let config = certificates::server(directory, verify)?;
        Ok(ServerTls(Server::Certificates(config)))
    }

    /// Loads a file of pre-shared keys: those are served whose name and key are
    /// in it. An error also if there is none, more than [`MAX_USERS`](super::MAX_USERS), or a
    /// key of less than [`MIN_KEY`](super::MIN_KEY) bytes.
    pub fn with_keys(file: &Path) -> Result<Self, TlsError> {
        let server = psk::Server::new(&keys::load(file)?)?;
        Ok(ServerTls(Server::Keys(Arc::new(server))))
    }
}

/// TLS over a connection that the caller reads and writes. What it holds is
/// bounded as long as [`Session::write`] is called when nothing waits to be
/// written ([`Session::wants_write`]).
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
    /// A client's side, which has something to write.
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

    /// A server's side, which waits for the client.
    pub fn server(tls: &ServerTls) -> io::Result<Self> {
        Ok(Session(match &tls.0 {
            Server::Certificates(config) => {
                let connection = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
                Kind::Certificates(Box::new(connection.into()))
            }
            Server::Keys(server) => Kind::Keys(Box::new(psk::Session::server(server)?)),
        }))
    }

    /// Whether the handshake goes on.
    pub fn is_handshaking(&self) -> bool {
        match &self.0 {
            Kind::Certificates(connection) => connection.is_handshaking(),
            Kind::Keys(session) => session.is_handshaking(),
        }
    }

    /// Takes what was received and decrypted: at least a byte, or 0 when the
    /// peer said goodbye. `WouldBlock` if there is nothing,
    /// `UnexpectedEof` at an end without a goodbye, `InvalidData` if what was
    /// received is no TLS.
    pub fn read(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.reader().read_vectored(buffers),
            Kind::Keys(session) => session.read(buffers),
        }
    }

    /// Encrypts some of the bytes, after the handshake and when nothing waits
    /// to be written; how many.
    pub fn write(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.writer().write_vectored(bytes),
            Kind::Keys(session) => session.write(bytes),
        }
    }

    /// Receives from the connection, once; how many bytes, 0 at its end. Then
    /// [`Session::process`] is due.
    pub fn read_tls(&mut self, from: &mut dyn Read) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.read_tls(from),
            Kind::Keys(session) => session.read_tls(from),
        }
    }

    /// Looks at what was received. `InvalidData` if the peer cannot be
    /// authenticated, or does not use TLS; there may be an alert to write then.
    /// Of a handshake with keys that the peer ended a server is told
    /// `UnexpectedEof`, and a client `ConnectionAborted` with what may be the
    /// reason.
    pub fn process(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Kind::Certificates(connection) => {
                connection.process_new_packets().map(drop).map_err(broken)
            }
            Kind::Keys(session) => session.process(),
        }
    }

    /// Whether there is something for the connection.
    pub fn wants_write(&self) -> bool {
        match &self.0 {
            Kind::Certificates(connection) => connection.wants_write(),
            Kind::Keys(session) => session.wants_write(),
        }
    }

    /// Sends to the connection, once; how many bytes.
    pub fn write_tls(&mut self, to: &mut dyn Write) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.write_tls(to),
            Kind::Keys(session) => session.write_tls(to),
        }
    }

    /// Says goodbye, which is then to be written.
    pub fn send_close_notify(&mut self) {
        match &mut self.0 {
            Kind::Certificates(connection) => connection.send_close_notify(),
            Kind::Keys(session) => session.send_close_notify(),
        }
    }
}
