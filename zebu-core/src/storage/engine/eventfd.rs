//! An event that wakes a thread from its engine.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::Notify;

/// An `eventfd(2)`.
#[derive(Debug)]
pub struct EventFd(File);

impl EventFd {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: a system call without pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fd is new and ours.
        Ok(EventFd(unsafe { File::from_raw_fd(fd) }))
    }

    /// Removes the notifications so far.
    pub(super) fn clear(&self) {
        // EAGAIN means that there were none.
        let _ = (&self.0).read(&mut [0; 8]);
    }

    /// Waits until there are some, or a signal comes.
    pub(super) fn wait(&self) -> io::Result<()> {
        let mut event = [PollFd::new(&self.0, PollFlags::IN)];
        match poll(&mut event, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    pub(super) fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Notify for EventFd {
    fn notify(&self) {
        // EAGAIN means that the counter is full: it is readable already.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }
}
