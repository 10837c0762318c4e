//! Descriptors that the `threads` engine waits for: all of them, and its own
//! event descriptor, in one `poll(2)`.
#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::epoll;

use super::eventfd::EventFd;
use super::{Completion, Interest, Notify, Token};

/// How many entries of the engine without waiting may pass before descriptors
/// are looked at. Each look is a system call, and a busy caller asks often.
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
    /// What another event loop waits for: an epoll instance with the event descriptor and, from
    /// [`Watches::arm`] on, one duplicate of the descriptor of each wait. (There may be several
    /// waits for one descriptor, which epoll takes only once.)
    epoll: OnceCell<OwnedFd>,
    /// The duplicates, if there are any yet, in the order of `tokens`.
    registered: Option<Vec<OwnedFd>>,
}

impl Watches {
    /// None yet, beside `event`, which must stay open as long as this exists.
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

    /// The epoll instance. If it has to be made, it is readable: so is `event` then.
    pub(super) fn descriptor(&self, event: &EventFd) -> io::Result<RawFd> {
        if let Some(epoll) = self.epoll.get() {
            return Ok(epoll.as_raw_fd());
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&epoll, event, data, epoll::EventFlags::IN)?;
        event.notify();
        Ok(self.epoll.get_or_init(|| epoll).as_raw_fd())
    }

    /// From now on the epoll instance, if there is one, is readable if [`Watches::look`] would find something.
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
            match register(epoll, &poll) {
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
        if let (Some(registered), Some(epoll)) = (&mut self.registered, self.epoll.get()) {
            // Closing alone would leave it registered: the caller's descriptor is the same file.
            let duplicate = registered.swap_remove(at);
            let _ = epoll::delete(epoll, &duplicate);
        }
    }
}

/// Makes `epoll` wait for what `poll` waits for, through the duplicate that is returned.
fn register(epoll: &OwnedFd, poll: &libc::pollfd) -> io::Result<OwnedFd> {
    // SAFETY: the caller of `Engine::watch` keeps it open while it waits.
    let fd = unsafe { BorrowedFd::borrow_raw(poll.fd) };
    let duplicate = rustix::io::fcntl_dupfd_cloexec(fd, 0)?;
    let flags = epoll::EventFlags::from_bits_retain(poll.events as u32);
    epoll::add(epoll, &duplicate, epoll::EventData::new_u64(0), flags)?;
    Ok(duplicate)
}
