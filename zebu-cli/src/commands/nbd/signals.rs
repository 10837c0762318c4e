//! Signals as events on a queue.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::FromRawFd;

use zebu::storage::Queue;

/// What a signal asks for.
pub enum Event {
    /// To say what was done.
    Statistics,
    /// To end.
    End,
}

/// Takes SIGTERM, SIGINT, SIGHUP and SIGUSR1 from now on, in this thread and
/// those that it starts.
pub struct Signals(File);

impl Signals {
    /// Called before there are other threads.
    pub fn new() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the set is initialised by the first call, and valid in all.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            let none = std::ptr::null_mut();
            let result = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), none);
            if result != 0 {
                return Err(io::Error::from_raw_os_error(result));
            }
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fd is new and ours.
        Ok(Signals(unsafe { File::from_raw_fd(fd) }))
    }

    /// The next one.
    pub async fn next(&self, queue: &Queue) -> io::Result<Event> {
        loop {
            queue.readable(&self.0).await?;
            let mut info = [0; size_of::<libc::signalfd_siginfo>()];
            match (&self.0).read(&mut info) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
                Err(e) => return Err(e),
            }
            // The number of the signal comes first.
            let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
            return Ok(match number {
                libc::SIGUSR1 => Event::Statistics,
                _ => Event::End,
            });
        }
    }
}
