//! The limits of an untrusted image: [`Limits`].
//!
//! The sizes are compared with what the header says before any table is read.
//! Work is counted while the image is used, so that a tiny file that claims
//! petabytes ends a job after some seconds, whatever its tables say.

use crate::{LimitExceeded, Result};

/// What a look at one run of a mapping counts as, in bytes of work.
pub(crate) const LOOKUP_WORK: u64 = 512;

options! {
    /// Bounds on an image that is opened under
    /// [`Policy::Untrusted`](crate::block::Policy::Untrusted). Beyond one of them
    /// is an error, [`LimitExceeded`], that names it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Limits {
        /// `virtual-size`: bytes of the disk. By default 64 TiB.
        pub virtual_size: u64,
        /// `table-size`: bytes of any one table that the header or a snapshot
        /// names: an L1 table, the refcount table, the snapshot table, the
        /// directory of bitmaps. By default 8 MiB.
        pub table_size: u64,
        /// `snapshots`: internal snapshots. By default 1024.
        pub snapshots: u64,
        /// `bitmaps`: persistent bitmaps. By default 1024.
        pub bitmaps: u64,
        /// `chain`: images in the chain that the caller's own options describe
        /// (`backing.file.filename=…`); the images name none. By default 8.
        pub chain: u64,
        /// `memory`: bytes of an image's L1 table and its cached L2 tables, and of
        /// its L1 table and one byte for each cluster of its file, which is what a
        /// check counts with. By default 256 MiB, enough for a file of 16 TiB with
        /// clusters of 64 KiB. Inflated clusters (8 MiB), the snapshot table and the
        /// buffers of requests come on top.
        pub memory: u64,
        /// `work`: bytes that may be read of the image's files and inflated from
        /// the opening on, besides [`Limits::work_per_byte`]. A read counts as 512 bytes
        /// at least; a look at a run of clusters that are mapped alike counts as
        /// 512. By default 8 GiB, half a minute of one processor at worst.
        ///
        /// It bounds what is done to a whole image (convert, compare, check,
        /// map). A disk that is served to a guest, which may read for ever, wants
        /// `u64::MAX` here.
        pub work: u64,
        /// `work-per-byte`: so much work more for each byte that the image's files
        /// take up on their device. By default 256: more than what reading a sound
        /// image a few times comes to, also if it is compressed well.
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
    /// The bound of this name, to be set.
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
    pub(crate) fn check_size(&self, bytes: u64) -> Result<()> {
        let limit = self.virtual_size;
        check_limit("virtual-size", "The virtual size", bytes, limit)
    }

    /// Refuses a chain that is too long.
    pub(crate) fn check_chain(&self, images: usize) -> Result<()> {
        let images = images as u64;
        check_limit("chain", "The chain's length", images, self.chain)
    }

    /// The work that may be done with files that take up so many bytes.
    pub(crate) fn work_for(&self, bytes: u64) -> u64 {
        self.work
            .saturating_add(self.work_per_byte.saturating_mul(bytes))
    }

    /// Refuses a table that is too large.
    pub(crate) fn check_table(&self, what: &'static str, bytes: u64) -> Result<()> {
        check_limit("table-size", what, bytes, self.table_size)
    }
}

/// Refuses `value` if it is beyond the limit of this name.
pub(crate) fn check_limit(
    name: &'static str,
    what: &'static str,
    value: u64,
    limit: u64,
) -> Result<()> {
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
