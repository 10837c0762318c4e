//! An object store in memory, which understands what the three dialects ask for when an object is
//! uploaded or read, and misbehaves as a test says.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use super::Rng;

/// What the store does.
#[derive(Clone, Default)]
pub struct Faults {
    /// Each part is taken so much later.
    pub delay: Duration,
    /// One part in so many is answered with 503 or not at all. 0: none.
    pub busy: u64,
    /// The number of a part, from 1, that is answered with 403.
    pub refused: Option<usize>,
    /// What becomes of the next completions. Others succeed.
    pub completions: VecDeque<Completion>,
    /// No connection is served any more.
    pub dead: bool,
}

/// A completion that goes wrong.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The object is there nevertheless.
    pub takes_effect: bool,
    pub ending: Ending,
}

/// How a completion is answered.
#[derive(Clone, Copy, Debug)]
pub enum Ending {
    Status(u16),
    /// The connection ends without an answer.
    Cut,
    /// There is no answer.
    Hang,
}

/// A store on a port of its own until the process ends.
pub struct Store {
    state: Arc<Mutex<State>>,
    port: u16,
}

struct State {
    faults: Faults,
    rng: Rng,
    /// By bucket and key.
    objects: BTreeMap<String, Vec<u8>>,
    /// By their ids; with the object, and the parts by number or name.
    uploads: BTreeMap<String, (String, BTreeMap<String, Vec<u8>>)>,
    next: u64,
    lengths: Vec<usize>,
    completions: usize,
    at_once: usize,
    most_at_once: usize,
}

impl Store {
    pub fn new() -> Store {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let port = listener.local_addr().expect("address").port();
        let state = Arc::new(Mutex::new(State {
            faults: Faults::default(),
            rng: Rng::new(1),
            objects: BTreeMap::new(),
            uploads: BTreeMap::new(),
            next: 1,
            lengths: Vec::new(),
            completions: 0,
            at_once: 0,
            most_at_once: 0,
        }));
        let own = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let state = own.clone();
                // An error ends this connection.
                thread::spawn(move || serve(&state, &stream));
            }
        });
        Store { state, port }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn set(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    pub fn put(&self, name: &str, bytes: &[u8]) {
        self.lock().objects.insert(name.into(), bytes.into());
    }

    pub fn object(&self, name: &str) -> Option<Vec<u8>> {
        self.lock().objects.get(name).cloned()
    }

    /// How many uploads are neither completed nor aborted.
    pub fn uploads(&self) -> usize {
        self.lock().uploads.len()
    }

    /// The lengths of the parts that came, in any order, since the last call.
    pub fn part_lengths(&self) -> Vec<usize> {
        std::mem::take(&mut self.lock().lengths)
    }

    /// How many completions came.
    pub fn completions(&self) -> usize {
        self.lock().completions
    }

    /// How many parts came at a time at most.
    pub fn most_at_once(&self) -> usize {
        self.lock().most_at_once
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// A request.
struct Request {
    method: String,
    /// Bucket and key.
    name: String,
    query: BTreeMap<String, String>,
    range: Option<(usize, usize)>,
    body: Vec<u8>,
}

fn serve(state: &Mutex<State>, stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    while let Some(request) = read(&mut reader)? {
        let faults = state.lock().unwrap().faults.clone();
        if faults.dead {
            return Ok(());
        }
        let is_part = request.query.contains_key("partNumber")
            || request.query.get("comp").is_some_and(|c| c == "block");
        if is_part {
            let mut state = state.lock().unwrap();
            state.at_once += 1;
            state.most_at_once = state.most_at_once.max(state.at_once);
            drop(state);
            thread::sleep(faults.delay);
        }
        let mut state = state.lock().unwrap();
        if is_part {
            state.at_once -= 1;
            if state.faults.dead || faults.busy > 0 && state.rng.one_in(faults.busy * 2) {
                return Ok(());
            }
            if faults.busy > 0 && state.rng.one_in(faults.busy * 2) {
                answer(stream, "503 Slow Down", "", &[])?;
                continue;
            }
        }
        let is_completion = request.method == "POST" && request.query.contains_key("uploadId")
            || request.query.get("comp").is_some_and(|c| c == "blocklist");
        let mut fault = None;
        if is_completion {
            state.completions += 1;
            fault = state.faults.completions.pop_front();
        }
        let reply = match fault {
            Some(fault) if !fault.takes_effect => None,
            _ => Some(state.handle(&request)),
        };
        drop(state);
        match (fault.map(|fault| fault.ending), reply) {
            (None, Some((status, headers, body))) => answer(stream, &status, &headers, &body)?,
            (Some(Ending::Status(status)), _) => {
                answer(stream, &format!("{status} As It Is"), "", &[])?;
            }
            (Some(Ending::Hang), _) => thread::sleep(super::TIME_LIMIT),
            _ => return Ok(()),
        }
    }
    Ok(())
}

fn read(reader: &mut BufReader<&TcpStream>) -> io::Result<Option<Request>> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(None);
        }
    }
    let header = |name: &str| {
        let mut lines = head.lines().skip(1).filter_map(|line| line.split_once(':'));
        lines.find_map(|(key, value)| key.eq_ignore_ascii_case(name).then(|| value.trim()))
    };
    let length = header("content-length").map_or(0, |text| text.parse().expect("a length"));
    let range = header("range").map(|text| {
        let (first, last) = text
            .strip_prefix("bytes=")
            .unwrap()
            .split_once('-')
            .unwrap();
        (first.parse().unwrap(), last.parse().unwrap())
    });
    let mut words = head.split_whitespace();
    let method = words.next().unwrap_or_default().to_string();
    let target = words.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let query = query.split('&').map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(key), decoded(value))
    });
    let (name, query) = (decoded(path.trim_start_matches('/')), query.collect());
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some(Request {
        method,
        name,
        query,
        range,
        body,
    }))
}

fn answer(mut stream: &TcpStream, status: &str, headers: &str, body: &[u8]) -> io::Result<()> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{headers}\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)
}

type Reply = (String, String, Vec<u8>);

impl State {
    fn handle(&mut self, request: &Request) -> Reply {
        let said = |status: &str| (status.to_string(), String::new(), Vec::new());
        let tag = format!(
            "ETag: \"{}\"\r\nLast-Modified: Mon, 02 Jan 2023 03:04:05 GMT\r\n",
            self.next
        );
        let query = |key: &str| request.query.get(key).map(String::as_str);
        match (&*request.method, query("uploadId"), query("comp")) {
            ("GET" | "HEAD", ..) => self.get(request),
            ("POST", None, _) if query("uploads").is_some() => {
                let id = format!("id{}", self.next);
                self.next += 1;
                self.uploads
                    .insert(id.clone(), (request.name.clone(), BTreeMap::new()));
                let xml = format!(
                    "<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key>\
                     <UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                );
                ("200 OK".into(), String::new(), xml.into())
            }
            ("PUT", Some(id), _) => {
                let number: usize = query("partNumber").unwrap_or("0").parse().unwrap();
                if self.faults.refused == Some(number) {
                    return said("403 Forbidden");
                }
                let Some((_, parts)) = self.uploads.get_mut(id) else {
                    return said("404 Not Found");
                };
                parts.insert(format!("{number:05}"), request.body.clone());
                self.lengths.push(request.body.len());
                ("200 OK".into(), tag, Vec::new())
            }
            ("POST", Some(id), _) => {
                let Some((name, parts)) = self.uploads.remove(id) else {
                    return said("404 Not Found");
                };
                self.objects
                    .insert(name, parts.into_values().collect::<Vec<_>>().concat());
                let xml = "<CompleteMultipartUploadResult><ETag>x</ETag>\
                           </CompleteMultipartUploadResult>";
                ("200 OK".into(), tag, xml.into())
            }
            ("DELETE", Some(id), _) => match self.uploads.remove(id) {
                Some(_) => said("204 No Content"),
                None => said("404 Not Found"),
            },
            ("PUT", None, Some("block")) => {
                if self.faults.refused.is_some() {
                    return said("403 Forbidden");
                }
                let id = query("blockid").unwrap_or_default().to_string();
                let of = self.uploads.entry(request.name.clone()).or_default();
                of.1.insert(id, request.body.clone());
                self.lengths.push(request.body.len());
                ("201 Created".into(), tag, Vec::new())
            }
            ("PUT", None, Some("blocklist")) => {
                let (_, blocks) = self.uploads.remove(&request.name).unwrap_or_default();
                let list = String::from_utf8_lossy(&request.body).into_owned();
                let ids = list.split('<').filter_map(|part| {
                    let (element, text) = part.split_once('>')?;
                    ["Uncommitted", "Latest"].contains(&element).then_some(text)
                });
                let parts: Option<Vec<_>> = ids.map(|id| blocks.get(id).cloned()).collect();
                let Some(parts) = parts else {
                    return said("400 InvalidBlockList");
                };
                self.objects.insert(request.name.clone(), parts.concat());
                ("201 Created".into(), tag, Vec::new())
            }
            ("PUT", None, _) => {
                self.objects
                    .insert(request.name.clone(), request.body.clone());
                ("200 OK".into(), tag, Vec::new())
            }
            _ => said("501 Not Implemented"),
        }
    }

    fn get(&self, request: &Request) -> Reply {
        let Some(object) = self.objects.get(&request.name) else {
            return ("404 Not Found".into(), String::new(), Vec::new());
        };
        let same = "ETag: \"object\"\r\nLast-Modified: Mon, 02 Jan 2023 03:04:05 GMT\r\n";
        let (first, last) = request.range.unwrap_or((0, usize::MAX));
        let last = last.min(object.len().saturating_sub(1));
        if first >= object.len() {
            return ("416 Range Not Satisfiable".into(), same.into(), Vec::new());
        }
        let size = object.len();
        let headers = format!("{same}Content-Range: bytes {first}-{last}/{size}\r\n");
        let body = object[first..=last].to_vec();
        ("206 Partial Content".into(), headers, body)
    }
}

/// Undoes percent encoding.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next().unwrap(), rest.next().unwrap()];
                let digits = std::str::from_utf8(&digits).unwrap().to_string();
                u8::from_str_radix(&digits, 16).unwrap()
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).unwrap()
}
