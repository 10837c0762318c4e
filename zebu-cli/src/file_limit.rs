//! The largest file that this process may write (`RLIMIT_FSIZE`, `ulimit -f`).
#![allow(unsafe_code)]

/// Makes a write past the limit fail with `EFBIG`. Without this the kernel also sends `SIGXFSZ`,
/// which ends the process, and with it every other request and what was not flushed.
pub fn make_an_error() {
    // SAFETY: the disposition of a signal that nothing here handles.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}
