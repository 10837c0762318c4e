//! What threads meet at, in those files whose interleavings are tested: the
//! standard library's, or in these tests (the feature `interleavings`) that of a scheduler
//! which chooses the thread that runs at each step.

#[cfg(not(all(test, feature = "interleavings")))]
pub use std::{
    hint,
    sync::{Mutex, MutexGuard, atomic},
};

#[cfg(all(test, feature = "interleavings"))]
pub use shuttle::{
    hint,
    sync::{Mutex, MutexGuard, atomic},
};
