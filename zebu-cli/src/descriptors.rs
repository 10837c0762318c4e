//! How many files and sockets the process may have open.
#![allow(unsafe_code)]

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
