//! What threads meet at, in those files whose interleavings are tested: the
//! standard library's, or in these tests (`cfg(shuttle)`) that of a scheduler
//! which chooses the thread that runs at each step.

#[cfg(not(shuttle))]
pub(crate) use std::{
    hint,
    sync::{Mutex, MutexGuard, atomic},
};

#[cfg(shuttle)]
pub(crate) use shuttle::{
    hint,
    sync::{Mutex, MutexGuard, atomic},
};
