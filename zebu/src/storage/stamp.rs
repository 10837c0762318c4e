//! What tells whether a file was changed.

/// Which file it is, its size and its time of change.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// Device and inode of a file of this machine.
    pub file: Option<(u64, u64)>,
    /// In bytes.
    pub size: u64,
    /// The time of change since 1970, as far as 32 bits hold it: servers tell no more.
    pub seconds: u32,
    /// The rest of it; 0 if only seconds are known.
    pub nanoseconds: u32,
}
