//! Where clients come from: unix sockets, TCP, and sockets that systemd made.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::transport::Stream;

/// The first descriptor that systemd passes: `SD_LISTEN_FDS_START`.
const FIRST_PASSED: i32 = 3;

/// A socket that clients connect to.
#[derive(Debug)]
pub enum Listener {
    /// A unix socket; the path, if it is ours to remove.
    Unix(UnixListener, Option<PathBuf>),
    /// TCP.
    Tcp(TcpListener),
}

impl Listener {
    /// A unix socket at `path`. An existing one without a listener
    /// is replaced; it is removed when this is dropped.
    pub fn unix(path: &Path) -> io::Result<Self> {
        let bound = match UnixListener::bind(path) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_left_over(path) => {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)
            }
            bound => bound,
        };
        let listener = bound?;
        listener.set_nonblocking(true)?;
        Ok(Listener::Unix(listener, Some(path.into())))
    }

    /// A TCP socket for each address of `host`.
    pub fn tcp(host: &str, port: u16) -> io::Result<Vec<Self>> {
        let listen = |address| {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            Ok(Listener::Tcp(listener))
        };
        (host, port).to_socket_addrs()?.map(listen).collect()
    }

    /// The sockets that were passed to this process (`sd_listen_fds(3)`):
    /// none, if `LISTEN_PID` is not this process. Called once, before anything
    /// else uses descriptors from 3 on.
    pub fn passed() -> io::Result<Vec<Self>> {
        let number = |name| {
            let value = std::env::var(name).ok();
            value.and_then(|value| value.parse::<u32>().ok())
        };
        if number("LISTEN_PID") != Some(std::process::id()) {
            return Ok(Vec::new());
        }
        let count = number("LISTEN_FDS").unwrap_or(0).min(1024) as i32;
        (FIRST_PASSED..FIRST_PASSED + count)
            .map(|fd| {
                // SAFETY: it only asks whether the descriptor is open; and
                // makes it one that children do not get.
                if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
                    return Err(io::Error::last_os_error());
                }
                // SAFETY: the parent process passes the descriptor to this process only.
                Self::from_passed(unsafe { OwnedFd::from_raw_fd(fd) })
            })
            .collect()
    }

    fn from_passed(fd: OwnedFd) -> io::Result<Self> {
        // A unix listener says no address of TCP, and the other way round.
        let tcp = TcpListener::from(fd);
        if tcp.local_addr().is_ok() {
            tcp.set_nonblocking(true)?;
            return Ok(Listener::Tcp(tcp));
        }
        let unix = UnixListener::from(OwnedFd::from(tcp));
        unix.local_addr()?;
        unix.set_nonblocking(true)?;
        Ok(Listener::Unix(unix, None))
    }

    /// The next client and its name; `WouldBlock` if there is none.
    pub(crate) fn accept(&self) -> io::Result<(Stream, String)> {
        match self {
            Listener::Unix(listener, _) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok((Stream::Unix(stream), "a local client".into()))
            }
            Listener::Tcp(listener) => {
                let (stream, address) = listener.accept()?;
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                Ok((Stream::Tcp(stream), address.to_string()))
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener, _) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listener::Unix(_, Some(path)) => write!(f, "{}", path.display()),
            Listener::Unix(_, None) => write!(f, "a unix socket that was passed"),
            Listener::Tcp(listener) => match listener.local_addr() {
                Ok(address) => write!(f, "{address}"),
                Err(_) => write!(f, "TCP"),
            },
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, Some(path)) = self {
            // Gone already is as good.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Whether there is a socket without a listener.
fn is_left_over(path: &Path) -> bool {
    let is_socket = |file: std::fs::Metadata| file.file_type().is_socket();
    let refused = || {
        let connected = UnixStream::connect(path);
        connected.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
    };
    std::fs::symlink_metadata(path).is_ok_and(is_socket) && refused()
}
