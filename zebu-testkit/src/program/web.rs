//! A web server that misbehaves as a test says, and the images that it serves.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use super::{Lab, Rng};

/// `x.raw` with data and holes in `size`, the same as `x.qcow2`.
pub fn images(size: u64) -> Lab {
    let lab = Lab::new();
    let mut rng = Rng::new(size);
    let mut bytes = vec![0; size as usize];
    for chunk in bytes.chunks_mut(192 << 10) {
        if rng.one_in(4) {
            continue;
        }
        for word in chunk.chunks_exact_mut(8) {
            word.copy_from_slice(&rng.next().to_le_bytes());
        }
    }
    fs::write(lab.path("x.raw"), bytes).unwrap();
    lab.make("img convert -f raw -O qcow2 x.raw x.qcow2");
    lab
}

/// A server with a file of the lab.
pub fn served(lab: &Lab, file: &str, behaviour: Behaviour) -> Web {
    Web::new(&lab.path(file), behaviour)
}

/// What the server does.
#[derive(Clone)]
pub struct Behaviour {
    /// It has ranges.
    pub ranges: bool,
    /// It says the length of what it sends.
    pub length: bool,
    /// Each answer begins so much later.
    pub delay: Duration,
    /// One answer in so many is cut off in the middle of its body. 0: none.
    pub cut: u64,
    /// One answer in so many is 503, with `Retry-After: 0`, or 429. 0: none.
    pub busy: u64,
    /// The value of the header `Authorization` that it wants.
    pub authorization: Option<String>,
    /// The value of the header `Cookie` that it wants.
    pub cookie: Option<String>,
    /// Where it redirects to.
    pub redirect: Option<String>,
    pub etag: Option<String>,
    pub modified: Option<String>,
    /// So many answers more have neither an ETag nor a date.
    pub silent: u64,
    /// Another status instead of the object.
    pub status: Option<u16>,
    /// It answers a request with a condition with everything.
    pub bad_conditions: bool,
    /// It sends nothing more after so many bytes of a body. 0: it sends all.
    pub stalls_after: u64,
    /// Another header.
    pub header: Option<String>,
}

impl Default for Behaviour {
    fn default() -> Self {
        Behaviour {
            ranges: true,
            length: true,
            delay: Duration::ZERO,
            cut: 0,
            busy: 0,
            authorization: None,
            cookie: None,
            redirect: None,
            etag: Some("\"first\"".into()),
            modified: Some("Mon, 02 Jan 2023 03:04:05 GMT".into()),
            silent: 0,
            status: None,
            bad_conditions: false,
            stalls_after: 0,
            header: None,
        }
    }
}

/// A web server with one object, on a port of its own until the process ends.
pub struct Web {
    shared: Arc<Shared>,
    port: u16,
}

struct Shared {
    state: Mutex<State>,
    requests: AtomicU64,
    bytes: AtomicU64,
    connections: AtomicU64,
}

struct State {
    object: Arc<File>,
    behaviour: Behaviour,
    rng: Rng,
    /// The heads of all requests.
    heads: Vec<String>,
}

impl Web {
    /// Serves a file.
    pub fn new(object: &Path, behaviour: Behaviour) -> Web {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let port = listener.local_addr().expect("address").port();
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                object: Arc::new(File::open(object).expect("object")),
                behaviour,
                rng: Rng::new(1),
                heads: Vec::new(),
            }),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            connections: AtomicU64::new(0),
        });
        let own = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let shared = own.clone();
                shared.connections.fetch_add(1, Ordering::SeqCst);
                // An error ends this connection.
                thread::spawn(move || shared.serve(stream));
            }
        });
        Web { shared, port }
    }

    /// The URL of the object.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/object", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Changes what the server does from now on.
    pub fn change(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.shared.state().behaviour);
    }

    /// Serves another file from now on.
    pub fn replace(&self, object: &Path) {
        self.shared.state().object = Arc::new(File::open(object).expect("object"));
    }

    /// Serves another file with another ETag from now on.
    pub fn publish(&self, object: &Path, etag: &str) {
        let mut state = self.shared.state();
        state.object = Arc::new(File::open(object).expect("object"));
        state.behaviour.etag = Some(etag.into());
    }

    /// How many requests there were.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// How many bytes of bodies were sent.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::SeqCst)
    }

    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// The heads of all requests.
    pub fn heads(&self) -> Vec<String> {
        self.shared.state().heads.clone()
    }
}

/// An answer that has been decided.
struct Answer {
    head: String,
    object: Arc<File>,
    from: u64,
    /// Bytes of the body that are sent.
    length: u64,
    is_complete: bool,
    stalls: bool,
    delay: Duration,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn serve(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut stream = stream;
        loop {
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                if reader.read_line(&mut head)? == 0 {
                    return Ok(());
                }
            }
            self.requests.fetch_add(1, Ordering::SeqCst);
            let answer = self.answer(head);
            thread::sleep(answer.delay);
            stream.write_all(answer.head.as_bytes())?;
            let mut buffer = vec![0; 256 << 10];
            let mut sent = 0;
            while sent < answer.length {
                let part = (answer.length - sent).min(buffer.len() as u64) as usize;
                let at = answer.from + sent;
                answer.object.read_exact_at(&mut buffer[..part], at)?;
                stream.write_all(&buffer[..part])?;
                sent += part as u64;
                self.bytes.fetch_add(part as u64, Ordering::SeqCst);
            }
            if answer.stalls {
                thread::sleep(super::TIME_LIMIT);
            }
            if !answer.is_complete {
                return Ok(());
            }
        }
    }

    fn answer(&self, head: String) -> Answer {
        let mut state = self.state();
        let state = &mut *state;
        let behaviour = &state.behaviour;
        let header = |name: &str| {
            let mut lines = head.lines().skip(1);
            lines.find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name)
                    .then(|| value.trim().to_string())
            })
        };
        let size = state.object.metadata().expect("metadata").len();
        let mut answer = Answer {
            head: String::new(),
            object: state.object.clone(),
            from: 0,
            length: 0,
            is_complete: true,
            stalls: false,
            delay: behaviour.delay,
        };
        let mut one_in = |n: u64| n > 0 && state.rng.one_in(n);
        let refused = |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        let differs = |wanted: &Option<String>, name| wanted.is_some() && header(name) != *wanted;
        answer.head = if let Some(place) = &behaviour.redirect {
            format!("HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n")
        } else if differs(&behaviour.authorization, "authorization")
            || differs(&behaviour.cookie, "cookie")
        {
            refused("401 Unauthorized")
        } else if let Some(status) = behaviour.status {
            refused(&format!("{status} As It Is"))
        } else if header("if-match").is_some() && header("if-match") != behaviour.etag {
            refused("412 Precondition Failed")
        } else if one_in(behaviour.busy) {
            match one_in(2) {
                true => refused("503 Service Unavailable\r\nRetry-After: 0"),
                false => refused("429 Too Many Requests"),
            }
        } else {
            let condition = header("if-range");
            let holds = condition.as_ref().is_none_or(|condition| {
                let known = [&behaviour.etag, &behaviour.modified];
                !behaviour.bad_conditions && known.contains(&&Some(condition.clone()))
            });
            let range = header("range").filter(|_| behaviour.ranges && holds);
            let range = range.and_then(|range| parse_range(&range));
            let mut head = String::new();
            match range {
                Some((first, _)) if first >= size => {
                    head += "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n";
                    head += &format!("Content-Range: bytes */{size}\r\n");
                }
                Some((first, last)) => {
                    let last = last.min(size - 1);
                    (answer.from, answer.length) = (first, last + 1 - first);
                    head += "HTTP/1.1 206 Partial Content\r\n";
                    head += &format!("Content-Range: bytes {first}-{last}/{size}\r\n");
                    head += &format!("Content-Length: {}\r\n", answer.length);
                }
                None => {
                    answer.length = size;
                    head += "HTTP/1.1 200 OK\r\n";
                    if behaviour.length {
                        head += &format!("Content-Length: {size}\r\n");
                    } else {
                        head += "Connection: close\r\n";
                        answer.is_complete = false;
                    }
                }
            }
            let is_silent = behaviour.silent > 0;
            for (name, value) in [
                ("ETag", &behaviour.etag),
                ("Last-Modified", &behaviour.modified),
            ] {
                if let Some(value) = value.as_ref().filter(|_| !is_silent) {
                    head += &format!("{name}: {value}\r\n");
                }
            }
            if behaviour.ranges {
                head += "Accept-Ranges: bytes\r\n";
            }
            if let Some(header) = &behaviour.header {
                head += &format!("{header}\r\n");
            }
            if one_in(behaviour.cut) && answer.length > 0 {
                answer.length = state.rng.below(answer.length);
                answer.is_complete = false;
            }
            if behaviour.stalls_after > 0 && behaviour.stalls_after < answer.length {
                answer.length = behaviour.stalls_after;
                answer.stalls = true;
            }
            head + "\r\n"
        };
        if head.starts_with("HEAD ") {
            answer.length = 0;
        }
        let left = &mut state.behaviour.silent;
        *left = left.saturating_sub(1);
        state.heads.push(head);
        answer
    }
}

/// `bytes=0-99`
fn parse_range(range: &str) -> Option<(u64, u64)> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    Some((first.parse().ok()?, last.parse().ok()?))
}
