//! A server of one document over HTTP/1, for clients that may be slow or hostile.
//!
//! One thread serves all: each connection has one request and a time limit. When there are too
//! many, the oldest gives way to the next.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zebu_nbd::Listener;

/// Connections at a time at most.
const MAX_CONNECTIONS: usize = 64;
/// Bytes of a request's head at most.
const MAX_HEAD: usize = 8 << 10;
/// How long a connection may last.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an answered client may take to close the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// After a failed accept, mostly for want of descriptors, none is tried for this long.
const PAUSE: Duration = Duration::from_millis(100);
/// Errors of accept(2) that concern one client.
const GONE: [ErrorKind; 3] = [
    ErrorKind::WouldBlock,
    ErrorKind::Interrupted,
    ErrorKind::ConnectionAborted,
];
/// A document is made anew when it is older: this bounds the work and the memory for many clients.
const SAMPLE_LIFETIME: Duration = Duration::from_millis(50);

/// Media type of Prometheus's text format.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Serves `document` at `/metrics` until `stop` is readable.
pub fn serve(listeners: &[Listener], stop: &UnixStream, document: impl Fn() -> String) {
    let mut server = Server {
        connections: VecDeque::new(),
        paused_until: None,
        last: None,
        document,
    };
    while !server.turn(listeners, stop) {}
}

struct Server<D> {
    /// The oldest first.
    connections: VecDeque<Connection>,
    /// No connections are accepted until then.
    paused_until: Option<Instant>,
    last: Option<(Instant, Rc<str>)>,
    document: D,
}

/// The connection of a client.
struct Connection {
    /// A unix or TCP socket: the calls are the same.
    socket: UnixStream,
    deadline: Instant,
    state: State,
}

enum State {
    /// The request has arrived so far.
    Receiving(Vec<u8>),
    Sending(Answer),
    /// All is sent. What the client still sends is dropped: closing the socket before it is read
    /// would make the kernel drop the answer, too.
    Lingering,
}

/// What is sent.
struct Answer {
    head: String,
    body: Rc<str>,
    sent: usize,
}

impl<D: Fn() -> String> Server<D> {
    /// Waits for something to do, and does it. True: the end.
    fn turn(&mut self, listeners: &[Listener], stop: &UnixStream) -> bool {
        let now = Instant::now();
        self.paused_until = self.paused_until.filter(|until| *until > now);
        let accepting = match self.paused_until {
            None => listeners,
            Some(_) => &[],
        };
        let ready = match self.wait(accepting, stop, now) {
            Ok(ready) => ready,
            Err(e) => {
                tracing::error!("metrics end: {}", zebu::strerror(&e));
                return true;
            }
        };
        if ready[0] {
            return true;
        }
        let now = Instant::now();
        let (listening, connected) = ready[1..].split_at(accepting.len());
        let ready = connected.iter().copied();
        let all = std::mem::take(&mut self.connections);
        for (mut connection, is_ready) in all.into_iter().zip(ready) {
            let stays = connection.deadline > now
                && (!is_ready
                    || connection
                        .advance(now, || self.document(now))
                        .unwrap_or(false));
            if stays {
                self.connections.push_back(connection);
            }
        }
        for (listener, _) in accepting.iter().zip(listening).filter(|(_, ready)| **ready) {
            self.accept(listener, now);
        }
        false
    }

    /// Which are ready: `stop`, the listeners, the connections.
    fn wait(
        &self,
        listeners: &[Listener],
        stop: &UnixStream,
        now: Instant,
    ) -> io::Result<Vec<bool>> {
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        fds.extend(listeners.iter().map(|l| PollFd::new(l, PollFlags::IN)));
        for connection in &self.connections {
            let flags = match connection.state {
                State::Sending(_) => PollFlags::OUT,
                _ => PollFlags::IN,
            };
            fds.push(PollFd::new(&connection.socket, flags));
        }
        let deadlines = self.connections.iter().map(|c| c.deadline);
        let until = deadlines.chain(self.paused_until).min();
        let timeout = until.map(|until| {
            let rest = until.saturating_duration_since(now);
            Timespec::try_from(rest).unwrap_or_default()
        });
        match poll(&mut fds, timeout.as_ref()) {
            Err(e) if e != rustix::io::Errno::INTR => return Err(e.into()),
            _ => {}
        }
        Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    /// Accepts a connection that waits.
    fn accept(&mut self, listener: &Listener, now: Instant) {
        let accepted = match listener {
            Listener::Unix(listener, _) => listener.accept().map(|(socket, _)| socket),
            Listener::Tcp(listener) => listener
                .accept()
                .map(|(socket, _)| UnixStream::from(OwnedFd::from(socket))),
        };
        match accepted.and_then(|socket| socket.set_nonblocking(true).map(|()| socket)) {
            Ok(socket) => {
                if self.connections.len() == MAX_CONNECTIONS {
                    self.connections.pop_front();
                }
                self.connections.push_back(Connection {
                    socket,
                    deadline: now + CONNECTION_TIMEOUT,
                    state: State::Receiving(Vec::new()),
                });
            }
            // The client has gone already.
            Err(e) if GONE.contains(&e.kind()) => {}
            // The listener stays readable.
            Err(_) => self.paused_until = Some(now + PAUSE),
        }
    }

    fn document(&mut self, now: Instant) -> Rc<str> {
        match &self.last {
            Some((made, text)) if now.saturating_duration_since(*made) < SAMPLE_LIFETIME => {
                text.clone()
            }
            _ => {
                let text: Rc<str> = (self.document)().into();
                self.last = Some((now, text.clone()));
                text
            }
        }
    }
}

impl Connection {
    /// Goes on as far as it can without waiting. False: it has ended.
    fn advance(&mut self, now: Instant, document: impl FnMut() -> Rc<str>) -> io::Result<bool> {
        match self.step(now, document) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(true),
            other => other,
        }
    }

    fn step(&mut self, now: Instant, mut document: impl FnMut() -> Rc<str>) -> io::Result<bool> {
        match &mut self.state {
            State::Receiving(head) => {
                let mut bytes = [0; 2048];
                let n = self.socket.read(&mut bytes)?;
                head.extend(&bytes[..n]);
                let answer = match head_of(head) {
                    Some(head) => answer(head, &mut document),
                    None if head.len() >= MAX_HEAD => {
                        Answer::error("431 Request Header Fields Too Large")
                    }
                    None => return Ok(n > 0),
                };
                self.state = State::Sending(answer);
                Ok(true)
            }
            State::Sending(answer) => {
                let rest = answer.rest();
                let n = self.socket.write(rest)?;
                answer.sent += n;
                if answer.rest().is_empty() {
                    self.socket.shutdown(Shutdown::Write)?;
                    self.state = State::Lingering;
                    self.deadline = self.deadline.min(now + CLOSE_TIMEOUT);
                }
                Ok(n > 0)
            }
            State::Lingering => Ok(self.socket.read(&mut [0; 2048])? > 0),
        }
    }
}

/// The head of a request without the empty line, if that has arrived.
fn head_of(bytes: &[u8]) -> Option<&[u8]> {
    let ends = |end: &[u8]| bytes.windows(end.len()).position(|window| window == end);
    let end = [ends(b"\r\n\r\n"), ends(b"\n\n")];
    end.into_iter().flatten().min().map(|end| &bytes[..end])
}

/// The path in the target of a request, which may be an absolute URL (RFC 9112, section 3.2.2); None: it is
/// neither.
fn path(target: &[u8]) -> Option<&[u8]> {
    let end = target.iter().position(|b| *b == b'?');
    let target = &target[..end.unwrap_or(target.len())];
    let scheme = b"http://";
    match target.get(..scheme.len()) {
        Some(start) if start.eq_ignore_ascii_case(scheme) => {
            let rest = &target[scheme.len()..];
            let host = rest.iter().position(|b| *b == b'/').unwrap_or(rest.len());
            let path: &[u8] = if host < rest.len() {
                &rest[host..]
            } else {
                b"/"
            };
            (host > 0).then_some(path)
        }
        _ => Some(target),
    }
}

fn answer(head: &[u8], document: impl FnOnce() -> Rc<str>) -> Answer {
    let line = head.split(|b| *b == b'\n').next().unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut words = line.split(|b| *b == b' ');
    let [Some(method), Some(target), Some(version), None] =
        [words.next(), words.next(), words.next(), words.next()]
    else {
        return Answer::error("400 Bad Request");
    };
    if !version.starts_with(b"HTTP/1.") {
        return Answer::error("505 HTTP Version Not Supported");
    }
    let Some(path) = path(target) else {
        return Answer::error("400 Bad Request");
    };
    let answer = match (method, path) {
        (b"GET" | b"HEAD", b"/metrics") => Answer::new("200 OK", METRICS_TYPE, document()),
        (b"GET" | b"HEAD", b"/") => Answer::new(
            "200 OK",
            "text/plain",
            "The metrics are at /metrics.\n".into(),
        ),
        (b"GET" | b"HEAD", _) => Answer::error("404 Not Found"),
        _ => Answer::error("405 Method Not Allowed\r\nAllow: GET, HEAD"),
    };
    match method {
        b"HEAD" => Answer {
            body: "".into(),
            ..answer
        },
        _ => answer,
    }
}

impl Answer {
    fn new(status: &str, media_type: &str, body: Rc<str>) -> Self {
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n",
            body.len()
        );
        Answer {
            head,
            body,
            sent: 0,
        }
    }

    /// `status` may be followed by header fields.
    fn error(status: &str) -> Self {
        let line = status.split("\r\n").next().unwrap_or_default();
        Answer::new(status, "text/plain", format!("{line}\n").into())
    }

    /// A part of what is not sent yet; empty if all is.
    fn rest(&self) -> &[u8] {
        match self.head.as_bytes().get(self.sent..) {
            Some(rest) if !rest.is_empty() => rest,
            _ => &self.body.as_bytes()[self.sent - self.head.len()..],
        }
    }
}
