//! The bytes of one connection: a socket that never blocks, and TLS over it.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::task::Poll;

use zebu::internal::Polling;
use zebu::internal::Session;
use zebu::storage::Queue;
use zebu::tls::ServerTls;

/// How often TLS receives at a time if there is nothing in it for us: a client
/// may send such records without an end.
const MAX_ROUNDS: usize = 16;

/// Bytes that a unix socket is asked to take before the client has received them (socket(7),
/// unix(7)); 208 KiB are usual.
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
        // A peer that is gone needs no shutdown.
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

/// One connection's bytes, on its queue.
pub struct Transport {
    stream: Stream,
    queue: Queue,
    tls: RefCell<Option<Session>>,
    /// The last receive took all that there was: the next one would find
    /// nothing, and need not be tried before there is something.
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

    /// Enlarges the buffer of a unix socket for large replies, which otherwise go in pieces, each of
    /// which waits until the client's thread runs. TCP finds its own size. A smaller buffer is slower, not
    /// wrong.
    pub fn enlarge_send_buffer(&self) {
        let Stream::Unix(stream) = &self.stream else {
            return;
        };
        let (fd, option) = (stream.as_raw_fd(), (libc::SOL_SOCKET, libc::SO_SNDBUF));
        let (bytes, mut now) = (SEND_BUFFER, 0);
        let mut length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the values are ints, as SO_SNDBUF has them, and are there during the calls.
        unsafe {
            libc::getsockopt(fd, option.0, option.1, (&raw mut now).cast(), &mut length);
            // It says twice what was asked for.
            if now < 2 * bytes {
                libc::setsockopt(fd, option.0, option.1, (&raw const bytes).cast(), length);
            }
        }
    }

    /// From here on all is TLS; its handshake is part of the next reads.
    pub fn start_tls(&self, tls: &ServerTls) -> io::Result<()> {
        self.tls.replace(Some(Session::server(tls)?));
        Ok(())
    }

    /// Whether TLS has begun.
    pub fn is_tls(&self) -> bool {
        self.tls.borrow().is_some()
    }

    /// No more is received: reads find the end.
    pub fn stop_reading(&self) {
        self.stream.shutdown(Shutdown::Read);
    }

    /// Ends everything.
    pub fn stop(&self) {
        self.stream.shutdown(Shutdown::Both);
    }

    /// Reads what is there, at least a byte; 0 at the end. Waits if need be.
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
            // A client that waits for our part of the handshake sends nothing.
            self.flush().await?;
            self.wait().await?;
        }
    }

    /// Waits until there may be something to receive. It is soon if `polling`
    /// says so, after what else the queue has to do.
    async fn wait(&self) -> io::Result<()> {
        if !self.polling.looks_again() {
            return self.queue.readable(&self.stream).await;
        }
        let mut waited = false;
        poll_fn(|context| {
            if std::mem::replace(&mut waited, true) {
                return Poll::Ready(Ok(()));
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }

    /// Fills `buffer`; an end before that is an error.
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
                // The alert with the reason, if there is space for it.
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
        // Others have their turn before there is more.
        tls.read(buffers)
    }

    /// Writes some of the bytes, at least one. Waits if need be.
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
        // Nothing new before the old is gone, so that it does not gather.
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

    /// Waits until what TLS holds back is in the socket.
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

    /// Sends TLS's close_notify, if there is space for it.
    pub fn close(&self) {
        if let Some(tls) = self.tls.borrow_mut().as_mut() {
            tls.send_close_notify();
            let _ = tls.write_tls(&mut &self.stream);
        }
        self.stop();
    }

    /// Runs `future`, and when `stop` is readable, stops reading; after
    /// `patience` more, stops everything.
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
