//! The bytes of a connection: a socket that never blocks, and TLS over it.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Type};

use super::NbdServer;
use super::options::resolve;
use crate::tls::ClientTls;
use crate::tls::session::Session;

/// A connected socket.
#[derive(Debug)]
pub(super) struct Socket(socket2::Socket);

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The size of the socket's send buffer in bytes, which the kernel may limit.
const KERNEL_BUFFER: usize = 2 << 20;
/// How often TLS receives at a time without data: a server may send such records without end.
const MAX_ROUNDS: usize = 16;
/// The wait before another attempt to connect to a unix socket whose backlog is full.
const FULL: Duration = Duration::from_millis(10);

impl Socket {
    /// Connects until `deadline`.
    pub(super) fn connect(server: &NbdServer, deadline: Instant) -> io::Result<Socket> {
        match server {
            NbdServer::Unix(path) => connect_unix(&SockAddr::unix(path)?, deadline),
            NbdServer::Tcp { host, port } => {
                let mut error = None;
                for address in resolve(host, port)? {
                    match connect_tcp(&address, deadline) {
                        Ok(socket) => return Ok(socket),
                        Err(e) => error = Some(e),
                    }
                }
                Err(error.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()))
            }
        }
    }

    /// Shuts the connection down, which ends all waits for it.
    pub(super) fn shutdown(&self) {
        // It fails if the peer has closed the connection.
        let _ = self.0.shutdown(Shutdown::Both);
    }

    /// Whether there is something to receive, or the end.
    pub(super) fn has_arrived(&self) -> bool {
        self.0.peek(&mut [MaybeUninit::uninit()]).is_ok()
    }

    /// Waits for one of `events` until `deadline`.
    fn wait(&self, events: libc::c_short, deadline: Instant) -> io::Result<()> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut polled = libc::pollfd {
                fd: self.0.as_raw_fd(),
                events,
                revents: 0,
            };
            let left = left.as_millis().clamp(1, 1 << 20) as libc::c_int;
            // SAFETY: one valid entry.
            #[allow(unsafe_code)]
            let ready = unsafe { libc::poll(&mut polled, 1, left) };
            if ready > 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if ready < 0 && error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

fn connect_unix(address: &SockAddr, deadline: Instant) -> io::Result<Socket> {
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM.cloexec().nonblocking(), None)?;
    // A smaller buffer works, too.
    let _ = socket.set_send_buffer_size(KERNEL_BUFFER);
    loop {
        match socket.connect(address) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::sleep(FULL);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(|()| Socket(socket)),
        }
    }
}

fn connect_tcp(address: &std::net::SocketAddr, deadline: Instant) -> io::Result<Socket> {
    let socket = socket2::Socket::new(Domain::for_address(*address), Type::STREAM.cloexec(), None)?;
    let left = deadline.saturating_duration_since(Instant::now());
    socket.connect_timeout(&(*address).into(), left.max(Duration::from_millis(1)))?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    // So that the loss of the server's host is noticed.
    socket.set_keepalive(true)?;
    Ok(Socket(socket))
}

/// One connection's bytes.
#[derive(Debug)]
pub(super) struct Wire {
    socket: Arc<Socket>,
    tls: Option<Session>,
    /// The last receive took everything: there is nothing before the socket is readable again.
    drained: bool,
}

impl Wire {
    pub(super) fn new(socket: Socket) -> Self {
        Wire {
            socket: Arc::new(socket),
            tls: None,
            drained: false,
        }
    }

    pub(super) fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// Whether TLS has begun.
    pub(super) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// The socket became readable.
    pub(super) fn arrived(&mut self) {
        self.drained = false;
    }

    /// Receives without waiting; 0 at the end, `WouldBlock` if there is nothing.
    pub(super) fn try_recv(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            if self.drained {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let space: usize = buffers.iter().map(|buffer| buffer.len()).sum();
            let received = again(|| (&self.socket.0).read_vectored(buffers));
            self.drained = match &received {
                Ok(received) => *received > 0 && *received < space,
                Err(e) => e.kind() == io::ErrorKind::WouldBlock,
            };
            return received;
        };
        for _ in 0..MAX_ROUNDS {
            match take(tls, buffers) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            let received = again(|| tls.read_tls(&mut &self.socket.0))?;
            if let Err(e) = tls.process() {
                // The alert, if there is space for it.
                let _ = push(tls, &self.socket);
                return Err(e);
            }
            if received == 0 && tls.is_handshaking() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // TLS may have to reply.
            match push(tls, &self.socket) {
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                _ => {}
            }
        }
        take(tls, buffers)
    }

    /// Sends some of the bytes; `WouldBlock` if there is no space.
    pub(super) fn try_send(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            return again(|| NoSignal(&self.socket).write_vectored(bytes));
        };
        // Sent first, so that the buffer does not grow.
        push(tls, &self.socket)?;
        let sent = tls.write(bytes)?;
        match push(tls, &self.socket) {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => Err(e),
            _ => Ok(sent),
        }
    }

    /// Sends what TLS has buffered; whether all was sent.
    pub(super) fn try_flush(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            None => Ok(true),
            Some(tls) => match push(tls, &self.socket) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
                result => result.map(|()| true),
            },
        }
    }

    /// Sends TLS's close_notify, if there is space for it.
    pub(super) fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
            let _ = push(tls, &self.socket);
        }
    }
}

/// For the handshake, which waits.
impl Wire {
    /// Fills `buffer` until `deadline`.
    pub(super) fn read_exact(
        &mut self,
        mut buffer: &mut [u8],
        deadline: Instant,
    ) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.try_recv(&mut [IoSliceMut::new(buffer)]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => buffer = &mut buffer[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.flush(deadline)?;
                    self.socket.wait(libc::POLLIN, deadline)?;
                    self.arrived();
                }
                Err(e) => return Err(e),
            }
            if Instant::now() >= deadline {
                // Also for a peer that sends single bytes.
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// Sends all until `deadline`.
    pub(super) fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.try_send(&[IoSlice::new(bytes)]) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.socket.wait(libc::POLLOUT, deadline)?;
                }
                Err(e) => return Err(e),
            }
        }
        self.flush(deadline)
    }

    fn flush(&mut self, deadline: Instant) -> io::Result<()> {
        while !self.try_flush()? {
            self.socket.wait(libc::POLLOUT, deadline)?;
        }
        Ok(())
    }

    /// Starts TLS.
    pub(super) fn start_tls(&mut self, with: &ClientTls, deadline: Instant) -> io::Result<()> {
        self.tls = Some(Session::client(with)?);
        let eof = io::ErrorKind::UnexpectedEof;
        // To the end of the handshake, so that an error is reported as one of TLS.
        loop {
            if Instant::now() >= deadline {
                // Also for a peer that sends without end.
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.flush(deadline)?;
            let Some(tls) = self.tls.as_mut().filter(|tls| tls.is_handshaking()) else {
                return Ok(());
            };
            match again(|| tls.read_tls(&mut &self.socket.0)) {
                // The session may have an error.
                Ok(0) => return Err(tls.process().err().unwrap_or(eof.into())),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.socket.wait(libc::POLLIN, deadline)?;
                }
                Err(e) => return Err(e),
            }
            if let Err(e) = tls.process() {
                let _ = push(tls, &self.socket);
                return Err(e);
            }
        }
    }
}

/// Takes decrypted bytes; 0 at the end.
fn take(tls: &mut Session, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    match tls.read(buffers) {
        // An end without a close_notify is a lost connection.
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        result => result,
    }
}

/// Sends what TLS has encrypted.
fn push(tls: &mut Session, socket: &Socket) -> io::Result<()> {
    while tls.wants_write() {
        again(|| tls.write_tls(&mut NoSignal(socket)))?;
    }
    Ok(())
}

fn again<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Sends without SIGPIPE: a closed connection is an error.
struct NoSignal<'a>(&'a Socket);

impl Write for NoSignal<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.0.send_with_flags(bytes, libc::MSG_NOSIGNAL)
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.0.send_vectored_with_flags(bytes, libc::MSG_NOSIGNAL)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
