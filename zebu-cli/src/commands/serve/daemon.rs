//! `--fork`: the server runs in a child process, and the parent ends when it is ready.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use crate::program::Failure;

/// The process that waits for the child to be ready.
pub struct Parent(UnixStream);

/// Forks. Returns in the child. The parent ends when the child is ready, or with status 1 if the
/// child ends before, which has printed the reason.
pub fn fork() -> Result<Parent, Failure> {
    let failed = |e: io::Error| Failure::new(format!("Failed to fork: {}", zebu::strerror(&e)));
    let (mut ours, theirs) = UnixStream::pair().map_err(failed)?;
    // SAFETY: there is one thread, so the child has all that it may need.
    match unsafe { libc::fork() } {
        -1 => Err(failed(io::Error::last_os_error())),
        0 => {
            drop(ours);
            // SAFETY: a system call without pointers.
            unsafe { libc::setsid() };
            Ok(Parent(theirs))
        }
        _ => {
            drop(theirs);
            let mut word = [1];
            let _ = ours.read(&mut word);
            Err(Failure::Said(word[0]))
        }
    }
}

impl Parent {
    /// Lets go of the terminal and of the parent, which ends well.
    pub fn ready(mut self) -> io::Result<()> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        std::env::set_current_dir("/")?;
        for fd in 0..3 {
            // SAFETY: it makes a descriptor of the process mean another file;
            // nothing else owns the standard ones.
            if unsafe { libc::dup2(null.as_raw_fd(), fd) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        self.0.write_all(&[0])
    }
}
