//! The NBD server under test, and a client that sends arbitrary bytes.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use zebu::internal::nbd::{
    ChunkHeader, Command as Asks, ContextQuery, Go, Headers, OptionKind, OptionReplyHeader,
    OptionReplyKind, Request, encode_option,
};

use super::{Answer, Lab, Limits, TIME_LIMIT, program};

/// Bytes of memory that a server of these tests may have: what all requests may take below the
/// device, and the buffers of four connections.
pub const MOST_MEMORY: u64 = 512 << 20;

/// Calls `condition` until it holds.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIME_LIMIT, "timeout: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Fails the test unless all threads of an idle server sleep, and are not woken.
#[track_caller]
pub fn assert_sleeps(server: &Server) {
    // It may poll for a time, of which a busy machine gives it little.
    std::thread::sleep(Duration::from_millis(100));
    wait_until("all threads sleep", || {
        threads(server).iter().all(|(state, _)| state == "S")
    });
    let before: u64 = threads(server).iter().map(|thread| thread.1).sum();
    for _ in 0..25 {
        std::thread::sleep(Duration::from_millis(20));
        for (state, _) in threads(server) {
            assert_eq!(state, "S", "a thread is awake");
        }
    }
    let after: u64 = threads(server).iter().map(|thread| thread.1).sum();
    assert!(after - before < 10, "woken {} times", after - before);
}

/// The state of each thread, and how often it went to sleep.
fn threads(server: &Server) -> Vec<(String, u64)> {
    let tasks = fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let thread = |task: std::io::Result<fs::DirEntry>| {
        let status = task.unwrap().path().join("status");
        let status = fs::read_to_string(status).unwrap();
        let word = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        };
        let sleeps = word("voluntary_ctxt_switches:").parse().unwrap();
        (word("State:"), sleeps)
    };
    tasks.map(thread).collect()
}

/// Whether a program is installed; prints a line if not.
pub fn have(name: &str) -> bool {
    let found = Command::new(name)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok();
    if !found {
        println!("skipped: no {name}");
    }
    found
}

/// A Python with the module of libnbd. Debian's module is for Debian's Python, which need not be the
/// first on `PATH`.
pub fn libnbd(lab: &Lab) -> Option<&'static str> {
    let mut all = ["/usr/bin/python3", "python3"].into_iter();
    let found = all.find(|it| have(it) && client(lab, it, &["-c", "import nbd"]).status == 0);
    if found.is_none() {
        println!("skipped: no libnbd for Python");
    }
    found
}

/// `zebu nbd`, killed when dropped.
pub struct Server {
    child: Child,
    pub socket: PathBuf,
    /// Bytes of memory that it may have.
    pub most_memory: u64,
    log: PathBuf,
}

impl Server {
    /// Serves at `nbd.sock` in the lab; waits until it listens.
    pub fn start(lab: &Lab, args: &[&str]) -> Server {
        let log = fs::File::create(lab.path("server.log")).unwrap();
        Self::start_logging(lab, args, log)
    }

    /// The same; the log goes elsewhere.
    pub fn start_logging(lab: &Lab, args: &[&str], log: impl Into<Stdio>) -> Server {
        let socket = lab.path("nbd.sock");
        let mut all = vec!["nbd", "-v", "-k", socket.to_str().unwrap()];
        all.extend(args);
        let server = Self::spawn_logging(lab, &all, log);
        wait_until("the server listens", || {
            UnixStream::connect(&server.socket).is_ok() || server.has_ended()
        });
        assert!(!server.has_ended(), "{}", server.log());
        server
    }

    /// Runs the program under test with any arguments, in the background.
    pub fn spawn(lab: &Lab, args: &[&str]) -> Server {
        let log = fs::File::create(lab.path("server.log")).unwrap();
        Self::spawn_logging(lab, args, log)
    }

    fn spawn_logging(lab: &Lab, args: &[&str], log: impl Into<Stdio>) -> Server {
        let child = Command::new(program())
            .args(args)
            .current_dir(lab.path(""))
            .stdin(Stdio::null())
            .stdout(fs::File::create(lab.path("server.out")).unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Server {
            child,
            socket: lab.path("nbd.sock"),
            most_memory: MOST_MEMORY,
            log: lab.path("server.log"),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn has_ended(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        stat.rsplit(')')
            .next()
            .unwrap_or_default()
            .starts_with(" Z")
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A URI for an export.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.pid().to_string()])
            .status();
        assert!(status.unwrap().success());
    }

    /// Waits for the end. Returns the exit status, or 128 + signal.
    pub fn wait(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let mut status = None;
        wait_until("the server ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let status = status.unwrap();
        status
            .code()
            .unwrap_or_else(|| 128 + status.signal().unwrap())
    }

    /// The peak of its resident memory in bytes.
    pub fn peak_memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:"));
        let number = line.and_then(|line| line.split_whitespace().nth(1));
        // A process that has ended has none.
        number.map_or(0, |kib| kib.parse::<u64>().unwrap() << 10)
    }

    /// Fails the test if it ever had more memory than the documentation says for a few clients,
    /// and the programs and their libraries themselves.
    #[track_caller]
    pub fn assert_memory(&self) {
        let peak = self.peak_memory();
        assert!(peak < self.most_memory, "{} MiB of memory", peak >> 20);
    }

    /// Stops it by SIGTERM. It must exit with status 0, without a panic.
    #[track_caller]
    pub fn stop(&mut self) {
        self.assert_memory();
        self.signal("TERM");
        assert_eq!(self.wait(), 0, "{}", self.log());
        assert!(!self.log().contains("panicked"), "{}", self.log());
    }

    /// Kills it. The image must have no errors but leaks, which are then repaired, so that a later
    /// check finds only those of the next server.
    #[track_caller]
    pub fn kill(&mut self, lab: &Lab, image: &str) {
        self.assert_memory();
        self.signal("KILL");
        assert_eq!(self.wait(), 128 + 9);
        // The kernel may release the locks some time after the process has ended.
        let mut check = lab.qemu_img(&["check", image]);
        wait_until("the lock is released", || {
            check = lab.qemu_img(&["check", image]);
            !check.err.contains(" lock\n")
        });
        assert!([0, 3].contains(&check.status), "{check:?}");
        lab.qemu_img(&["check", "-r", "leaks", image]).ok("leaks");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("log of the server: {}", self.log());
        }
    }
}

/// Runs a client program in the folder.
pub fn client(lab: &Lab, name: &str, args: &[&str]) -> Answer {
    lab.run(Path::new(name), args, b"", &Limits::default())
}

/// A connection to the server, on which a test sends and receives any bytes.
pub struct Raw {
    pub stream: UnixStream,
    pub headers: Headers,
}

/// The reply to a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Got {
    /// 0, or the error.
    pub error: u32,
    /// Data with offsets.
    pub pieces: Vec<(u64, Vec<u8>)>,
    /// Offsets and lengths of holes.
    pub holes: Vec<(u64, u32)>,
    /// Other payloads.
    pub others: Vec<Vec<u8>>,
}

impl Raw {
    /// Connects without a greeting.
    pub fn connect(server: &Server) -> Raw {
        Raw::to(&server.socket)
    }

    /// Connects to any server at a socket without a greeting.
    pub fn to(socket: &Path) -> Raw {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        stream.set_write_timeout(Some(TIME_LIMIT)).unwrap();
        Raw {
            stream,
            headers: Headers::Simple,
        }
    }

    /// Connects, and exchanges greetings.
    pub fn new(server: &Server) -> Raw {
        Raw::at(&server.socket)
    }

    /// Connects to any server at a socket and greets.
    pub fn at(socket: &Path) -> Raw {
        let mut raw = Raw::to(socket);
        let greeting = raw.take(18);
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        raw.put(&[0, 0, 0, 3]);
        raw
    }

    /// A client of `export` with these headers and `base:allocation`.
    pub fn with_export(server: &Server, export: &str, headers: Headers) -> Raw {
        let mut raw = Raw::new(server);
        let option = match headers {
            Headers::Simple => None,
            Headers::Structured => Some(OptionKind::StructuredReply),
            Headers::Extended => Some(OptionKind::ExtendedHeaders),
        };
        if let Some(option) = option {
            assert_eq!(raw.option(option, &[]).0, OptionReplyKind::Ack);
            let query = ContextQuery {
                name: export.into(),
                queries: vec!["base:allocation".into()],
            };
            let (kind, all) = raw.option(OptionKind::SetMetaContext, &query.encode());
            assert_eq!((kind, all.len()), (OptionReplyKind::Ack, 1));
        }
        let go = Go {
            name: export.into(),
            wanted: vec![],
        };
        let (kind, _) = raw.option(OptionKind::Go, &go.encode());
        assert_eq!(kind, OptionReplyKind::Ack);
        raw.headers = headers;
        raw
    }

    pub fn put(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn take(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Fails the test unless the server closes the connection without sending anything.
    #[track_caller]
    pub fn assert_closed(&mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => assert!(rest.is_empty(), "{rest:?}"),
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }

    /// Sends an option. Returns the kind of the last reply, and the payloads of those before.
    pub fn option(&mut self, kind: OptionKind, payload: &[u8]) -> (OptionReplyKind, Vec<Vec<u8>>) {
        self.put(&encode_option(kind, payload));
        self.replies(kind)
    }

    /// Receives the replies to an option.
    pub fn replies(&mut self, kind: OptionKind) -> (OptionReplyKind, Vec<Vec<u8>>) {
        let mut all = Vec::new();
        loop {
            let header = self.take(OptionReplyHeader::SIZE).try_into().unwrap();
            let header = OptionReplyHeader::decode(&header).unwrap();
            assert_eq!(header.option, kind);
            let payload = self.take(header.length as usize);
            if header.kind == OptionReplyKind::Ack || header.kind.is_error() {
                return (header.kind, all);
            }
            all.push(payload);
        }
    }

    /// Sends a request's header.
    pub fn send(&mut self, request: &Request) {
        let mut bytes = Vec::new();
        request.encode(self.headers, &mut bytes);
        self.put(&bytes);
    }

    /// Sends a request and its payload, and receives its reply. No other request may be in flight.
    pub fn ask(&mut self, request: &Request, payload: &[u8]) -> Got {
        self.send(request);
        self.put(payload);
        let data = match request.command {
            Asks::Read => request.length as usize,
            _ => 0,
        };
        let (cookie, got) = self.answer(data);
        assert_eq!(cookie, request.cookie);
        got
    }

    /// The next reply, and its cookie. `simple_data`: the length of the data after a simple reply
    /// without an error.
    pub fn answer(&mut self, simple_data: usize) -> (u64, Got) {
        let mut got = Got::default();
        if self.headers == Headers::Simple {
            let bytes = self.take(16);
            let reply =
                zebu::internal::nbd::SimpleReply::decode(&bytes.try_into().unwrap()).unwrap();
            got.error = reply.error;
            if reply.error == 0 && simple_data > 0 {
                got.pieces.push((0, self.take(simple_data)));
            }
            return (reply.cookie, got);
        }
        loop {
            let header = self.take(ChunkHeader::size(self.headers));
            let header = ChunkHeader::decode(self.headers, &header).unwrap();
            let payload = self.take(header.length as usize);
            got.add(&header, payload);
            if header.done {
                return (header.cookie, got);
            }
        }
    }
}

impl Got {
    fn add(&mut self, header: &ChunkHeader, payload: Vec<u8>) {
        use zebu::internal::nbd::ChunkKind;
        let offset = |payload: &[u8]| u64::from_be_bytes(payload[..8].try_into().unwrap());
        match header.kind {
            ChunkKind::None => {}
            ChunkKind::OffsetData => self.pieces.push((offset(&payload), payload[8..].to_vec())),
            ChunkKind::OffsetHole => {
                let length = u32::from_be_bytes(payload[8..12].try_into().unwrap());
                self.holes.push((offset(&payload), length));
            }
            kind if kind.is_error() => {
                self.error = zebu::internal::nbd::decode_error_payload(&payload)
                    .unwrap()
                    .0;
            }
            _ => self.others.push(payload),
        }
    }
}
