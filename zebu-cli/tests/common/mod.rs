//! What every test of the program needs: the peers (qemu-img, qemu-io), the
//! binary under test, a folder of its own for each test, and recipes that make
//! images.
//!
//! | variable         | meaning                                              |
//! |------------------|------------------------------------------------------|
//! | `ZEBU_QEMU_IMG`  | the peer qemu-img; else `qemu-img` on `PATH`         |
//! | `ZEBU_QEMU_IO`   | the peer qemu-io; else `qemu-io` on `PATH`           |
//! | `ZEBU_TEST_BIN`  | what is tested; else the `zebu` that cargo built     |
//!
//! When `ZEBU_TEST_BIN` is a file called `qemu-img`, the tests test themselves:
//! what QEMU answers must satisfy every one of them, save those that ask for
//! more than QEMU does (each says so, and is skipped then).

// Each test crate uses a part of this module.
#![allow(dead_code)]

pub mod bytes;
pub mod guest;
pub mod other_server;
pub mod pair;
pub mod script;
pub mod server;
pub mod tls;
pub mod vhost;

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// No command of the tests may run longer than this.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The programs that images are made by, and answers are compared with.
pub struct Peer {
    img: PathBuf,
    pub io: PathBuf,
    /// Major version of QEMU.
    pub major: u32,
}

/// The peer. Panics where there is none: without it these tests test nothing.
pub fn peer() -> &'static Peer {
    static PEER: OnceLock<Peer> = OnceLock::new();
    PEER.get_or_init(|| {
        let named = |var, default: &str| {
            std::env::var_os(var).map_or_else(|| PathBuf::from(default), program_path)
        };
        let img = named("ZEBU_QEMU_IMG", "qemu-img");
        let io = named("ZEBU_QEMU_IO", "qemu-io");
        let version = |program: &Path| {
            let answer = Command::new(program)
                .arg("--version")
                .output()
                .unwrap_or_else(|error| {
                    panic!(
                        "cannot run {}: {error}. These tests compare with QEMU: install qemu-utils \
                         (Debian, Ubuntu) or qemu-img (Fedora), or name the programs in \
                         ZEBU_QEMU_IMG and ZEBU_QEMU_IO",
                        program.display()
                    )
                });
            let text = String::from_utf8_lossy(&answer.stdout).into_owned();
            text.split("version ")
                .nth(1)
                .and_then(|rest| rest.split('.').next())
                .and_then(|major| major.trim().parse::<u32>().ok())
                .unwrap_or_else(|| panic!("{}: no version in {text:?}", program.display()))
        };
        let major = version(&img);
        version(&io);
        Peer { img, io, major }
    })
}

impl Peer {
    /// Whether the peer's outputs are those of the QEMU that zebu follows, so
    /// that they are compared byte for byte.
    pub fn is_current(&self) -> bool {
        self.major >= 10
    }

    /// The peer qemu-img.
    pub fn img(&self) -> &Path {
        &self.img
    }

    /// The qemu-nbd beside the peer qemu-img.
    pub fn nbd(&self) -> PathBuf {
        self.img.with_file_name("qemu-nbd")
    }
}

/// A program's name is looked up on `PATH`; a path is made absolute, because
/// programs run in another folder than the tests.
fn program_path(named: OsString) -> PathBuf {
    let path = PathBuf::from(named);
    if path.components().count() > 1 {
        std::path::absolute(&path).expect("a current folder")
    } else {
        path
    }
}

/// The program under test.
struct Subject {
    program: PathBuf,
    /// Where `io` goes: None for zebu, whose subcommand it is.
    io: Option<PathBuf>,
}

fn subject() -> &'static Subject {
    static SUBJECT: OnceLock<Subject> = OnceLock::new();
    SUBJECT.get_or_init(|| {
        let program = std::env::var_os("ZEBU_TEST_BIN")
            .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_zebu")), program_path);
        let io = (program.file_name() == Some(OsStr::new("qemu-img")))
            .then(|| program.with_file_name("qemu-io"));
        Subject { program, io }
    })
}

/// The program under test.
pub fn program() -> &'static Path {
    &subject().program
}

/// Whether the tests test themselves, with QEMU in the place of zebu.
pub fn testing_qemu() -> bool {
    subject().io.is_some()
}

/// For tests that ask for more than QEMU does. Prints why and returns true when
/// the subject is QEMU.
pub fn beyond_qemu(why: &str) -> bool {
    if testing_qemu() {
        println!("skipped, QEMU is tested: {why}");
    }
    testing_qemu()
}

/// What a program answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The exit status; 128 + signal when one ended it.
    pub status: i32,
    /// Standard output, bytes that are no UTF-8 replaced.
    pub out: String,
    /// Standard error, alike.
    pub err: String,
}

impl Answer {
    /// Fails the test unless the status is 0.
    #[track_caller]
    pub fn ok(self, what: &str) -> Self {
        assert!(self.status == 0, "{what}: {self:#?}");
        self
    }

    /// Fails the test unless the program failed in an orderly way: this status,
    /// one line of message, the program's name first, no panic.
    #[track_caller]
    pub fn failed_with_one_line(&self, status: i32, what: &str) {
        self.orderly(what);
        assert!(
            self.status == status,
            "{what}: status {status} expected: {self:#?}"
        );
        let lines: Vec<&str> = self.err.lines().collect();
        assert!(
            lines.len() == 1,
            "{what}: one line on stderr expected: {self:#?}"
        );
        assert!(
            ["zebu:", "zebu io:", "qemu-img:", "qemu-io:"]
                .iter()
                .any(|name| lines[0].starts_with(name)),
            "{what}: the message must begin with the program's name: {self:#?}"
        );
    }

    /// Fails the test if the program panicked, was ended by a signal (a time
    /// limit included), or spoke of it.
    #[track_caller]
    pub fn orderly(&self, what: &str) {
        assert!(
            self.status < 124 && !self.err.contains("panicked"),
            "{what}: ended in disorder: {self:#?}"
        );
    }
}

/// How a command is run.
#[derive(Clone)]
pub struct Limits {
    /// Killed after this (status 137).
    pub time: Duration,
    /// Address space in KiB.
    pub memory: Option<u64>,
    /// Run as this user.
    pub user: Option<u32>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            time: PATIENCE,
            memory: None,
            user: None,
        }
    }
}

/// A folder that belongs to one test. Programs run in it, so that names are
/// short and messages do not depend on where the tests run.
pub struct Lab {
    dir: tempfile::TempDir,
}

impl Lab {
    /// An empty folder.
    pub fn new() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("zebu-test-")
            .tempdir()
            .expect("a temporary folder");
        Self { dir }
    }

    /// The path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(bytes::os(name))
    }

    /// The peer qemu-img.
    pub fn qemu_img(&self, args: &[&str]) -> Answer {
        self.run(&peer().img, args, b"", &Limits::default())
    }

    /// The peer qemu-io.
    pub fn qemu_io(&self, args: &[&str]) -> Answer {
        self.run(&peer().io, args, b"", &Limits::default())
    }

    /// The peer qemu-io, commands from standard input.
    pub fn qemu_io_script(&self, args: &[&str], script: &str) -> Answer {
        self.run(&peer().io, args, script.as_bytes(), &Limits::default())
    }

    /// The program under test.
    pub fn zebu(&self, args: &[&str]) -> Answer {
        self.zebu_limited(args, &Limits::default())
    }

    /// The program under test, within limits.
    pub fn zebu_limited(&self, args: &[&str], limits: &Limits) -> Answer {
        self.run(&subject().program, args, b"", limits)
    }

    /// The program under test, called by another name through a symlink.
    pub fn zebu_called(&self, name: &str, args: &[&str]) -> Answer {
        let program = subject()
            .program
            .canonicalize()
            .expect("the program under test");
        std::os::unix::fs::symlink(program, self.path(name)).expect("symlink");
        self.run(&self.path(name), args, b"", &Limits::default())
    }

    /// The program under test as qemu-io.
    pub fn zebu_io(&self, args: &[&str]) -> Answer {
        self.zebu_io_script(args, "")
    }

    /// The program under test as qemu-io, commands from standard input.
    pub fn zebu_io_script(&self, args: &[&str], script: &str) -> Answer {
        let (program, args) = io_subject(args);
        self.run(program, &args, script.as_bytes(), &Limits::default())
    }

    /// Whether another user can enter the folder and run the program under
    /// test.
    pub fn can_run_as(&self, user: u32) -> bool {
        use std::os::unix::process::CommandExt as _;
        Command::new(&subject().program)
            .arg("--version")
            .current_dir(self.dir.path())
            .uid(user)
            .gid(user)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok()
    }

    /// Runs the program under test at the end of a shell script that has mounts
    /// of its own. The script prints `mounted` before it runs the program; None
    /// where that does not work.
    pub fn in_namespace(&self, script: &str, args: &[&str], limits: &Limits) -> Option<Answer> {
        let program = subject().program.to_str().expect("UTF-8");
        ["-m", "-rm"].into_iter().find_map(|flag| {
            let mut all = vec![flag, "sh", "-c", script, program];
            all.extend(args);
            let unshare = Path::new("unshare");
            let answer = self.run(unshare, &all, b"", limits);
            answer.out.starts_with("mounted\n").then_some(answer)
        })
    }

    /// Runs any program in the folder.
    pub fn run(&self, program: &Path, args: &[&str], input: &[u8], limits: &Limits) -> Answer {
        use std::os::unix::process::CommandExt as _;
        let mut command = match limits.memory {
            None => Command::new(program),
            Some(kib) => {
                let mut shell = Command::new("sh");
                shell
                    .args(["-c", &format!("ulimit -v {kib} && exec \"$0\" \"$@\"")])
                    .arg(program);
                shell
            }
        };
        if let Some(user) = limits.user {
            command.uid(user).gid(user);
        }
        command
            .args(args.iter().map(|arg| bytes::os(arg)))
            .current_dir(self.dir.path())
            .env("LC_ALL", "C")
            .env("TZ", "UTC")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {}: {error}", program.display()));

        let (done, finished) = mpsc::channel();
        let out = drain(child.stdout.take().expect("piped"), done.clone());
        let err = drain(child.stderr.take().expect("piped"), done);
        let mut stdin = child.stdin.take().expect("piped");
        // A program that does not read its input is no failure of the test.
        let _ = stdin.write_all(input);
        drop(stdin);

        let deadline = Instant::now() + limits.time;
        for _ in 0..2 {
            let left = deadline.saturating_duration_since(Instant::now());
            if finished.recv_timeout(left).is_err() {
                child.kill().expect("kill");
            }
        }
        let status = child.wait().expect("wait");
        Answer {
            status: status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
            out: bytes::text(&out.join().expect("reader")),
            // zebu's messages show names so, QEMU's have their bytes.
            err: String::from_utf8_lossy(&err.join().expect("reader")).into_owned(),
        }
    }

    /// Starts qemu-io on an image and leaves it open until the guard is
    /// dropped.
    pub fn held_by_qemu(&self, args: &[&str]) -> Held {
        self.hold(&peer().io, args)
    }

    /// Starts the program under test as qemu-io, alike.
    pub fn held_by_zebu(&self, args: &[&str]) -> Held {
        let (program, args) = io_subject(args);
        self.hold(program, &args)
    }

    /// Starts the program under test, its input and output in pipes.
    pub fn start_zebu(&self, args: &[&str]) -> Child {
        let (program, args) = match args {
            ["io", rest @ ..] => io_subject(rest),
            _ => (&*subject().program, args.to_vec()),
        };
        Command::new(program)
            .args(args)
            .current_dir(self.dir.path())
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {}: {error}", program.display()))
    }

    fn hold(&self, program: &Path, args: &[&str]) -> Held {
        // A program that never prompts must not hold the tests for ever.
        let mut child = Command::new("timeout")
            .arg("60")
            .arg(program)
            .args(args)
            .current_dir(self.dir.path())
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {}: {error}", program.display()));
        let stdin = child.stdin.take();
        let mut held = Held {
            stdout: BufReader::new(child.stdout.take().expect("piped")),
            stdin,
            child,
        };
        // The prompt comes when the image is open.
        held.read_until_prompt();
        held
    }

    /// Makes the images of a recipe; see [`Recipe`].
    #[track_caller]
    pub fn make(&self, recipe: &str) {
        Recipe { lab: self }.run(recipe);
    }

    /// Makes the sizes on disk of all files final.
    pub fn settle(&self) {
        for entry in fs::read_dir(self.dir.path()).expect("list") {
            let entry = entry.expect("entry");
            if entry.file_type().expect("type").is_file() {
                // The file system may not have allocated yet, and `disk size`
                // must not change between two programs' looks at it.
                File::open(entry.path())
                    .and_then(|file| file.sync_all())
                    .expect("sync");
            }
        }
    }

    /// Overwrites bytes of a file.
    pub fn patch(&self, name: &str, offset: u64, bytes: &[u8]) {
        File::options()
            .write(true)
            .open(self.path(name))
            .and_then(|file| file.write_all_at(bytes, offset))
            .unwrap_or_else(|error| panic!("patch {name}: {error}"));
    }

    /// A big-endian number in a file.
    pub fn u32_at(&self, name: &str, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        File::open(self.path(name))
            .and_then(|file| file.read_exact_at(&mut bytes, offset))
            .unwrap_or_else(|error| panic!("read {name}: {error}"));
        u32::from_be_bytes(bytes)
    }

    /// A big-endian number in a file.
    pub fn u64_at(&self, name: &str, offset: u64) -> u64 {
        (u64::from(self.u32_at(name, offset)) << 32) | u64::from(self.u32_at(name, offset + 4))
    }

    /// Fails the test unless both files have the same length and bytes. Holes
    /// of both are skipped, so a terabyte of nothing costs nothing.
    #[track_caller]
    pub fn assert_same_bytes(&self, ours: &str, theirs: &str, what: &str) {
        if let Some(difference) = difference(&self.path(ours), &self.path(theirs)) {
            panic!("{what}: {ours} and {theirs}: {difference}");
        }
    }
}

fn io_subject<'a>(args: &[&'a str]) -> (&'static Path, Vec<&'a str>) {
    let subject = subject();
    match &subject.io {
        Some(io) => (io, args.to_vec()),
        None => {
            let mut all = vec!["io"];
            all.extend(args);
            (&subject.program, all)
        }
    }
}

fn drain(
    mut from: impl Read + Send + 'static,
    done: mpsc::Sender<()>,
) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        let _ = done.send(());
        bytes
    })
}

/// A program that holds an image open until this is dropped.
pub struct Held {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Held {
    /// Sends a command and returns what was printed up to the next prompt.
    pub fn command(&mut self, line: &str) -> String {
        let stdin = self.stdin.as_mut().expect("open");
        writeln!(stdin, "{line}").expect("the program that holds the image is gone");
        self.read_until_prompt()
    }

    fn read_until_prompt(&mut self) -> String {
        let mut seen = Vec::new();
        while !seen.ends_with(b"> ") {
            let n = self.stdout.read_until(b' ', &mut seen).expect("read");
            assert!(
                n > 0,
                "the program that should hold the image ended: {:?}",
                String::from_utf8_lossy(&seen)
            );
        }
        String::from_utf8_lossy(&seen).into_owned()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.child.wait();
    }
}

/// Where two files differ, if they do.
fn difference(a: &Path, b: &Path) -> Option<String> {
    const STEP: u64 = 1 << 20;
    let open = |path: &Path| {
        File::open(path).unwrap_or_else(|error| panic!("open {}: {error}", path.display()))
    };
    let (a, b) = (open(a), open(b));
    let (len, other) = (
        a.metadata().expect("stat").len(),
        b.metadata().expect("stat").len(),
    );
    if len != other {
        return Some(format!("lengths {len} and {other}"));
    }
    let (mut from_a, mut from_b) = (vec![0; STEP as usize], vec![0; STEP as usize]);
    let mut at = 0;
    while at < len {
        let Some(data) = next_data(&a, at).into_iter().chain(next_data(&b, at)).min() else {
            break;
        };
        at = data - data % STEP;
        let n = STEP.min(len - at) as usize;
        a.read_exact_at(&mut from_a[..n], at).expect("read");
        b.read_exact_at(&mut from_b[..n], at).expect("read");
        if from_a[..n] != from_b[..n] {
            let i = (0..n).find(|&i| from_a[i] != from_b[i]).expect("differ");
            return Some(format!(
                "differ at {} ({:#x}): {:#04x} and {:#04x}",
                at + i as u64,
                at + i as u64,
                from_a[i],
                from_b[i]
            ));
        }
        at += STEP;
    }
    None
}

/// The next byte at or after `at` that is not in a hole.
fn next_data(file: &File, at: u64) -> Option<u64> {
    // SAFETY: lseek takes no pointer; the descriptor is open while `file` lives.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, libc::SEEK_DATA) };
    u64::try_from(found).ok()
}

/// Numbers that are the same in every run.
pub struct Random(u64);

impl Random {
    /// Starts a sequence.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound.max(1)
    }
}

/// Makes images from a text: steps separated by `;`, each one of
///
/// - `create …`: `qemu-img create -q -f qcow2 …`
/// - `img …`: qemu-img with these arguments
/// - `io FILE: cmd | cmd …`: qemu-io commands, which must succeed
/// - `crash FILE: cmd | cmd …`: the same, then qemu-io aborts
/// - `random FILE SEED COUNT KINDS`: that many writes at places and of lengths
///   that SEED decides; KINDS says of which kind: `w` plain, `z` zeroes, `u`
///   zeroes that may unmap, `c` one cluster compressed, `d` discard
/// - `raw FILE BYTES`: a raw file with data in some places
/// - `cut FILE BYTES`: sets the length of a file
///
/// Files that any step may use: `noise` (cannot be compressed), `text` (can).
struct Recipe<'a> {
    lab: &'a Lab,
}

impl Recipe<'_> {
    #[track_caller]
    fn run(&self, recipe: &str) {
        for step in recipe.split(';').map(str::trim).filter(|s| !s.is_empty()) {
            let (verb, rest) = step.split_once(' ').unwrap_or((step, ""));
            let words: Vec<&str> = rest.split_whitespace().collect();
            self.seed_files();
            match verb {
                "create" => {
                    let mut args = vec!["create", "-q", "-f", "qcow2"];
                    args.extend(words);
                    self.lab.qemu_img(&args).ok(step);
                }
                "img" => {
                    self.lab.qemu_img(&words).ok(step);
                }
                "io" | "crash" => {
                    let (file, commands) = rest.split_once(':').expect("FILE: commands");
                    let mut args = vec!["-d", "unmap"];
                    for command in commands.split('|') {
                        args.extend(["-c", command.trim()]);
                    }
                    if verb == "crash" {
                        args.extend(["-c", "abort", file]);
                        let answer = self.lab.qemu_io(&args);
                        assert!(answer.status > 128, "{step}: {answer:#?}");
                    } else {
                        args.push(file);
                        self.lab.qemu_io(&args).ok(step);
                    }
                }
                "random" => self.random(&words),
                "raw" => self.raw(words[0], words[1].parse().expect("BYTES")),
                "cut" => File::options()
                    .write(true)
                    .open(self.lab.path(words[0]))
                    .and_then(|file| file.set_len(words[1].parse().expect("BYTES")))
                    .expect(step),
                other => panic!("no such step: {other}"),
            }
        }
    }

    fn seed_files(&self) {
        if self.lab.path("noise").exists() {
            return;
        }
        let mut random = Random::new(7);
        let noise: Vec<u8> = (0..150_001).map(|_| random.below(256) as u8).collect();
        let mut text = String::new();
        for line in 0..4000 {
            let word = random.below(9000);
            let _ = writeln!(text, "{line} the quick brown fox {word}");
        }
        fs::write(self.lab.path("noise"), noise).expect("write");
        fs::write(self.lab.path("text"), text).expect("write");
    }

    fn random(&self, words: &[&str]) {
        let [file, seed, count, kinds] = words else {
            panic!("random FILE SEED COUNT KINDS, not {words:?}")
        };
        let info = self
            .lab
            .qemu_img(&["info", "--output=json", file])
            .ok("info");
        let info: serde_json::Value = serde_json::from_str(&info.out).expect("JSON");
        let size = info["virtual-size"].as_u64().expect("size");
        let cluster = info["cluster-size"].as_u64().unwrap_or(65536);
        let mut random = Random::new(seed.parse().expect("SEED"));
        let kinds: Vec<char> = kinds.chars().collect();
        let mut script = String::new();
        for _ in 0..count.parse::<u32>().expect("COUNT") {
            let kind = kinds[random.below(kinds.len() as u64) as usize];
            // Half of the places are near to each other, so that writes meet.
            let area = if random.below(2) == 0 {
                size
            } else {
                size.min(20 * cluster)
            };
            let mut at = random.below(area);
            let mut len = match random.below(4) {
                0 => 1 + random.below(4096),
                1 => 512 * (1 + random.below(32)),
                2 => cluster,
                _ => cluster + random.below(2 * cluster),
            };
            if kind == 'c' || random.below(3) == 0 {
                at -= at % cluster;
            }
            if kind == 'c' {
                len = cluster;
            }
            len = len.min(size - at);
            let pattern = 1 + random.below(255);
            let source = match random.below(3) {
                0 => "-s noise".to_string(),
                1 => "-s text".to_string(),
                _ => format!("-P {pattern}"),
            };
            let _ = match kind {
                'w' => writeln!(script, "write -q {source} {at} {len}"),
                'z' => writeln!(script, "write -q -z {at} {len}"),
                'u' => writeln!(script, "write -q -z -u {at} {len}"),
                'c' => writeln!(script, "write -q -c {source} {at} {len}"),
                'd' => writeln!(script, "discard -q {at} {len}"),
                other => panic!("no such kind of write: {other}"),
            };
        }
        // A compressed write over an allocated cluster fails, which is as
        // deterministic as the rest; so the status says nothing.
        let answer = self.lab.qemu_io_script(&["-d", "unmap", file], &script);
        answer.orderly("qemu-io");
        assert!(!answer.err.contains("can't open"), "{answer:#?}");
    }

    fn raw(&self, name: &str, len: u64) {
        let file = File::create(self.lab.path(name)).expect("create");
        file.set_len(len).expect("length");
        let mut random = Random::new(len);
        let noise = fs::read(self.lab.path("noise")).expect("read");
        for _ in 0..12 {
            let at = random.below(len.max(1));
            let n = (1 + random.below(60_000)).min(len - at) as usize;
            file.write_all_at(&noise[..n], at).expect("write");
        }
    }
}

/// Where QEMU says only "Input/output error", zebu says what is wrong: the
/// reason is cut off, where it happened stays.
fn without_reasons(text: &str) -> String {
    let mut kept = String::new();
    for line in text.split_inclusive('\n') {
        let found = line.find("rror while reading ").and_then(|at| {
            let length = line[at..].find(": ")?;
            Some(&line[..at + length])
        });
        match found {
            Some(start) => {
                kept.push_str(start);
                kept.push('\n');
            }
            None => kept.push_str(line),
        }
    }
    kept
}

/// Makes the outputs of QEMU versions before 10 and of the subject comparable:
/// what 10 added is removed, what it renamed gets one name. With a current peer
/// the text stays as it is, except for the program's name in messages.
pub fn comparable(text: &str) -> String {
    let text = without_reasons(&one_name(text));
    if peer().is_current() {
        return text;
    }
    let mut kept = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let indent = &line[..line.len() - line.trim_start().len()];
        if line.trim() == "\"children\": [" {
            let close = [format!("{indent}],"), format!("{indent}]")];
            for skipped in lines.by_ref() {
                if close.iter().any(|close| close == skipped) {
                    break;
                }
            }
            continue;
        }
        if line.starts_with("Child node '") {
            while lines.peek().is_some_and(|next| next.starts_with("    ")) {
                lines.next();
            }
            continue;
        }
        if ["detached header: ", "\"detached-header\": "]
            .iter()
            .any(|key| line.trim_start().starts_with(key))
        {
            continue;
        }
        let line = line
            .replace(", \"compressed\": false", "")
            .replace(", \"compressed\": true", "")
            .replace("[-abCqrv]", "[-abCqv]")
            .replace("[-Cqrv]", "[-Cqv]")
            .replace("[-Ciqrv]", "[-Ciqv]")
            .replace("[-bcCfnqruz]", "[-bcCfnquz]")
            .replace("[-Cfqr]", "[-Cfq]")
            .replace("[-Cfiqruz]", "[-Cfiquz]");
        kept.push_str(&snapshot_row(&line).unwrap_or(line));
        kept.push('\n');
    }
    if !text.ends_with('\n') {
        kept.pop();
    }
    kept
}

/// A row of the snapshot list, in one form: 10 made columns narrower, renamed
/// two and writes hours of the VM clock with four digits.
fn snapshot_row(line: &str) -> Option<String> {
    if line.starts_with("ID ") && line.contains("TAG") {
        return Some("ID TAG VM_SIZE DATE VM_CLOCK ICOUNT".to_string());
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    let clock = words.iter().position(|word| {
        word.len() >= 12 && word.matches(':').count() == 2 && word.contains('.')
    })?;
    if !line.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    let mut words: Vec<String> = words.into_iter().map(str::to_string).collect();
    words[clock] = words[clock].trim_start_matches('0').to_string();
    Some(words.join(" "))
}

/// Messages begin with the name of the program that speaks.
fn one_name(text: &str) -> String {
    let mut named = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let rest = ["zebu io: ", "zebu: ", "qemu-img: ", "qemu-io: "]
            .iter()
            .find_map(|name| line.strip_prefix(name));
        if let Some(rest) = rest {
            named.push_str("PROGRAM: ");
            named.push_str(rest);
        } else {
            named.push_str(line);
        }
    }
    named
}

/// Runs the same command of both and fails the test unless output, messages and
/// status are the same.
#[track_caller]
pub fn assert_same_answer(lab: &Lab, args: &[&str], what: &str) -> Answer {
    let ours = lab.zebu(args);
    let theirs = lab.qemu_img(args);
    compare_answers(&ours, &theirs, args, what);
    ours
}

/// Fails the test unless both answers are the same.
#[track_caller]
pub fn compare_answers(ours: &Answer, theirs: &Answer, args: &[&str], what: &str) {
    let command = args.join(" ");
    ours.orderly(what);
    for (name, ours, theirs) in [
        ("stdout", &ours.out, &theirs.out),
        ("stderr", &ours.err, &theirs.err),
    ] {
        let (ours, theirs) = (comparable(ours), comparable(theirs));
        assert!(
            ours == theirs,
            "{what}\n`{command}`: {name} differs\n--- ours\n{ours}\n--- QEMU's\n{theirs}\n--- first difference: {}",
            first_difference(&ours, &theirs)
        );
    }
    assert!(
        ours.status == theirs.status,
        "{what}\n`{command}`: status {} instead of {}: {ours:#?}",
        ours.status,
        theirs.status
    );
}

fn first_difference(ours: &str, theirs: &str) -> String {
    let (mut a, mut b) = (ours.lines(), theirs.lines());
    for number in 1.. {
        match (a.next(), b.next()) {
            (None, None) => break,
            (a, b) if a != b => return format!("line {number}: {a:?} instead of {b:?}"),
            _ => {}
        }
    }
    "in the ends of lines".to_string()
}
