//! Listening sockets: unix, TCP, and those that systemd passes.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use zebu::internal::addresses;

use crate::transport::Stream;

/// The first descriptor that systemd passes: `SD_LISTEN_FDS_START`.
const FIRST_PASSED: i32 = 3;

/// The name of a unix socket that this process made.
#[derive(Debug)]
pub struct OwnPath {
    path: PathBuf,
    /// Device and inode.
    identity: Option<(u64, u64)>,
}

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    /// A unix socket, and its path if it is to be removed.
    Unix(UnixListener, Option<OwnPath>),
    /// A TCP socket.
    Tcp(TcpListener),
}

impl Listener {
    /// Listens on a unix socket at `path`, which is removed when this is dropped. A socket there
    /// that has no listener is replaced.
    ///
    /// # Errors
    ///
    /// The path is in use, or the socket cannot be created.
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
        let identity = identity(path);
        let path = path.into();
        Ok(Listener::Unix(listener, Some(OwnPath { path, identity })))
    }

    /// Listens on TCP, on each address of `host` that this machine has.
    ///
    /// # Errors
    ///
    /// The machine has none of them, or one is in use.
    pub fn tcp(host: &str, port: u16) -> io::Result<Vec<Self>> {
        Self::on(addresses(host, port)?)
    }

    fn on(addresses: impl IntoIterator<Item = SocketAddr>) -> io::Result<Vec<Self>> {
        let (mut listeners, mut missing) = (Vec::new(), io::ErrorKind::NotFound.into());
        for address in addresses {
            match TcpListener::bind(address) {
                Ok(listener) => {
                    listener.set_nonblocking(true)?;
                    listeners.push(Listener::Tcp(listener));
                }
                // `localhost` is ::1, too, where IPv6 is off.
                Err(e) if is_missing(&e) => missing = e,
                Err(e) => return Err(e),
            }
        }
        match listeners.is_empty() {
            true => Err(missing),
            false => Ok(listeners),
        }
    }

    /// The sockets that were passed to this process (`sd_listen_fds(3)`): none if `LISTEN_PID` is
    /// another process. Must be called once, before anything else opens descriptors from 3 on.
    ///
    /// # Errors
    ///
    /// A descriptor is not open, or not a listening socket.
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
                // SAFETY: `fcntl` takes any number, and fails if the descriptor is not open.
                if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
                    return Err(io::Error::last_os_error());
                }
                // SAFETY: the parent process passes the descriptor to this process only.
                Self::from_passed(unsafe { OwnedFd::from_raw_fd(fd) })
            })
            .collect()
    }

    fn from_passed(fd: OwnedFd) -> io::Result<Self> {
        // The local address of a unix socket is none of TCP, and the other way round.
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

    /// Accepts a client. Returns its address for messages.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if no client is waiting.
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
            Listener::Unix(_, Some(own)) => write!(f, "{}", own.path.display()),
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
        if let Listener::Unix(_, Some(own)) = self
            // What has this name now may be another's.
            && own.identity == identity(&own.path)
        {
            // The file may be gone already.
            let _ = std::fs::remove_file(&own.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let file = std::fs::symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

/// Whether this machine does not have the address.
fn is_missing(error: &io::Error) -> bool {
    let missing = [libc::EADDRNOTAVAIL, libc::EAFNOSUPPORT];
    error
        .raw_os_error()
        .is_some_and(|errno| missing.contains(&errno))
}

/// Whether the path is a socket without a listener.
fn is_left_over(path: &Path) -> bool {
    let is_socket = |file: std::fs::Metadata| file.file_type().is_socket();
    let refused = || {
        let connected = UnixStream::connect(path);
        connected.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
    };
    std::fs::symlink_metadata(path).is_ok_and(is_socket) && refused()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_other_machines_are_left_out() {
        let (own, other) = ("127.0.0.1:0", "203.0.113.1:0");
        let on = |list: &[&str]| Listener::on(list.iter().map(|text| text.parse().unwrap()));
        assert_eq!(on(&[other, own, other]).unwrap().len(), 1);
        assert_eq!(
            on(&[other]).unwrap_err().kind(),
            io::ErrorKind::AddrNotAvailable
        );
        assert!(on(&[]).is_err());
        let used = TcpListener::bind(own).unwrap().local_addr().unwrap();
        let _held = TcpListener::bind(used).unwrap();
        let busy = Listener::on([own.parse().unwrap(), used]);
        assert_eq!(busy.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
