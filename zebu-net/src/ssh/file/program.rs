//! The program `ssh`: how it is called, and what it says when it fails.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::options::{HostKeyCheck, SshOptions};

/// Names a program that is called instead of `ssh`, with the same arguments.
const VARIABLE: &str = "ZEBU_SSH";
/// How long the program may take to end after it has closed its output.
const ENDING: Duration = Duration::from_secs(5);
/// Bytes of messages that are kept: a server may send any number of them.
const MESSAGES: u64 = 1 << 20;

/// What the program must do however it is configured: it asks nothing, forwards nothing, and
/// notices a server that is gone.
const ALWAYS: &[&str] = &[
    "BatchMode=yes",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
    "RequestTTY=no",
    // A master that goes on would keep what this process has opened.
    "ControlMaster=no",
    "LogLevel=ERROR",
    "ConnectTimeout=30",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=3",
];

/// The key is checked by nothing but the other options.
const NO_KNOWN_HOSTS: &[&str] = &[
    "UserKnownHostsFile=/dev/null",
    "GlobalKnownHostsFile=/dev/null",
    "VerifyHostKeyDNS=no",
    "UpdateHostKeys=no",
    // A connection that is there already was checked in another way.
    "ControlPath=none",
];

/// A running program. Its drop ends it.
#[derive(Debug)]
pub(super) struct Program {
    child: Child,
    /// What it says.
    errors: File,
    has_hash: bool,
}

impl Program {
    /// Starts the program for the SFTP subsystem of a server.
    ///
    /// # Errors
    /// If there is no such program.
    pub fn start(options: &SshOptions) -> io::Result<(Program, UnixStream, ChildStdout)> {
        let name = env::var_os(VARIABLE).unwrap_or_else(|| "ssh".into());
        let errors = messages()?;
        // A write to a pipe could end the process by SIGPIPE.
        let (output, theirs) = UnixStream::pair()?;
        let mut child = Command::new(&name)
            .args(arguments(options))
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::piped())
            .stderr(errors.try_clone()?)
            // Signals of the terminal are for this process, which may have to clean up on the
            // server.
            .process_group(0)
            .spawn()
            .map_err(|e| {
                let text = crate::strerror(&e).to_string();
                io::Error::new(e.kind(), format!("cannot run '{}': {text}", name.display()))
            })?;
        let input = child.stdout.take();
        let input = input.ok_or_else(|| io::Error::other("no pipe"))?;
        let program = Program {
            child,
            errors,
            has_hash: matches!(options.host_key, HostKeyCheck::Hash(..)),
        };
        Ok((program, output, input))
    }

    /// Another program, which says nothing.
    #[cfg(test)]
    pub fn silent(mut command: Command) -> Program {
        Program {
            child: command.spawn().expect("a program"),
            errors: messages().expect("a file in memory"),
            has_hash: false,
        }
    }

    /// Waits until it has ended, and returns what it has said, or nothing.
    pub fn end(mut self) -> String {
        let until = Instant::now() + ENDING;
        let status = loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < until => sleep(Duration::from_millis(5)),
                Ok(None) => {
                    // Ended already, if this fails.
                    let _ = self.child.kill();
                    break self.child.wait().ok();
                }
                ended => break ended.ok().flatten(),
            }
        };
        let said = said(&mut self.errors);
        if self.has_hash && said.contains("Host key verification failed") {
            return "the key of the server does not match 'host-key-check'".into();
        }
        match status {
            Some(status) if said.is_empty() && !status.success() => format!("ssh: {status}"),
            _ => said,
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Ended already, if these fail.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file in memory for what the program says, which cannot become longer.
fn messages() -> io::Result<File> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("zebu-ssh", flags)?);
    file.set_len(MESSAGES)?;
    fcntl_add_seals(&file, SealFlags::GROW)?;
    Ok(file)
}

/// The last lines of `errors`, as one.
fn said(errors: &mut File) -> String {
    const MOST: usize = 400;
    let mut bytes = Vec::new();
    // The position is one with that of the program, which has ended.
    let length = errors.stream_position().unwrap_or(0);
    let start = length.saturating_sub(16 * MOST as u64);
    if errors.seek(SeekFrom::Start(start)).is_ok() {
        // What could be read is better than nothing.
        let _ = errors.take(length - start).read_to_end(&mut bytes);
    }
    let text = String::from_utf8_lossy(&bytes);
    let lines = text.lines().map(str::trim);
    // Not the lines of signs that frame a warning.
    let lines = lines.filter(|line| line.contains(|c: char| c.is_alphanumeric()));
    let mut length = 0;
    let mut last: Vec<_> = lines
        .rev()
        .take_while(|line| {
            length += line.len();
            length <= MOST
        })
        .collect();
    last.reverse();
    last.join("; ")
}

/// The arguments. `--` and the checks of names (`names.rs`) keep a host from being an option.
fn arguments(options: &SshOptions) -> Vec<OsString> {
    let mut given: Vec<String> = Vec::new();
    let mut set = |options: &[&str]| given.extend(options.iter().map(|o| format!("-o{o}")));
    set(ALWAYS);
    match &options.host_key {
        HostKeyCheck::Configured => {}
        HostKeyCheck::KnownHosts => set(&["StrictHostKeyChecking=yes"]),
        HostKeyCheck::Nothing => {
            set(NO_KNOWN_HOSTS);
            set(&["StrictHostKeyChecking=no"]);
        }
        HostKeyCheck::Hash(kind, digits) => {
            // The program asks this command for the keys of a host, and names the one that the
            // server has.
            let command = format!(
                "KnownHostsCommand=/bin/sh -c 'if test \"$(echo \"$3\" | base64 -d | {}sum)\" = \
                 \"{digits}  -\"; then echo \"$1 $2 $3\"; fi' sh %H %t %K",
                kind.name()
            );
            set(NO_KNOWN_HOSTS);
            set(&["StrictHostKeyChecking=yes", &command]);
        }
    }
    let server = &options.server;
    if let Some(port) = server.port {
        given.extend(["-p".into(), port.to_string()]);
    }
    if let Some(user) = &server.user {
        given.extend(["-l".into(), user.clone()]);
    }
    given.extend(["-s", "--", &server.host, "sftp"].map(String::from));
    given.into_iter().map(OsString::from).collect()
}

#[cfg(test)]
mod tests {
    //! Guards against processes and memory that a server can have this process use up.
    use std::io::Write;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_dropped_program_is_gone() {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let program = Program::silent(command);
        let process = PathBuf::from(format!("/proc/{}", program.child.id()));
        assert!(process.exists());
        drop(program);
        assert!(!process.exists());
    }

    #[test]
    fn messages_are_bounded() {
        let mut errors = messages().unwrap();
        let mut theirs = errors.try_clone().unwrap();
        let line = b"a line of a server\n";
        while theirs.write_all(line).is_ok() {}
        assert!(errors.stream_position().unwrap() > MESSAGES - line.len() as u64);
        assert!(said(&mut errors).contains("a line of a server"));
        assert_eq!(errors.metadata().unwrap().len(), MESSAGES);
        assert_eq!(said(&mut messages().unwrap()), "");
    }
}
