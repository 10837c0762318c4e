//! Waiting for descriptors (sockets, pipes, events, timers) and for time to
//! pass, on a queue, beside its operations.
#![allow(unsafe_code)]

use std::fs::File;
use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use super::engine::Interest;
use super::queue::{Io, Queue};

/// A wait for a descriptor, made by [`Queue::readable`] and
/// [`Queue::writable`]. The drop ends the wait.
pub struct Ready<'fd> {
    io: Io,
    _descriptor: PhantomData<BorrowedFd<'fd>>,
}

impl Future for Ready<'_> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io)
            .poll(context)
            .map(|result| result.map(drop))
    }
}

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        // The `Io`, dropped next, waits for the end, which is near then.
        self.io.cancel_watch();
    }
}

impl Queue {
    /// Ready when a read from `fd` would not block: there are bytes, or the end, or an error that
    /// the read returns.
    ///
    /// `fd` is a socket, a pipe, an event, a timer or the like; a signalfd is not supported by the
    /// `native` engine. Any number of waits may be in flight, with the `native` engine 64 (more end
    /// with `ENOSPC`).
    pub fn readable<'fd>(&self, fd: &'fd (impl AsFd + ?Sized)) -> Ready<'fd> {
        self.ready(fd.as_fd(), Interest::Readable)
    }

    /// Ready when a write to `fd` would not block; as [`Queue::readable`].
    pub fn writable<'fd>(&self, fd: &'fd (impl AsFd + ?Sized)) -> Ready<'fd> {
        self.ready(fd.as_fd(), Interest::Writable)
    }

    fn ready<'fd>(&self, fd: BorrowedFd<'fd>, interest: Interest) -> Ready<'fd> {
        Ready {
            io: self.watch(fd.as_raw_fd(), interest),
            _descriptor: PhantomData,
        }
    }

    /// Waits for `duration` (`timerfd`).
    ///
    /// # Errors
    /// If there is no descriptor free.
    pub async fn sleep(&self, duration: Duration) -> io::Result<()> {
        let timer = timer(duration)?;
        self.readable(&timer).await
    }
}

/// A descriptor that is readable when `duration` has passed.
fn timer(duration: Duration) -> io::Result<File> {
    let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fd is new and ours.
    let timer = unsafe { File::from_raw_fd(fd) };
    // Zero would disarm the timer.
    let duration = duration.max(Duration::from_nanos(1));
    let time = libc::itimerspec {
        it_interval: libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        },
        it_value: libc::timespec {
            // `libc::time_t` is deprecated where the C library is musl.
            tv_sec: duration.as_secs().min(i64::MAX as u64) as _,
            tv_nsec: duration.subsec_nanos().into(),
        },
    };
    // SAFETY: `time` is valid for reading; the old setting is not wanted.
    if unsafe { libc::timerfd_settime(fd, 0, &time, std::ptr::null_mut()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(timer)
}
