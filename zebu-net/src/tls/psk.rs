//! A session with pre-shared keys: TLS 1.3 alone, with a Diffie-Hellman
//! exchange (`psk_dhe_ke`), by s2n-tls. The hash of the keys is SHA-256, the default of RFC 8446,
//! section 4.2.11.
//!
//! s2n-tls receives and sends by callbacks, which use two buffers in memory, so it never waits.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::slice;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Mode, PskHmac, Version};
use s2n_tls::error::{Error, ErrorType};
use s2n_tls::psk::Psk;
use s2n_tls::security::DEFAULT_TLS13;

use super::keys::Key;
use super::{TlsError, broken};
use crate::lock;

/// Bytes that are received at a time, and processed before more are received; a record has little
/// more than 16 KiB.
const RECEIVED: usize = 32 << 10;
/// Bytes that are encrypted at a time.
const TO_ENCRYPT: usize = 64 << 10;
/// Bytes for the connection at most: what is encrypted at a time, and what a
/// handshake has.
const TO_SEND: usize = 2 * TO_ENCRYPT;
/// Bytes that a handshake receives at most: a message has at most 64 KiB, and
/// s2n-tls ignores any number of empty records.
const HANDSHAKE: usize = 256 << 10;

/// A client's configuration and key.
#[derive(Debug)]
pub(super) struct Client {
    config: Config,
    key: Psk,
    user: String,
}

/// A server's configuration and keys.
#[derive(Debug)]
pub(super) struct Server {
    config: Config,
    keys: Vec<Psk>,
}

fn unusable(error: Error) -> TlsError {
    TlsError::Unusable(error.to_string())
}

fn config() -> Result<Config, Error> {
    let mut builder = Config::builder();
    builder.set_security_policy(&DEFAULT_TLS13)?;
    // Certificates are not used: with an empty trust store a server without a key is refused.
    builder.with_system_certs(false)?;
    // By default s2n-tls delays the end of a failed connection by 10 to 30 seconds, which hides the
    // timing of CBC padding ("Lucky Thirteen"). TLS 1.3 has no CBC, and a peer that cannot
    // authenticate must not occupy a connection.
    builder.set_max_blinding_delay(0)?;
    builder.build()
}

fn psk(key: &Key) -> Result<Psk, Error> {
    let mut builder = Psk::builder()?;
    builder.set_identity(&key.user)?;
    builder.set_secret(&key.secret)?;
    builder.set_hmac(PskHmac::SHA256)?;
    builder.build()
}

impl Client {
    pub(super) fn new(key: &Key) -> Result<Self, TlsError> {
        Ok(Client {
            config: config().map_err(unusable)?,
            key: psk(key).map_err(unusable)?,
            user: String::from_utf8_lossy(&key.user).into_owned(),
        })
    }
}

impl Server {
    pub(super) fn new(keys: &[Key]) -> Result<Self, TlsError> {
        let keys: Result<Vec<_>, _> = keys.iter().map(psk).collect();
        Ok(Server {
            config: config().map_err(unusable)?,
            keys: keys.map_err(unusable)?,
        })
    }
}

/// Between s2n-tls and the connection.
struct Buffers {
    received: Box<[u8]>,
    /// The part of `received` that s2n-tls has not taken.
    unread: std::ops::Range<usize>,
    /// No more will be received.
    ended: bool,
    to_send: Vec<u8>,
    /// How many bytes of `to_send` were sent.
    sent: usize,
}

/// One side of a connection.
pub(super) struct Session {
    // Dropped first: it points to the buffers.
    connection: Connection,
    buffers: Arc<Mutex<Buffers>>,
    established: bool,
    /// Bytes that the handshake has received.
    received: usize,
    /// The error of the next read.
    failure: Option<io::Error>,
    /// Small pieces, to be encrypted together.
    gathered: Vec<u8>,
    /// A client's name.
    user: Option<String>,
}

impl Session {
    /// The first message is ready to be written.
    pub(super) fn client(client: &Client) -> io::Result<Self> {
        let keys = slice::from_ref(&client.key);
        let mut session = Session::new(Mode::Client, &client.config, keys)?;
        session.user = Some(client.user.clone());
        session.process()?;
        Ok(session)
    }

    pub(super) fn server(server: &Server) -> io::Result<Self> {
        Session::new(Mode::Server, &server.config, &server.keys)
    }

    fn new(mode: Mode, config: &Config, keys: &[Psk]) -> io::Result<Self> {
        let buffers = Arc::new(Mutex::new(Buffers {
            received: vec![0; RECEIVED].into(),
            unread: 0..0,
            ended: false,
            to_send: Vec::new(),
            sent: 0,
        }));
        let mut connection = Connection::new(mode);
        connection.set_config(config.clone())?;
        for key in keys {
            connection.append_psk(key)?;
        }
        let context = Arc::as_ptr(&buffers).cast_mut().cast::<c_void>();
        connection.set_receive_callback(Some(receive))?;
        connection.set_send_callback(Some(send))?;
        // SAFETY: the session keeps the buffers as long as the connection, and
        // drops the connection first.
        unsafe {
            connection.set_receive_context(context)?;
            connection.set_send_context(context)?;
        }
        Ok(Session {
            connection,
            buffers,
            established: false,
            received: 0,
            failure: None,
            gathered: Vec::new(),
            user: None,
        })
    }

    pub(super) fn is_handshaking(&self) -> bool {
        !self.established
    }

    pub(super) fn process(&mut self) -> io::Result<()> {
        if self.established {
            // Reads process the rest.
            return Ok(());
        }
        match self.connection.poll_negotiate() {
            Poll::Pending => return Ok(()),
            Poll::Ready(Err(e)) => return Err(self.failed(e)),
            Poll::Ready(Ok(_)) => {}
        }
        // Without a common key certificates would be needed, and there are none. The policy has TLS
        // 1.2 only with certificates.
        let has_key = self.connection.negotiated_psk_identity_length()? > 0;
        if !has_key || self.connection.actual_protocol_version()? != Version::TLS13 {
            return Err(broken("the peer has no key"));
        }
        self.established = true;
        Ok(())
    }

    /// Why the session ended. s2n-tls tells the peer that it ended, but not why. A peer that sends
    /// no more may still wait for replies, so it is not told yet.
    fn failed(&mut self, error: Error) -> io::Error {
        let ended = self.established && error.kind() == ErrorType::ConnectionClosed;
        let user = self.user.as_ref().filter(|_| !self.established);
        let error = match (error.kind(), self.connection.alert(), user) {
            // The usual alerts of servers without this user or key.
            (ErrorType::ConnectionClosed, _, Some(user)) => io::Error::new(
                io::ErrorKind::ConnectionAborted,
                format!(
                    "it ended the handshake of TLS: perhaps it has no user '{user}', or another \
                     key of that user"
                ),
            ),
            (ErrorType::ConnectionClosed, _, None) => io::ErrorKind::UnexpectedEof.into(),
            (ErrorType::Alert, Some(alert), user) => {
                let alert = rustls::AlertDescription::from(alert);
                broken(match user.filter(|_| is_about_keys(alert)) {
                    Some(user) => {
                        format!("the server does not take user '{user}' with this key ({alert:?})")
                    }
                    None => format!("the peer ended it ({alert:?})"),
                })
            }
            _ => match error.name() {
                "S2N_ERR_BAD_PSK_BINDER" => broken("the client has another key of that user"),
                // Without a common key a certificate would be needed.
                "S2N_ERR_NO_VALID_SIGNATURE_SCHEME" => {
                    broken("the client offers no key of a user that is known here")
                }
                _ => broken(error),
            },
        };
        if !ended {
            self.send_close_notify();
        }
        error
    }

    pub(super) fn read(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if !self.established {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let mut total = 0;
        for buffer in buffers {
            let mut rest = &mut **buffer;
            while !rest.is_empty() {
                let failure = match self.connection.poll_recv(rest) {
                    Poll::Ready(Ok(n)) if n > 0 => {
                        total += n;
                        rest = &mut rest[n..];
                        continue;
                    }
                    Poll::Ready(Ok(_)) => return Ok(total),
                    Poll::Pending => io::ErrorKind::WouldBlock.into(),
                    Poll::Ready(Err(e)) => self.failed(e),
                };
                if total == 0 {
                    return Err(failure);
                }
                if failure.kind() == io::ErrorKind::InvalidData {
                    self.failure = Some(failure);
                }
                return Ok(total);
            }
        }
        Ok(total)
    }

    pub(super) fn write(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        if !self.established {
            return Err(io::ErrorKind::NotConnected.into());
        }
        if self.wants_write() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let Some(first) = bytes.iter().find(|bytes| !bytes.is_empty()) else {
            return Ok(0);
        };
        // A record for each small piece would cost more than to copy them.
        let mut together = &first[..first.len().min(TO_ENCRYPT)];
        if together.len() < TO_ENCRYPT && bytes.len() > 1 {
            self.gathered.clear();
            for piece in bytes {
                let room = TO_ENCRYPT - self.gathered.len();
                let taken = piece.len().min(room);
                self.gathered.extend_from_slice(&piece[..taken]);
            }
            together = &self.gathered;
        }
        match self.connection.poll_send(together) {
            Poll::Ready(Ok(n)) => Ok(n),
            Poll::Ready(Err(e)) => Err(broken(e)),
            // There was space for all.
            Poll::Pending => Err(broken("more was made of it than there is room for")),
        }
    }

    pub(super) fn read_tls(&mut self, from: &mut dyn Read) -> io::Result<usize> {
        let mut buffers = lock(&self.buffers);
        let Buffers {
            received, unread, ..
        } = &mut *buffers;
        received.copy_within(unread.clone(), 0);
        *unread = 0..unread.len();
        if unread.end == received.len() {
            // s2n-tls takes everything before it calls back for more.
            return Err(io::Error::other("what was received was not looked at"));
        }
        if !self.established && self.received >= HANDSHAKE {
            return Err(broken("a handshake without an end"));
        }
        let n = from.read(&mut received[unread.end..])?;
        self.received += if self.established { 0 } else { n };
        unread.end += n;
        buffers.ended |= n == 0;
        Ok(n)
    }

    pub(super) fn wants_write(&self) -> bool {
        !lock(&self.buffers).to_send.is_empty()
    }

    pub(super) fn write_tls(&mut self, to: &mut dyn Write) -> io::Result<usize> {
        let mut buffers = lock(&self.buffers);
        let n = to.write(&buffers.to_send[buffers.sent..])?;
        buffers.sent += n;
        if buffers.sent == buffers.to_send.len() {
            buffers.to_send.clear();
            buffers.sent = 0;
        }
        Ok(n)
    }

    pub(super) fn send_close_notify(&mut self) {
        // It fails if the session has ended.
        let _ = self.connection.poll_shutdown_send();
    }
}

/// Whether this alert of a server may be about the key or the user.
fn is_about_keys(alert: rustls::AlertDescription) -> bool {
    use rustls::AlertDescription::*;
    matches!(
        alert,
        DecryptError
            | UnknownPSKIdentity
            | HandshakeFailure
            | IllegalParameter
            | AccessDenied
            | InsufficientSecurity
    )
}

/// Reports `EAGAIN` to s2n-tls.
fn would_block() -> c_int {
    // SAFETY: the address is this thread's errno.
    unsafe { *libc::__errno_location() = libc::EWOULDBLOCK };
    -1
}

/// Gives s2n-tls up to `length` bytes of those that were received; 0 at the
/// end.
///
/// # Safety
///
/// `context` is the session's buffers, and there is space for `length` bytes.
unsafe extern "C" fn receive(context: *mut c_void, to: *mut u8, length: u32) -> c_int {
    // SAFETY: as above.
    let buffers = unsafe { &*context.cast::<Mutex<Buffers>>() };
    let mut buffers = lock(buffers);
    if buffers.unread.is_empty() {
        return match buffers.ended {
            true => 0,
            false => would_block(),
        };
    }
    let taken = buffers.unread.len().min(length as usize);
    let from = &buffers.received[buffers.unread.start..][..taken];
    // SAFETY: both have at least `taken` bytes, and do not overlap.
    unsafe { to.copy_from_nonoverlapping(from.as_ptr(), taken) };
    buffers.unread.start += taken;
    taken as c_int
}

/// Takes `length` bytes for the connection.
///
/// # Safety
///
/// `context` is the session's buffers, and `from` has `length` bytes.
unsafe extern "C" fn send(context: *mut c_void, from: *const u8, length: u32) -> c_int {
    // SAFETY: as above.
    let buffers = unsafe { &*context.cast::<Mutex<Buffers>>() };
    let mut buffers = lock(buffers);
    let taken = (length as usize).min(TO_SEND.saturating_sub(buffers.to_send.len()));
    if taken == 0 {
        return would_block();
    }
    // SAFETY: `taken` is no more than `length`.
    let bytes = unsafe { slice::from_raw_parts(from, taken) };
    buffers.to_send.extend_from_slice(bytes);
    taken as c_int
}

#[cfg(test)]
mod tests {
    //! Guards against sessions that accept a peer without a key, lose bytes where records are
    //! split, or buffer without limit what a peer sends.
    use super::*;
    use s2n_tls::enums::PeerKeyUpdate;

    fn key(user: &str, byte: u8) -> Key {
        Key {
            user: user.into(),
            secret: vec![byte; 32],
        }
    }

    fn pair(client: &Key, server: &[Key]) -> (Session, Session) {
        let client = Client::new(client).unwrap();
        let server = Server::new(server).unwrap();
        (
            Session::client(&client).unwrap(),
            Session::server(&server).unwrap(),
        )
    }

    /// Moves bytes from one to the other, at most `most` at a time.
    fn carry(from: &mut Session, to: &mut Session, most: usize) -> io::Result<()> {
        let mut wire = Vec::new();
        while from.wants_write() {
            from.write_tls(&mut wire)?;
        }
        for mut piece in wire.chunks(most) {
            while !piece.is_empty() {
                to.read_tls(&mut piece)?;
                to.process()?;
            }
        }
        Ok(())
    }

    fn shake(client: &mut Session, server: &mut Session, most: usize) -> io::Result<()> {
        for _ in 0..8 {
            carry(client, server, most)?;
            carry(server, client, most)?;
        }
        Ok(())
    }

    #[test]
    fn bytes_are_received_as_they_were_sent() {
        for most in [1, 7, 1000, usize::MAX] {
            let keys = [key("a", 1), key("b", 2)];
            let (mut client, mut server) = pair(&keys[1], &keys);
            assert!(client.is_handshaking() && server.is_handshaking());
            shake(&mut client, &mut server, most).unwrap();
            assert!(!client.is_handshaking() && !server.is_handshaking());
            let bytes: Vec<u8> = (0..300_000).map(|n| (n % 251) as u8).collect();
            let (mut sent, mut read) = (0, Vec::<u8>::new());
            while read.len() < bytes.len() {
                if sent < bytes.len() {
                    // A key update, as after many records.
                    let update = PeerKeyUpdate::KeyUpdateNotRequested;
                    server.connection.request_key_update(update).unwrap();
                    let (head, rest) = bytes[sent..].split_at(10.min(bytes.len() - sent));
                    let n = server.write(&[IoSlice::new(head), IoSlice::new(rest)]);
                    sent += n.unwrap();
                }
                let mut wire = Vec::new();
                while server.wants_write() {
                    server.write_tls(&mut wire).unwrap();
                }
                assert!(wire.len() <= TO_SEND);
                for mut piece in wire.chunks(most) {
                    while !piece.is_empty() {
                        client.read_tls(&mut piece).unwrap();
                        client.process().unwrap();
                        let (mut one, mut two) = ([0; 100], [0; 50_000]);
                        let mut both = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
                        if let Ok(n) = client.read(&mut both) {
                            read.extend([&one[..], &two[..]].concat()[..n].iter());
                        }
                    }
                }
            }
            assert!(read == bytes, "{most}");
            // A close_notify is not a lost connection.
            server.send_close_notify();
            carry(&mut server, &mut client, most).unwrap();
            let mut one = [0];
            assert_eq!(client.read(&mut [IoSliceMut::new(&mut one)]).unwrap(), 0);
        }
    }

    #[test]
    fn a_peer_without_a_key_is_refused() {
        for (client, why) in [
            (key("a", 2), "the client has another key of that user"),
            (
                key("c", 1),
                "the client offers no key of a user that is known here",
            ),
        ] {
            let (mut client, mut server) = pair(&client, &[key("a", 1), key("b", 2)]);
            let refused = carry(&mut client, &mut server, usize::MAX).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
            assert!(refused.to_string().contains(why), "{refused}");
            assert!(server.is_handshaking() && server.wants_write());
            let told = carry(&mut server, &mut client, usize::MAX).unwrap_err();
            assert!(
                told.to_string().contains("perhaps it has no user"),
                "{told}"
            );
            assert!(client.write(&[IoSlice::new(b"x")]).is_err());
        }
    }

    #[test]
    fn an_endless_handshake_is_an_error() {
        // Any number of empty records.
        let (mut client, mut server) = pair(&key("a", 1), &[key("a", 1)]);
        carry(&mut client, &mut server, usize::MAX).unwrap();
        let nothing = [20, 3, 3, 0, 1, 1].repeat(4000);
        let error = (0..100)
            .find_map(|_| {
                let received = server.read_tls(&mut &nothing[..]);
                received.and_then(|_| server.process()).err()
            })
            .expect("an end");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    }

    #[test]
    fn garbage_and_lost_connections_are_errors() {
        let (_, mut server) = pair(&key("a", 1), &[key("a", 1)]);
        server.read_tls(&mut &[0x55; 30_000][..]).unwrap();
        let error = server.process().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);

        let (mut client, mut server) = pair(&key("a", 1), &[key("a", 1)]);
        assert_eq!(server.read_tls(&mut &[][..]).unwrap(), 0);
        let error = server.process().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(server.is_handshaking());
        // A connection that ends without close_notify is lost. Data may still be sent to the peer.
        let (_, mut server) = pair(&key("a", 1), &[key("a", 1)]);
        shake(&mut client, &mut server, usize::MAX).unwrap();
        client.read_tls(&mut &[][..]).unwrap();
        let mut one = [0];
        let error = client.read(&mut [IoSliceMut::new(&mut one)]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(client.write(&[IoSlice::new(b"answer")]).unwrap(), 6);
        carry(&mut client, &mut server, usize::MAX).unwrap();
        let mut answer = [0; 9];
        let n = server.read(&mut [IoSliceMut::new(&mut answer)]).unwrap();
        assert_eq!(&answer[..n], b"answer");
        // Changed bytes are not TLS.
        server
            .read_tls(&mut &[23, 3, 3, 0, 32].repeat(20)[..])
            .unwrap();
        let error = server.read(&mut [IoSliceMut::new(&mut one)]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
