//! What tells whether a file was changed.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

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
    /// What else is known of a file of this machine.
    pub inode: Option<InodeStamp>,
}

/// What the kernel keeps of a file of this machine.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodeStamp {
    /// The time of change of the inode, in seconds and nanoseconds. Programs set the other time as they
    /// like, this one the kernel alone.
    changed: (i64, i64),
    /// What changes that time too, and is not content: links, mode, owner and group.
    status: (u64, u32, u32, u32),
}

impl FileStamp {
    /// That of a file of this machine.
    pub fn of(found: &Metadata) -> FileStamp {
        FileStamp {
            file: Some((found.dev(), found.ino())),
            size: found.len(),
            seconds: found.mtime() as u32,
            nanoseconds: found.mtime_nsec() as u32,
            inode: Some(InodeStamp {
                changed: (found.ctime(), found.ctime_nsec()),
                status: (found.nlink(), found.mode(), found.uid(), found.gid()),
            }),
        }
    }

    /// Whether the content is as it was `before`, which had this stamp. A file that has got or lost a name,
    /// or another owner, is taken to have its content if its other time says so.
    pub fn has_content_of(&self, before: &FileStamp) -> bool {
        let is_same = match (self.inode, before.inode) {
            (Some(now), Some(before)) => now == before || now.status != before.status,
            _ => true,
        };
        is_same && self.has_time_of(before)
    }

    /// The same of what may have no stamp, then or now.
    pub fn is_same_content(now: Option<FileStamp>, before: Option<FileStamp>) -> bool {
        match (now, before) {
            (Some(now), Some(before)) => now.has_content_of(&before),
            (now, before) => now == before,
        }
    }

    /// The same by the time alone that programs can set: for a file that was renamed, which changes the
    /// other one.
    pub fn has_time_of(&self, before: &FileStamp) -> bool {
        let inode = before.inode;
        FileStamp { inode, ..*self } == *before
    }
}
