//! What a process has opened is of no use in its children: the threads are not there, and rings and
//! locks are shared with the parent.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Failure, Result};

/// How often this process and those before it were forked.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process in which something was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// This one.
    pub fn current() -> Process {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the function only adds to a counter, and stays as long as the library, which
            // cannot be unloaded (it has threads). Without memory for it no fork is noticed.
            unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        });
        Process(FORKS.load(Ordering::Relaxed))
    }

    /// Whether it is this one.
    pub fn is_current(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Refuses what was made before a fork.
    pub fn check(self) -> Result<()> {
        match self.is_current() {
            true => Ok(()),
            false => Err(Failure::misuse(
                "This was opened before a fork: open it again in this process",
            )),
        }
    }
}
