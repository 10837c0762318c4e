//! The largest file that this process may write (`RLIMIT_FSIZE`, `ulimit -f`).
#![allow(unsafe_code)]

/// Makes a write past the limit fail with `EFBIG` only. By default the kernel also sends
/// `SIGXFSZ`, which ends the process.
pub fn make_an_error() {
    // SAFETY: the disposition of a signal that nothing here handles.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}
