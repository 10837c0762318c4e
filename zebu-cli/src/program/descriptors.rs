//! The descriptors of the process: how many it may have, and which it was started without.
#![allow(unsafe_code)]

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, Ordering};

/// Raises the limit to what is allowed: an image may have many files, and each connection of a
/// server has some three. Where that cannot be done, fewer can be open at a time.
pub fn allow_all() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is valid for both calls.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// A bit for each of standard input, output and error that was closed at the start. It is static since it is
/// set before `main`.
static CLOSED: AtomicU8 = AtomicU8::new(0);

/// Whether the process was started without this descriptor. The standard library has opened
/// `/dev/null` in its place.
pub fn was_closed(number: RawFd) -> bool {
    (0..3).contains(&number) && CLOSED.load(Ordering::Relaxed) & 1 << number != 0
}

extern "C" fn note_closed() {
    for number in 0..3 {
        // SAFETY: fcntl(2) only looks whether the descriptor is open.
        if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
            CLOSED.fetch_or(1 << number, Ordering::Relaxed);
        }
    }
}

// SAFETY: the C library calls the functions in this section before `main`, and with it before the
// standard library is set up. This one uses nothing of it but an atomic, and needs none of the
// arguments.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_CLOSED: extern "C" fn() = note_closed;
