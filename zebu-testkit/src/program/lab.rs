//! A folder for a test, and the programs that run in it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::programs::{io_subject, peer, program};
use super::recipe::Recipe;
use super::{Answer, TIME_LIMIT, bytes};

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
            time: TIME_LIMIT,
            memory: None,
            user: None,
        }
    }
}

/// A folder that belongs to one test. Programs run in it, so that names are
/// short and messages do not depend on where the tests run.
pub struct Lab {
    dir: tempfile::TempDir,
    _watch: mpsc::Sender<()>,
}

/// A test may not take longer than this.
const TEST_LIMIT: Duration = Duration::from_secs(900);

/// Kills what runs in a folder after the time limit, so that its test fails instead of waiting for
/// ever, and says what that was. The watch ends when the returned value is dropped.
fn watch(folder: PathBuf) -> mpsc::Sender<()> {
    let test = thread::current().name().unwrap_or("a test").to_owned();
    let (end, ended) = mpsc::channel();
    thread::spawn(move || {
        if ended.recv_timeout(TEST_LIMIT) != Err(mpsc::RecvTimeoutError::Timeout) {
            return;
        }
        for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let there = fs::read_link(process.path().join("cwd"));
            if there.is_ok_and(|there| there.starts_with(&folder)) {
                let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
                let line = String::from_utf8_lossy(&line).replace('\0', " ");
                eprintln!("{test}: killed after {TEST_LIMIT:?}: {line}");
                let id = process.file_name().into_string().unwrap_or_default();
                let _ = Command::new("kill").args(["-KILL", &id]).status();
            }
        }
    });
    end
}

impl Lab {
    /// An empty folder.
    pub fn new() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("zebu-test-")
            .tempdir()
            .expect("a temporary folder");
        let _watch = watch(dir.path().to_owned());
        Self { dir, _watch }
    }

    /// The path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(bytes::os(name))
    }

    /// Runs qemu-img.
    pub fn qemu_img(&self, args: &[&str]) -> Answer {
        self.run(peer().img(), args, b"", &Limits::default())
    }

    /// Runs qemu-io.
    pub fn qemu_io(&self, args: &[&str]) -> Answer {
        self.run(&peer().io, args, b"", &Limits::default())
    }

    /// Runs qemu-io with commands on standard input.
    pub fn qemu_io_script(&self, args: &[&str], script: &str) -> Answer {
        self.run(&peer().io, args, script.as_bytes(), &Limits::default())
    }

    /// Runs the program under test.
    pub fn zebu(&self, args: &[&str]) -> Answer {
        self.zebu_limited(args, &Limits::default())
    }

    /// Runs the program under test within limits.
    pub fn zebu_limited(&self, args: &[&str], limits: &Limits) -> Answer {
        self.run(program(), args, b"", limits)
    }

    /// Runs the program under test under another name, through a symlink.
    pub fn zebu_called(&self, name: &str, args: &[&str]) -> Answer {
        let program = program().canonicalize().expect("the program under test");
        std::os::unix::fs::symlink(program, self.path(name)).expect("symlink");
        self.run(&self.path(name), args, b"", &Limits::default())
    }

    /// Runs the program under test as qemu-io.
    pub fn zebu_io(&self, args: &[&str]) -> Answer {
        self.zebu_io_script(args, "")
    }

    /// Runs the program under test as qemu-io with commands on standard input.
    pub fn zebu_io_script(&self, args: &[&str], script: &str) -> Answer {
        let (program, args) = io_subject(args);
        self.run(program, &args, script.as_bytes(), &Limits::default())
    }

    /// Runs a shell script in which `$0` is the program under test. Any part of a pipe may fail it.
    pub fn shell(&self, script: &str) -> Answer {
        let program = program().canonicalize().expect("the program under test");
        let script = format!("set -o pipefail; {script}");
        let args = ["-c", &script, program.to_str().expect("UTF-8")];
        self.run(Path::new("bash"), &args, b"", &Limits::default())
    }

    /// The most memory that the program takes, in KiB. (What `wait4` counts begins with that of the
    /// tests.)
    pub fn peak_of(&self, variables: &[&str], args: &[&str]) -> u64 {
        let mut command = Command::new("env");
        command
            .args(variables)
            .arg(program())
            .args(args)
            .current_dir(self.path(""));
        let mut child = command.spawn().unwrap();
        let status = format!("/proc/{}/status", child.id());
        let mut peak = 0;
        let ended = loop {
            if let Some(ended) = child.try_wait().unwrap() {
                break ended;
            }
            let text = fs::read_to_string(&status).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
            // Before it is the program, it is a copy of the tests.
            if text.starts_with("Name:\tzebu") {
                peak = number.unwrap_or(peak);
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        assert!(ended.success() && peak > 0, "{ended:?}, {peak} KiB");
        peak
    }

    /// Whether another user can enter the folder and run the program under test.
    pub fn can_run_as(&self, user: u32) -> bool {
        use std::os::unix::process::CommandExt as _;
        Command::new(program())
            .arg("--version")
            .current_dir(self.dir.path())
            .uid(user)
            .gid(user)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok()
    }

    /// Runs a shell script in a mount namespace. It mounts something, prints `mounted`, and runs
    /// `"$0" "$@"`: the program under test with `args`. `None` if it cannot mount.
    pub fn in_namespace(&self, script: &str, args: &[&str], limits: &Limits) -> Option<Answer> {
        let program = program().to_str().expect("UTF-8");
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
        let input = input.to_vec();
        // The program need not read its input.
        thread::spawn(move || {
            let _ = stdin.write_all(&input);
        });

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
            // zebu replaces invalid UTF-8 in messages; QEMU prints the bytes.
            err: String::from_utf8_lossy(&err.join().expect("reader")).into_owned(),
        }
    }

    /// Starts qemu-io on an image and leaves it open until the guard is
    /// dropped.
    pub fn held_by_qemu(&self, args: &[&str]) -> Held {
        self.hold(&peer().io, args)
    }

    /// The same with the program under test as qemu-io.
    pub fn held_by_zebu(&self, args: &[&str]) -> Held {
        let (program, args) = io_subject(args);
        self.hold(program, &args)
    }

    /// Starts the program under test with pipes for its input and output.
    pub fn start_zebu(&self, args: &[&str]) -> Child {
        let (program, args) = match args {
            ["io", rest @ ..] => io_subject(rest),
            _ => (program(), args.to_vec()),
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
        // The test must end also if the program never prompts.
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
}

/// Reads to the end on a thread, which then sends to `done`.
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
        writeln!(stdin, "{line}").expect("the program that has the image open has ended");
        self.read_until_prompt()
    }

    fn read_until_prompt(&mut self) -> String {
        let mut seen = Vec::new();
        while !seen.ends_with(b"> ") {
            let n = self.stdout.read_until(b' ', &mut seen).expect("read");
            assert!(
                n > 0,
                "the program ended before its prompt: {:?}",
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
