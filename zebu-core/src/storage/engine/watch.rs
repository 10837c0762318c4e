//! Descriptors that the `threads` engine waits for, with its own event, in one `poll(2)`.
#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::epoll;

use super::eventfd::EventFd;
use super::{Completion, Interest, Notify, Token};

/// The engine polls descriptors in one of so many entries without waiting, since that is a system
/// call.
const LOOK_EVERY: u32 = 8;

/// The waits.
pub struct Watches {
    /// The event descriptor, then those of `tokens` in the same order.
    polled: Vec<libc::pollfd>,
    tokens: Vec<Token>,
    /// Cancelled before they were ready.
    cancelled: Vec<Completion>,
    /// Entries since the last `poll(2)`.
    unseen: u32,
    /// For another event loop: an epoll instance with the event descriptor and, from
    /// [`Watches::arm`] on, a duplicate of the descriptor of each wait. (epoll takes a descriptor
    /// only once, and there may be several waits for it.)
    epoll: OnceCell<OwnedFd>,
    /// The duplicates, if there are any yet, in the order of `tokens`.
    registered: Option<Vec<OwnedFd>>,
}

impl Watches {
    /// No waits. `event` must stay open as long as this exists.
    pub(super) fn new(event: BorrowedFd<'_>) -> Self {
        Watches {
            polled: vec![libc::pollfd {
                fd: event.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            }],
            tokens: Vec::new(),
            cancelled: Vec::new(),
            unseen: 0,
            epoll: OnceCell::new(),
            registered: None,
        }
    }

    /// The epoll instance. If this call makes it, it is readable.
    pub(super) fn descriptor(&self, event: &EventFd) -> io::Result<RawFd> {
        if let Some(epoll) = self.epoll.get() {
            return Ok(epoll.as_raw_fd());
        }
        let epoll = new_epoll(event)?;
        event.notify();
        Ok(self.epoll.get_or_init(|| epoll).as_raw_fd())
    }

    /// From now on the epoll instance, if there is one, is readable if [`Watches::look`] would find
    /// something.
    pub(super) fn arm(&mut self) {
        if self.registered.is_none() && self.epoll.get().is_some() {
            self.registered = Some(Vec::new());
            let waits = std::mem::take(&mut self.tokens);
            let polled = self.polled.split_off(1);
            for (token, poll) in waits.into_iter().zip(polled) {
                self.insert(token, poll);
            }
        }
    }

    /// Adds a wait; one that cannot be registered ends with that error.
    fn insert(&mut self, token: Token, poll: libc::pollfd) {
        if let (Some(registered), Some(epoll)) = (&mut self.registered, self.epoll.get()) {
            match register(epoll, poll.fd, poll.events) {
                Ok(duplicate) => registered.push(duplicate),
                Err(e) => {
                    let errno = e.raw_os_error().unwrap_or(libc::EIO);
                    return self.cancelled.push((token, -errno));
                }
            }
        }
        self.tokens.push(token);
        self.polled.push(poll);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(super) fn add(&mut self, token: Token, fd: RawFd, interest: Interest) {
        let poll = libc::pollfd {
            fd,
            events: interest.events(),
            revents: 0,
        };
        self.insert(token, poll);
    }

    /// Cancels the wait `token`, if it has not ended.
    pub(super) fn cancel(&mut self, token: Token) {
        if let Some(at) = self.tokens.iter().position(|t| *t == token) {
            self.remove(at);
            self.cancelled.push((token, -libc::ECANCELED));
        }
    }

    /// Takes the waits that were cancelled.
    pub(super) fn take_cancelled(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.cancelled);
    }

    /// Polls in some of the calls, without waiting.
    pub(super) fn look_sometimes(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        self.unseen += 1;
        if !self.is_empty() && self.unseen >= LOOK_EVERY {
            self.look(false, done)?;
        }
        Ok(())
    }

    /// Takes the waits that have ended; if `wait`, blocks until there is one or the event is
    /// readable. Returns whether the event is.
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
        // From the last on: the one that takes the place of a removed one was handled before.
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
        if let (Some(registered), Some(epoll)) = (&mut self.registered, self.epoll.get()) {
            // Closing alone leaves it registered: the caller's descriptor is of the same file.
            let duplicate = registered.swap_remove(at);
            let _ = epoll::delete(epoll, &duplicate);
        }
    }
}

/// An epoll instance that waits for `event`.
pub fn new_epoll(event: &EventFd) -> io::Result<OwnedFd> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let data = epoll::EventData::new_u64(0);
    epoll::add(&epoll, event, data, epoll::EventFlags::IN)?;
    Ok(epoll)
}

/// Makes `epoll` wait for these events of a descriptor, through the duplicate that is returned.
pub fn register(epoll: &OwnedFd, fd: RawFd, events: libc::c_short) -> io::Result<OwnedFd> {
    // SAFETY: the caller of `Engine::watch` keeps it open while it waits.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let duplicate = rustix::io::fcntl_dupfd_cloexec(fd, 0)?;
    let flags = epoll::EventFlags::from_bits_retain(events as u32);
    epoll::add(epoll, &duplicate, epoll::EventData::new_u64(0), flags)?;
    Ok(duplicate)
}
