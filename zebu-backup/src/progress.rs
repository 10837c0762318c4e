//! The progress of a backup.

use std::ops::ControlFlow;

/// What is being done, with a disk or file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A disk is compared with its last point.
    Compare,
    /// What has changed is copied.
    Copy,
    /// A file is hashed.
    Hash,
    /// A disk is compared with its backup.
    Verify,
    /// An increment is merged into the file before it.
    Merge,
}

/// Receives the step, its disk or file, and the bytes done and to be done; breaks to cancel.
pub(crate) type OnProgress<'a> = &'a mut dyn FnMut(Step, &str, u64, u64) -> ControlFlow<()>;
