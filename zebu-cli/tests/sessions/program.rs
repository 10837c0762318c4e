//! Runs zebu and QEMU, and records their commands.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use crate::common::{bytes, peer, program};

/// One of the two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Zebu,
    Qemu,
}

/// The exit status and the output of a program.
#[derive(Debug)]
pub struct Answer {
    /// The exit status; 128 + signal when one ended it.
    pub status: i32,
    pub out: String,
    pub err: String,
}

impl Answer {
    /// The status, and the output without that of successful commands.
    pub fn text(&self) -> String {
        let all = self.out.lines().chain(self.err.lines());
        let is_error = |line: &&str| {
            let done = ["wrote ", "read ", "discard ", "No errors"];
            !done.iter().any(|d| line.starts_with(d)) && !line.contains(" ops; ")
        };
        let lines: Vec<&str> = all.filter(is_error).collect();
        format!("status {}: {}", self.status, lines.join("\n"))
    }
}

/// Runs commands in folders under `root`, and records them as lines of a shell script.
pub struct Shell {
    pub root: PathBuf,
    pub log: Vec<String>,
    /// Print each line as it is run.
    pub trace: bool,
    /// The longest file that zebu may write, in KiB.
    pub limit: Option<u64>,
    /// Of the next zebu: redirections of bash, and the file that `$FILE` is in them.
    pub redirection: Option<(String, PathBuf)>,
}

impl Shell {
    pub fn new(root: &Path) -> Self {
        Shell {
            root: root.into(),
            log: Vec::new(),
            trace: zebu_testkit::trace(),
            limit: None,
            redirection: None,
        }
    }

    /// The absolute name of a file in the image's folder.
    pub fn absolute(&self, name: &str) -> String {
        let path = self.root.join("img").join(bytes::os(name));
        bytes::text(path.as_os_str().as_bytes())
    }

    /// Records a line.
    pub fn note(&mut self, line: String) {
        if self.trace {
            eprintln!("{line}");
        }
        self.log.push(line);
    }

    /// Runs qemu-img or zebu in the folder `cwd`.
    pub fn img(&mut self, by: By, cwd: &str, args: &[String]) -> Result<Answer, String> {
        let (program, name) = match by {
            By::Zebu => (program(), "zebu"),
            By::Qemu => (peer().img(), "qemu-img"),
        };
        self.run(program, name, cwd, args)
    }

    /// Runs qemu-io or `zebu io` with a `-c` for each command. QEMU uses threads instead of io_uring, with
    /// which it may hang after a read that ends with the file (QEMU 10.0, also of sound images). It discards
    /// with `write -z -u` only when nothing is in flight: a write to the same cluster that allocates it
    /// might otherwise get one that is freed then.
    pub fn io(
        &mut self,
        by: By,
        cwd: &str,
        args: &[String],
        commands: &[String],
    ) -> Result<Answer, String> {
        let (program, name, first) = match by {
            By::Zebu => (program(), "zebu", Some("io".to_string())),
            By::Qemu => (&*peer().io, "qemu-io", None),
        };
        let mut all: Vec<String> = first.into_iter().collect();
        for command in commands {
            let alone = by == By::Qemu && command.starts_with("aio_write -z -u");
            let flush = alone.then(|| "aio_flush".to_string());
            for command in flush.iter().chain([command]).chain(&flush) {
                all.extend(["-c".into(), command.clone()]);
            }
        }
        all.extend(args.iter().cloned());
        if by == By::Qemu {
            let io_uring = all.iter_mut().filter(|arg| *arg == "io_uring");
            io_uring.for_each(|arg| *arg = "threads".into());
        }
        self.run(program, name, cwd, &all)
    }

    /// Starts a qemu-io that has an image open for writing until [`Shell::release`].
    pub fn hold(&mut self, cwd: &str, name: &str) -> Result<Held, String> {
        self.note(format!("# qemu-io in {cwd} has {} open", quoted(name)));
        let child = Command::new(&peer().io)
            .args(["-f", "qcow2"])
            .arg(bytes::os(name))
            .current_dir(self.root.join(cwd))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("qemu-io: {e}"))?;
        let mut held = Held(child);
        let input = held.0.stdin.as_mut().expect("it is piped");
        input
            .write_all(b"read 0 512\n")
            .map_err(|e| e.to_string())?;
        let output = held.0.stdout.as_mut().expect("it is piped");
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        match lines.find(|line| line.contains("read 512/512")) {
            Some(_) => Ok(held),
            None => Err(format!("qemu-io cannot open {name}")),
        }
    }

    /// Makes it close the image.
    pub fn release(&mut self, mut held: Held) -> Result<(), String> {
        drop(held.0.stdin.take());
        self.note("# qemu-io ends".into());
        match held.0.wait() {
            Ok(status) if status.success() => Ok(()),
            other => Err(format!("qemu-io that held the image: {other:?}")),
        }
    }

    fn run(
        &mut self,
        program: &Path,
        name: &str,
        cwd: &str,
        args: &[String],
    ) -> Result<Answer, String> {
        let words: Vec<String> = args.iter().map(|a| quoted(a)).collect();
        let limit = self.limit.filter(|_| name == "zebu");
        let limit = limit
            .map(|kib| format!("ulimit -f {kib}; "))
            .unwrap_or_default();
        let redirection = (name == "zebu").then(|| self.redirection.take()).flatten();
        let (redirection, file) = redirection.unwrap_or_default();
        let shown = redirection.replace("$FILE", &file.display().to_string());
        self.note(format!(
            "(cd {cwd}; {limit}{name} {} {shown})",
            words.join(" ")
        ));
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "60"]).env("FILE", file);
        if !limit.is_empty() || !redirection.is_empty() {
            let script = format!("{limit}exec \"$0\" \"$@\" {redirection}");
            command.args(["bash", "-c", &script]);
        }
        command.arg(program);
        command.args(args.iter().map(|arg| bytes::os(arg)));
        let output = command
            .current_dir(self.root.join(cwd))
            .env("LC_ALL", "C")
            .env("TZ", "UTC")
            // For `ssh://`; the steps that use it make the program.
            .env("ZEBU_SSH", self.root.join("own/ssh"))
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        let answer = Answer {
            status: output.status.code().unwrap_or(255),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        if answer.err.contains("panicked") || answer.status == 124 || answer.status == 137 {
            return Err(format!("{name} {}: {}", words.join(" "), answer.text()));
        }
        Ok(answer)
    }
}

/// A program that has an image open. Dropping kills it.
pub struct Held(Child);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A word quoted for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.into(),
        false if word.chars().all(|c| (' '..='~').contains(&c) && c != '\'') => format!("'{word}'"),
        false => {
            let bytes = bytes::os(word);
            let escaped = bytes.as_bytes().iter().map(|byte| match byte {
                b' '..=b'~' if !b"'\\".contains(byte) => char::from(*byte).to_string(),
                byte => format!("\\x{byte:02x}"),
            });
            format!("$'{}'", escaped.collect::<String>())
        }
    }
}

/// The I/O engines that work here in both programs.
pub fn engines(root: &Path) -> &'static [&'static str] {
    static ENGINES: OnceLock<Vec<&'static str>> = OnceLock::new();
    ENGINES.get_or_init(|| {
        let name = root.join("engines.raw");
        std::fs::write(&name, [0; 4096]).expect("a file");
        let mut shell = Shell::new(root);
        let works = |engine: &&&str| {
            [By::Zebu, By::Qemu].into_iter().all(|by| {
                let args = ["-f", "raw", "-t", "none", "-i", engine, "engines.raw"];
                let args = args.map(String::from);
                let answer = shell.io(by, ".", &args, &["read 0 4k".into()]);
                answer.is_ok_and(|a| a.status == 0)
            })
        };
        let mut engines = vec!["threads"];
        engines.extend(["native", "io_uring"].iter().filter(works));
        engines
    })
}
