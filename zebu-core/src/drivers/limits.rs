//! The limits of an untrusted image: [`Limits`].
//!
//! Sizes are compared with the header before any table is read. Work is counted while the image is
//! used, so that a tiny file with a disk of petabytes ends a job after some seconds.

use crate::storage::Work;
use crate::{Error, LimitExceeded, Result};

/// Work of looking up one run of a mapping, in bytes.
pub const LOOKUP_WORK: u64 = 512;
/// The size of the largest disk in bytes, as in QEMU.
pub const MAX_DISK: u64 = (i64::MAX as u64) >> 30 << 30;

options! {
    /// Bounds on an image that is opened under
    /// [`Policy::Untrusted`](crate::block::Policy::Untrusted). Exceeding one is the error
    /// [`LimitExceeded`], which names it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Limits {
        /// `virtual-size`: bytes of the disk. By default 64 TiB.
        pub virtual_size: u64,
        /// `table-size`: bytes of any one table: an L1 table, the refcount table, the snapshot
        /// table, the directory of bitmaps. By default 8 MiB.
        pub table_size: u64,
        /// `snapshots`: internal snapshots. By default 1024.
        pub snapshots: u64,
        /// `bitmaps`: persistent bitmaps. By default 1024.
        pub bitmaps: u64,
        /// `chain`: images in a chain that the caller's options describe
        /// (`backing.file.filename=…`). Headers name none. By default 8.
        pub chain: u64,
        /// `memory`: bytes of an image's L1 table and cached L2 tables; for a check, of its L1
        /// table and one byte for each cluster of its file. By default 256 MiB, enough for a file
        /// of 16 TiB with clusters of 64 KiB. Inflated clusters (8 MiB), the snapshot table and the
        /// buffers of requests come on top.
        pub memory: u64,
        /// `work`: bytes that may be read of the image's files and inflated while it is open,
        /// besides [`Limits::work_per_byte`]. A read counts as at least 512 bytes, and looking up a
        /// run of clusters that are mapped alike as 512. By default 8 GiB, half a minute of one
        /// processor at worst.
        ///
        /// It bounds work on a whole image (convert, compare, check, map). For a disk that is
        /// served to a guest it should be `u64::MAX`.
        pub work: u64,
        /// `work-per-byte`: additional work for each byte that the image's files occupy. By default
        /// 256, which is enough to read a sound image several times, also if it is compressed well.
        pub work_per_byte: u64,
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            virtual_size: 64 << 40,
            table_size: 8 << 20,
            snapshots: 1024,
            bitmaps: 1024,
            chain: 8,
            memory: 256 << 20,
            work: 8 << 30,
            work_per_byte: 256,
        }
    }
}

impl Limits {
    /// The bound of this name, to be changed; None: there is none.
    pub fn by_name(&mut self, name: &str) -> Option<&mut u64> {
        Some(match name {
            "virtual-size" => &mut self.virtual_size,
            "table-size" => &mut self.table_size,
            "snapshots" => &mut self.snapshots,
            "bitmaps" => &mut self.bitmaps,
            "chain" => &mut self.chain,
            "memory" => &mut self.memory,
            "work" => &mut self.work,
            "work-per-byte" => &mut self.work_per_byte,
            _ => return None,
        })
    }

    /// Refuses a disk that is too large.
    #[doc(hidden)]
    pub fn check_size(&self, bytes: u64) -> Result<()> {
        let limit = self.virtual_size;
        check_limit("virtual-size", "The virtual size", bytes, limit)
    }

    /// Refuses a chain that is too long.
    pub(crate) fn check_chain(&self, images: usize) -> Result<()> {
        let images = images as u64;
        check_limit("chain", "The chain's length", images, self.chain)
    }

    /// The work that is allowed for files that take up so many bytes.
    pub(crate) fn work_for(&self, bytes: u64) -> u64 {
        self.work
            .saturating_add(self.work_per_byte.saturating_mul(bytes))
    }

    /// Refuses a table that is too large to be kept in memory.
    #[doc(hidden)]
    pub fn check_kept_table(&self, what: &'static str, bytes: u64) -> Result<()> {
        self.check_table(what, bytes)?;
        check_limit("memory", "The need for memory", bytes, self.memory)
    }

    /// Refuses a table that is too large.
    #[doc(hidden)]
    pub fn check_table(&self, what: &'static str, bytes: u64) -> Result<()> {
        check_limit("table-size", what, bytes, self.table_size)
    }
}

/// The size in bytes of a disk of so many sectors of 512 bytes.
pub fn disk_size(sectors: u64) -> Result<u64> {
    match sectors.checked_mul(512) {
        Some(bytes) if bytes <= MAX_DISK => Ok(bytes),
        _ => Err(Error::os(libc::EFBIG).during("Could not refresh total sector count")),
    }
}

/// Counts work that is done with an image, if it has a limit.
#[inline]
pub fn spend(work: Option<&Work>, amount: u64) -> Result<()> {
    match work {
        None => Ok(()),
        Some(work) => Ok(work.spend(amount)?),
    }
}

/// Refuses `value` if it is beyond the limit of this name.
pub fn check_limit(name: &'static str, what: &'static str, value: u64, limit: u64) -> Result<()> {
    match value > limit {
        true => Err(LimitExceeded {
            name,
            what,
            value,
            limit,
        }
        .into()),
        false => Ok(()),
    }
}
