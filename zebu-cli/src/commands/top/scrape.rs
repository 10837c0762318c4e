//! Asks a server for its metrics, over HTTP. The server is not trusted: the answer has limits.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use zebu::internal::addresses;

use crate::arguments::metrics_address::MetricsAddress;

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of an answer at most.
const MAX_BYTES: usize = 16 << 20;
/// Bytes of its head at most.
const MAX_HEAD: usize = 16 << 10;

/// The metrics at `address`.
///
/// # Errors
///
/// A text for the user that says why there are none.
pub fn fetch(address: &MetricsAddress) -> Result<String, String> {
    let deadline = Instant::now() + TIMEOUT;
    let answer = match address {
        MetricsAddress::Unix(path) => unix(path)
            .and_then(|socket| ask(socket, "localhost", deadline, UnixStream::set_read_timeout)),
        MetricsAddress::Tcp(host, port) => tcp(host, *port, deadline).and_then(|socket| {
            let authority = format!("{host}:{port}");
            ask(socket, &authority, deadline, TcpStream::set_read_timeout)
        }),
    };
    body(&answer.map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it does not answer".into(),
        _ => zebu::strerror(&e).to_string(),
    })?)
}

fn unix(path: &std::ffi::OsStr) -> io::Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // The time limit of connect as well.
    set_socket_timeout(&socket, Timeout::Send, Some(TIMEOUT))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

fn tcp(host: &str, port: u16, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses(host, port)? {
        match TcpStream::connect_timeout(&address, rest(deadline)?) {
            Ok(socket) => {
                socket.set_write_timeout(Some(TIMEOUT))?;
                return Ok(socket);
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn rest(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        rest => Ok(rest),
    }
}

/// All that the server answers.
fn ask<S: Read + Write>(
    mut socket: S,
    authority: &str,
    deadline: Instant,
    set_timeout: fn(&S, Option<Duration>) -> io::Result<()>,
) -> io::Result<Vec<u8>> {
    // With this version the body ends with the connection, and has no chunks.
    let request =
        format!("GET /metrics HTTP/1.0\r\nHost: {authority}\r\nAccept: text/plain\r\n\r\n");
    socket.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        set_timeout(&socket, Some(rest(deadline)?))?;
        match socket.read(&mut buffer) {
            Ok(0) => return Ok(answer),
            Ok(n) if answer.len() + n > MAX_BYTES => {
                return Err(io::Error::other("its answer is too long"));
            }
            Ok(n) => answer.extend(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// The body of an answer that is a success.
fn body(answer: &[u8]) -> Result<String, String> {
    let no_http = || "the answer is not HTTP".to_string();
    let start = &answer[..answer.len().min(MAX_HEAD)];
    let end = start.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.ok_or_else(no_http)?;
    let head = std::str::from_utf8(&answer[..end]).map_err(|_| no_http())?;
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().splitn(3, ' ');
    match (words.next(), words.next()) {
        (Some(version), Some("200")) if version.starts_with("HTTP/1.") => {}
        (Some(version), Some(status)) if version.starts_with("HTTP/1.") => {
            let status: String = status
                .chars()
                .filter(char::is_ascii_digit)
                .take(3)
                .collect();
            return Err(format!("its answer has the HTTP status {status}"));
        }
        _ => return Err(no_http()),
    }
    let body = &answer[end + 4..];
    for line in lines {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        if name.eq_ignore_ascii_case("content-length")
            && value
                .trim()
                .parse::<usize>()
                .is_ok_and(|length| length > body.len())
        {
            return Err("its answer is cut off".into());
        }
    }
    Ok(String::from_utf8_lossy(body).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        let good = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
        assert_eq!(body(good), Ok("abc".into()));
        for length in 0..good.len() {
            assert!(body(&good[..length]).is_err(), "{length}");
        }
        assert!(
            body(b"HTTP/1.1 404 Not Found\r\n\r\n")
                .unwrap_err()
                .contains("404")
        );
        assert!(body(b"SSH-2.0-OpenSSH\r\n\r\n").is_err());
        assert!(body(&[b'a'; 1 << 20]).is_err());
    }
}
