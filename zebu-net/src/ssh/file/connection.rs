//! Making a connection and opening the file: one request after the other.

use std::io::{self, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::ChildStdout;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::failure::SshError;
use super::options::SshOptions;
use super::packet::{self, Attributes, Extensions, Packet, Reply, Status, open};
use super::program::Program;
use crate::storage::CacheMode;

/// Bytes that every server takes in a read or a write (section 3 of the draft).
const SMALL: u64 = 32 << 10;
/// The most that are asked of a server at once: what OpenSSH allows.
const LARGE: u64 = 255 << 10;
/// The mode of a file that is created, as in QEMU.
const MODE: u32 = 0o644;
/// The part of a mode that is the file's type, and that of regular files.
const TYPE: u32 = 0o170_000;
const REGULAR: u32 = 0o100_000;

/// A connection with an open file.
#[derive(Debug)]
pub(super) struct Connection {
    pub program: Program,
    pub input: BufReader<ChildStdout>,
    pub output: UnixStream,
    pub extensions: Extensions,
    pub limits: Limits,
    pub file: File,
}

/// The most bytes of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub read: u64,
    pub write: u64,
}

/// The open file.
#[derive(Clone, Debug)]
pub(super) struct File {
    pub handle: Vec<u8>,
    pub length: u64,
    pub attributes: Attributes,
    pub was_created: bool,
}

impl Connection {
    /// Connects and opens the file. Blocks.
    pub fn open(options: &SshOptions) -> Result<Connection, SshError> {
        let (program, output, input) = Program::start(options)
            .map_err(|e| SshError::broken(&options.server.to_string(), &e.to_string()))?;
        Self::over(options, program, output, input)
    }

    /// Opens the file over the pipes of a program. Blocks.
    pub fn over(
        options: &SshOptions,
        program: Program,
        output: UnixStream,
        input: ChildStdout,
    ) -> Result<Connection, SshError> {
        let server = options.server.to_string();
        let broken = |e: &dyn std::fmt::Display| SshError::broken(&server, &e.to_string());
        let mut session = Session {
            server: &server,
            timeout: options.timeout,
            input: BufReader::with_capacity(64 << 10, input),
            output,
        };
        match session.begin(options) {
            Ok((extensions, limits, file)) => Ok(Connection {
                program,
                input: session.input,
                output: session.output,
                extensions,
                limits,
                file,
            }),
            Err(Trouble::Refused(error)) => Err(error),
            Err(Trouble::Lost(error)) => {
                drop(session);
                let said = program.end();
                Err(match said.is_empty() {
                    true => broken(&format!("the connection was lost: {error}")),
                    false => broken(&said),
                })
            }
            Err(Trouble::Violation(error)) => Err(broken(&error)),
        }
    }
}

/// Waits until the server sends something. `oldest`: since when a request waits for its reply.
///
/// # Errors
/// `TimedOut` if nothing comes for the time of `timeout` while one waits.
pub(super) fn wait(
    input: &BufReader<ChildStdout>,
    timeout: Option<Duration>,
    oldest: impl Fn() -> Option<Instant>,
) -> io::Result<()> {
    let Some(limit) = timeout else {
        return Ok(());
    };
    let begun = Instant::now();
    let mut left = limit;
    while input.buffer().is_empty() {
        let time = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(
            &mut [PollFd::new(input.get_ref(), PollFlags::IN)],
            Some(&time),
        ) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => break,
            Err(e) => return Err(e.into()),
        }
        let waited = oldest().map_or(Duration::ZERO, |sent| sent.max(begun).elapsed());
        left = limit.saturating_sub(waited);
        if left.is_zero() {
            let what = format!("no answer for {} s", limit.as_secs_f64());
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
    }
    Ok(())
}

/// Why there is no open file.
enum Trouble {
    Lost(io::Error),
    Violation(io::Error),
    Refused(SshError),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => Trouble::Violation(error),
            _ => Trouble::Lost(error),
        }
    }
}

/// A connection without requests in flight.
struct Session<'a> {
    server: &'a str,
    timeout: Option<Duration>,
    input: BufReader<ChildStdout>,
    output: UnixStream,
}

impl Session<'_> {
    fn begin(&mut self, options: &SshOptions) -> Result<(Extensions, Limits, File), Trouble> {
        self.output.write_all(&Packet::init())?;
        self.wait()?;
        let (version, extensions) = packet::receive_version(&mut self.input)?;
        if version < packet::VERSION {
            let what = format!("the server speaks version {version} of SFTP");
            return Err(Trouble::Refused(SshError::broken(self.server, &what)));
        }
        if options.write && options.cache != CacheMode::Unsafe && !extensions.fsync {
            let what = "the server has no fsync (fsync@openssh.com), so writes cannot be made \
                        durable: use the cache mode 'unsafe'";
            return Err(Trouble::Refused(SshError::broken(self.server, what)));
        }
        let limits = match extensions.limits {
            true => self.limits()?,
            false => Limits {
                read: SMALL,
                write: SMALL,
            },
        };
        Ok((extensions, limits, self.file(options)?))
    }

    fn call(&mut self, request: Packet) -> Result<Reply, Trouble> {
        self.output.write_all(&request.finish(0))?;
        self.wait()?;
        Ok(packet::receive_reply(&mut self.input)?.1)
    }

    fn wait(&self) -> io::Result<()> {
        let begun = Instant::now();
        wait(&self.input, self.timeout, || Some(begun))
    }

    fn limits(&mut self) -> Result<Limits, Trouble> {
        let (read, write) = match self.call(Packet::limits())? {
            Reply::Extended(reply) => packet::parse_limits(&reply)?,
            _ => (SMALL, SMALL),
        };
        let within = |limit: u64| match limit {
            0 => SMALL,
            limit => limit.clamp(512, LARGE),
        };
        Ok(Limits {
            read: within(read),
            write: within(write),
        })
    }

    fn file(&mut self, options: &SshOptions) -> Result<File, Trouble> {
        let flags = match options.write {
            true => open::READ | open::WRITE,
            false => open::READ,
        };
        let mut was_created = false;
        let mut opened = self.handle(&options.path, flags)?;
        if let Err(status) = &opened
            && status.code == Status::NO_SUCH_FILE
            && options.create
        {
            let new = self.handle(&options.path, flags | open::CREATE | open::EXCLUSIVE)?;
            was_created = new.is_ok();
            opened = match new {
                // Another program may have made it meanwhile.
                Err(why) => self.handle(&options.path, flags)?.map_err(|_| why),
                made => made,
            };
        }
        let failed = |doing: &str, status: &Status| {
            Trouble::Refused(SshError::status(self.server, doing, status))
        };
        let doing = format!("failed to open remote file '{}'", options.path);
        let handle = opened.map_err(|status| failed(&doing, &status))?;
        let attributes = match self.call(Packet::stat(&handle))? {
            Reply::Attributes(attributes) => attributes,
            Reply::Status(status) => return Err(failed("failed to read file attributes", &status)),
            _ => return Err(unexpected()),
        };
        let refused = |what: &str| {
            let what = format!("'{}' {what}", options.path);
            Err(Trouble::Refused(SshError::broken(self.server, &what)))
        };
        // Some servers tell no type.
        if attributes
            .mode
            .is_some_and(|mode| ![0, REGULAR].contains(&(mode & TYPE)))
        {
            return refused("is not a regular file");
        }
        let Some(length) = attributes.size else {
            return refused("has no size");
        };
        Ok(File {
            handle,
            length,
            attributes,
            was_created,
        })
    }

    fn handle(&mut self, path: &str, flags: u32) -> Result<Result<Vec<u8>, Status>, Trouble> {
        match self.call(Packet::open(path, flags, MODE))? {
            Reply::Handle(handle) => Ok(Ok(handle)),
            Reply::Status(status) => Ok(Err(status)),
            _ => Err(unexpected()),
        }
    }
}

fn unexpected() -> Trouble {
    let what = "the server answers with the reply to another request";
    Trouble::Violation(io::Error::new(io::ErrorKind::InvalidData, what))
}
