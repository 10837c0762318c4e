//! Operations in flight.
#![allow(unsafe_code)]

use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::super::buffer::Iov;
use super::super::engine::{Interest, Token};
use super::super::engine::{Op, OpKind};
use super::Queue;

/// Operations in flight.
#[derive(Default)]
pub struct Slots {
    pub slots: Vec<Slot>,
    free: Vec<Token>,
}

pub enum Slot {
    Free,
    /// Started: the waker for its end, and its file, which stays open until then; a wait for a
    /// descriptor has no file.
    Busy(Option<Waker>, Option<Arc<OwnedFd>>),
    /// Ended with this result, which was not taken.
    Ended(i32),
}

impl Slots {
    fn take(&mut self, fd: Option<Arc<OwnedFd>>) -> Token {
        match self.free.pop() {
            Some(token) => {
                self.slots[token as usize] = Slot::Busy(None, fd);
                token
            }
            None => {
                self.slots.push(Slot::Busy(None, fd));
                (self.slots.len() - 1) as Token
            }
        }
    }
}

impl Queue {
    /// Starts one operation.
    ///
    /// # Safety
    /// The memory (and `iovec` array) that `op` names stays valid and otherwise
    /// untouched until the [`Io`] has ended or was dropped, and for ever if it is
    /// forgotten. `fd` is the descriptor that `op` names.
    pub(crate) unsafe fn submit(&self, op: Op, fd: &Arc<OwnedFd>) -> Io {
        debug_assert_eq!(self.inner.thread, std::thread::current().id());
        debug_assert_eq!(op.fd, fd.as_raw_fd());
        // SAFETY: passed on.
        if let Some(result) = unsafe { self.inner.read_at_once(&op) } {
            return self.io(State::AtOnce(result));
        }
        let token = self.inner.slots.borrow_mut().take(Some(fd.clone()));
        // The `Io` ends after the operation, also if it is dropped.
        self.inner.start(token, op);
        self.inner.submitted();
        self.io(State::Started(token))
    }

    /// Begins to wait for a descriptor, which stays open until the [`Io`] has
    /// ended or was dropped; see [`Io::cancel_watch`].
    pub(in super::super) fn watch(&self, fd: RawFd, interest: Interest) -> Io {
        debug_assert_eq!(self.inner.thread, std::thread::current().id());
        let token = self.inner.slots.borrow_mut().take(None);
        self.inner.watches.set(self.inner.watches.get() + 1);
        self.inner.engine.borrow_mut().watch(token, fd, interest);
        self.inner.submitted();
        self.io(State::Started(token))
    }

    fn io(&self, state: State) -> Io {
        Io {
            queue: self.for_itself(),
            state,
            _not_send: PhantomData,
        }
    }

    /// Starts one operation on the memory of `iov`; as [`Queue::submit`], on
    /// the promise that made the `Iov`. `buffered`: through the page cache.
    ///
    /// # Safety
    /// The promise of the `Iov` holds, and the returned array is kept as long as the
    /// [`Io`].
    pub(crate) unsafe fn submit_iov(
        &self,
        kind: OpKind,
        fd: &Arc<OwnedFd>,
        offset: u64,
        iov: &Iov,
        buffered: bool,
    ) -> (Io, Option<Box<[libc::iovec]>>) {
        let mut op = Op {
            segments: 1,
            buffered,
            ..Op::without_memory(kind, fd.as_raw_fd(), offset, iov.len() as u64)
        };
        if let Some((ptr, _)) = iov.single() {
            op.memory = ptr.cast();
            // SAFETY: on the promise of the Iov.
            return (unsafe { self.submit(op, fd) }, None);
        }
        let mut array = Vec::new();
        iov.for_each(|ptr, len| {
            // The kernel takes no more in one call. The caller continues after the short result.
            if array.len() < libc::UIO_MAXIOV as usize {
                array.push(libc::iovec {
                    iov_base: ptr.cast(),
                    iov_len: len,
                })
            }
        });
        op.length = array.iter().map(|s| s.iov_len as u64).sum();
        // A slice of many segments may be of one, or of none. Engines get one segment without an
        // array.
        if array.len() <= 1 {
            op.memory = array.first().map_or(std::ptr::null_mut(), |s| s.iov_base);
            // SAFETY: as above.
            return (unsafe { self.submit(op, fd) }, None);
        }
        let mut array = array.into_boxed_slice();
        op.segments = array.len() as u32;
        op.memory = array.as_mut_ptr().cast();
        // SAFETY: as above; the array lives as long as the Io (the caller
        // keeps both in one place, the Io first).
        (unsafe { self.submit(op, fd) }, Some(array))
    }
}

/// One operation in flight: a future of the bytes moved.
///
/// Dropping it waits for the end, since the memory may go away afterwards.
pub struct Io {
    queue: Queue,
    state: State,
    _not_send: PhantomData<*const ()>,
}

/// Where an [`Io`] is.
#[derive(Clone, Copy, Debug)]
enum State {
    /// It was executed at once, with this result.
    AtOnce(i32),
    /// As this, and its future has yielded.
    Yielded(i32),
    /// The engine has it, or its result is in the slot.
    Started(Token),
    /// The result was taken.
    Ended,
}

impl Io {
    /// Makes this, which [`Queue::watch`] made, end soon if it has not ended.
    pub(in super::super) fn cancel_watch(&mut self) {
        if let State::Started(token) = self.state
            && self.take_result(token).is_none()
        {
            self.queue.inner.engine.borrow_mut().unwatch(token);
            self.queue.inner.submitted();
        }
    }

    fn take_result(&mut self, token: Token) -> Option<i32> {
        let mut slots = self.queue.inner.slots.borrow_mut();
        let slot = &mut slots.slots[token as usize];
        let Slot::Ended(result) = *slot else {
            return None;
        };
        *slot = Slot::Free;
        slots.free.push(token);
        self.state = State::Ended;
        Some(result)
    }

    /// Has `waker` woken when the operation ends.
    fn wake_later(&self, token: Token, waker: &Waker) {
        let slots = &self.queue.inner.slots;
        let known = match &slots.borrow().slots[token as usize] {
            Slot::Busy(Some(old), _) => old.will_wake(waker),
            _ => false,
        };
        if !known {
            // Cloned and dropped with nothing borrowed, since wakers are foreign code.
            let new = waker.clone();
            let old = match &mut slots.borrow_mut().slots[token as usize] {
                Slot::Busy(waker, _) => waker.replace(new),
                _ => unreachable!("it has not ended"),
            };
            drop(old);
        }
    }
}

impl Future for Io {
    type Output = io::Result<usize>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let result = match self.state {
            State::AtOnce(result) if self.queue.inner.goes_on() => {
                self.state = State::Ended;
                result
            }
            State::AtOnce(result) => {
                self.state = State::Yielded(result);
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            State::Yielded(result) => {
                self.state = State::Ended;
                result
            }
            State::Started(token) => match self.take_result(token) {
                Some(result) => result,
                None => {
                    self.wake_later(token, context.waker());
                    return Poll::Pending;
                }
            },
            State::Ended => unreachable!("polled after it was ready"),
        };
        Poll::Ready(match usize::try_from(result) {
            Ok(bytes) => Ok(bytes),
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        })
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        let State::Started(token) = self.state else {
            return;
        };
        if self.take_result(token).is_some() {
            return;
        }
        while self.take_result(token).is_none() {
            // Also if futures are ready: they do not run now.
            self.queue.inner.drive(true);
        }
        self.queue.inner.arm_again();
    }
}
