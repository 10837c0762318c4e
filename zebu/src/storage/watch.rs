//! Descriptors that the `threads` engine waits for: all of them, and its own
//! event descriptor, in one `poll(2)`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use super::engine::{Completion, Interest, Token};

/// How many entries of the engine without waiting may pass before descriptors
/// are looked at. A look is a system call, and who is busy asks often.
const LOOK_EVERY: u32 = 8;

/// What is waited for.
pub(super) struct Watches {
    /// The event descriptor, then what `tokens` name, in the same order.
    polled: Vec<libc::pollfd>,
    tokens: Vec<Token>,
    /// Given up before they were ready.
    cancelled: Vec<Completion>,
    /// Entries since the last look.
    unseen: u32,
}

impl Watches {
    /// None yet, beside `event`.
    pub(super) fn new(event: RawFd) -> Self {
        Watches {
            polled: vec![libc::pollfd {
                fd: event,
                events: libc::POLLIN,
                revents: 0,
            }],
            tokens: Vec::new(),
            cancelled: Vec::new(),
            unseen: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(super) fn add(&mut self, token: Token, fd: RawFd, interest: Interest) {
        self.tokens.push(token);
        self.polled.push(libc::pollfd {
            fd,
            events: interest.events(),
            revents: 0,
        });
    }

    /// Ends the wait `token`, if there still is one.
    pub(super) fn cancel(&mut self, token: Token) {
        if let Some(at) = self.tokens.iter().position(|t| *t == token) {
            self.remove(at);
            self.cancelled.push((token, -libc::ECANCELED));
        }
    }

    /// Waits that were cancelled.
    pub(super) fn take_cancelled(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.cancelled);
    }

    /// Looks now and then, without waiting: what an engine that is busy with
    /// other things must do.
    pub(super) fn look_sometimes(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        self.unseen += 1;
        if !self.is_empty() && self.unseen >= LOOK_EVERY {
            self.look(false, done)?;
        }
        Ok(())
    }

    /// Takes the waits that ended; if `wait`, blocks until there is one or the
    /// event descriptor is readable. Says whether the latter is.
    pub(super) fn look(&mut self, wait: bool, done: &mut Vec<Completion>) -> io::Result<bool> {
        self.unseen = 0;
        let timeout = if wait { -1 } else { 0 };
        let count = self.polled.len() as libc::nfds_t;
        // SAFETY: the array has `count` entries, and is ours.
        let ready = unsafe { libc::poll(self.polled.as_mut_ptr(), count, timeout) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::Interrupted => Ok(false),
                _ => Err(error),
            };
        }
        // From the last on: what takes the place of a removed one was seen.
        for at in (0..self.tokens.len()).rev() {
            let events = self.polled[at + 1].revents;
            if events != 0 {
                let token = self.tokens[at];
                self.remove(at);
                let bad = events & libc::POLLNVAL != 0;
                done.push((token, if bad { -libc::EBADF } else { events.into() }));
            }
        }
        Ok(self.polled[0].revents != 0)
    }

    fn remove(&mut self, at: usize) {
        self.tokens.swap_remove(at);
        self.polled.swap_remove(at + 1);
    }
}
