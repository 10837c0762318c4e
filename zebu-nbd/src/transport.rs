//! The bytes of one connection: a non-blocking socket, and TLS over it.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use zebu::internal::{Polling, Session, yield_once};
use zebu::storage::Queue;
use zebu::tls::ServerTls;

/// Receives of TLS in one call at most: a client may send records without data for ever.
const MAX_ROUNDS: usize = 16;

/// The send buffer of a unix socket in bytes (socket(7), unix(7)). The kernel's default is 208 KiB.
const SEND_BUFFER: libc::c_int = 512 << 10;

/// A connected socket.
#[derive(Debug)]
pub enum Stream {
    /// A unix socket.
    Unix(UnixStream),
    /// TCP.
    Tcp(TcpStream),
}

impl Stream {
    fn shutdown(&self, how: Shutdown) {
        // Fails if the peer has disconnected already.
        let _ = match self {
            Stream::Unix(stream) => stream.shutdown(how),
            Stream::Tcp(stream) => stream.shutdown(how),
        };
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Read for &Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(buffer)])
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&mut &*stream).read_vectored(buffers),
            Stream::Tcp(stream) => (&mut &*stream).read_vectored(buffers),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&mut &*stream).write(bytes),
            Stream::Tcp(stream) => (&mut &*stream).write(bytes),
        }
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&mut &*stream).write_vectored(bytes),
            Stream::Tcp(stream) => (&mut &*stream).write_vectored(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection's stream, on its queue.
pub struct Transport {
    stream: Stream,
    queue: Queue,
    tls: RefCell<Option<Session>>,
    /// The last receive took all bytes, so the next one is not tried before the socket is readable.
    drained: Cell<bool>,
    polling: Polling,
}

impl Transport {
    pub fn new(stream: Stream, queue: Queue) -> Self {
        Transport {
            polling: Polling::new(queue.options().poll),
            stream,
            queue,
            tls: RefCell::new(None),
            drained: Cell::new(false),
        }
    }

    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Enlarges the send buffer of a unix socket: a large reply is otherwise sent in pieces, each
    /// of which waits for the client. Failures are ignored.
    pub fn enlarge_send_buffer(&self) {
        let Stream::Unix(stream) = &self.stream else {
            return;
        };
        let (fd, option) = (stream.as_raw_fd(), (libc::SOL_SOCKET, libc::SO_SNDBUF));
        let (bytes, mut now) = (SEND_BUFFER, 0);
        let mut length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: SO_SNDBUF has an int as value, and both ints outlive the calls.
        unsafe {
            libc::getsockopt(fd, option.0, option.1, (&raw mut now).cast(), &mut length);
            // The kernel reports twice the requested size.
            if now < 2 * bytes {
                libc::setsockopt(fd, option.0, option.1, (&raw const bytes).cast(), length);
            }
        }
    }

    /// Starts TLS. Its handshake is part of the following reads.
    pub fn start_tls(&self, tls: &ServerTls) -> io::Result<()> {
        self.tls.replace(Some(Session::server(tls)?));
        Ok(())
    }

    /// Whether TLS has begun.
    pub fn is_tls(&self) -> bool {
        self.tls.borrow().is_some()
    }

    /// Shuts down receiving: reads return 0.
    pub fn stop_reading(&self) {
        self.stream.shutdown(Shutdown::Read);
    }

    /// Shuts the socket down.
    pub fn stop(&self) {
        self.stream.shutdown(Shutdown::Both);
    }

    /// Reads at least one byte, and 0 at the end. Waits if there is none.
    ///
    /// # Errors
    ///
    /// The connection failed, or TLS found a violation.
    pub async fn read(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if self.drained.replace(false) {
            self.wait().await?;
        }
        loop {
            match self.try_read(buffers) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                result => {
                    self.polling.found();
                    return result;
                }
            }
            // A client may wait for our part of the TLS handshake.
            self.flush().await?;
            self.wait().await?;
        }
    }

    /// Waits until the socket may be readable: for the queue's next round if `polling` decides so,
    /// else for the descriptor.
    async fn wait(&self) -> io::Result<()> {
        if !self.polling.polls_again() {
            return self.queue.readable(&self.stream).await;
        }
        yield_once().await;
        Ok(())
    }

    /// Fills `buffer`.
    ///
    /// # Errors
    ///
    /// As [`Transport::read`]; `UnexpectedEof` if the connection ends before.
    pub async fn read_exact(&self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.read(&mut [IoSliceMut::new(buffer)]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => buffer = &mut buffer[n..],
            }
        }
        Ok(())
    }

    fn try_read(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut tls = self.tls.borrow_mut();
        let Some(tls) = tls.as_mut() else {
            let received = (&self.stream).read_vectored(buffers)?;
            let room: usize = buffers.iter().map(|buffer| buffer.len()).sum();
            self.drained.set(received > 0 && received < room);
            return Ok(received);
        };
        for _ in 0..MAX_ROUNDS {
            match tls.read(buffers) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            let received = tls.read_tls(&mut &self.stream)?;
            if let Err(e) = tls.process() {
                // Sends the alert, if there is space for it.
                let _ = tls.write_tls(&mut &self.stream);
                return Err(e);
            }
            if received == 0 && tls.is_handshaking() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            while tls.wants_write() {
                match tls.write_tls(&mut &self.stream) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    result => result?,
                };
            }
        }
        // Lets other tasks run before it receives more.
        tls.read(buffers)
    }

    /// Writes at least one byte. Waits if there is no space.
    ///
    /// # Errors
    ///
    /// The connection failed.
    pub async fn write(&self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            match self.try_write(bytes) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                result => {
                    self.polling.found();
                    return result;
                }
            }
            self.queue.writable(&self.stream).await?;
        }
    }

    /// Writes all bytes, and waits until they are in the socket.
    ///
    /// # Errors
    ///
    /// The connection failed.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = self.write(&[IoSlice::new(bytes)]).await?;
            bytes = &bytes[n..];
        }
        self.flush().await
    }

    fn try_write(&self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut tls = self.tls.borrow_mut();
        let Some(tls) = tls.as_mut() else {
            return (&self.stream).write_vectored(bytes);
        };
        // Bytes that TLS holds are sent first, so that they do not accumulate.
        while tls.wants_write() {
            tls.write_tls(&mut &self.stream)?;
        }
        let n = tls.write(bytes)?;
        while tls.wants_write() {
            match tls.write_tls(&mut &self.stream) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                result => result?,
            };
        }
        Ok(n)
    }

    /// Waits until the bytes that TLS holds are in the socket.
    ///
    /// # Errors
    ///
    /// The connection failed.
    pub async fn flush(&self) -> io::Result<()> {
        loop {
            let wait = match &mut *self.tls.borrow_mut() {
                Some(tls) if tls.wants_write() => match tls.write_tls(&mut &self.stream) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => true,
                    Err(e) => return Err(e),
                    Ok(_) => false,
                },
                _ => return Ok(()),
            };
            if wait {
                self.queue.writable(&self.stream).await?;
            }
        }
    }

    /// Sends TLS's close_notify if there is space for it, and shuts the socket down.
    pub fn close(&self) {
        if let Some(tls) = self.tls.borrow_mut().as_mut() {
            tls.send_close_notify();
            let _ = tls.write_tls(&mut &self.stream);
        }
        self.stop();
    }

    /// Runs `future`. When `stop` is readable it stops receiving, and `patience` later it shuts the
    /// socket down.
    pub async fn until_stopped<F: Future>(
        &self,
        stop: &UnixStream,
        patience: std::time::Duration,
        future: F,
    ) -> F::Output {
        let stopping = async {
            let _ = self.queue.readable(stop).await;
            self.stop_reading();
            let _ = self.queue.sleep(patience).await;
            self.stop();
            std::future::pending::<()>().await
        };
        match crate::race::race(future, stopping).await {
            crate::race::First::A(output) => output,
            crate::race::First::B(()) => unreachable!("it is never ready"),
        }
    }
}
