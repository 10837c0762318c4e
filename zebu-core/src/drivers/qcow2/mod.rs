//! qcow2 images: all that knows what is in them. The layers above ask by
//! [`FormatImage`](crate::drivers::FormatImage), which `driver` implements.
//!
//! To be read in this order:
//!
//! - `structures`: what is on the disk, as pure values;
//! - `open`, `limits`, `luks`: from a file to an [`Image`]; `shared`: an image that tasks share;
//! - `map`: the map step, guest range in, extent out;
//! - `disk`: writes, zeroes, another size, as the device asks for them;
//! - `writer`: the steps of a change, and of a commit, of an image that is written (`Writer`);
//! - `allocation`: refcounts, and clusters taken and freed;
//! - `header`, `resize`: changes of the header, and of the tables of a whole image;
//! - `snapshots`, `bitmaps`: one subject each;
//! - `create`: new images; `check`: check and repair; `amend`: other options; `stream`: images in order;
//! - `interleavings`: tests of what threads share, under a scheduler.

mod allocation;
pub(crate) mod amend;
mod bitmaps;
pub(crate) mod check;
pub(crate) mod create;
mod disk;
mod driver;
mod header;
#[cfg(all(test, feature = "interleavings"))]
mod interleavings;
mod limits;
mod luks;
mod map;
mod open;
mod resize;
mod shared;
mod snapshots;
pub(crate) mod stream;
pub(crate) mod structures;
mod writer;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::drivers::cache::Cache;
use crate::drivers::commits::Commits;
use crate::drivers::qcow2::structures::{Geometry, Header, Snapshot};
use crate::drivers::{CompressedData, Epochs, Gate, Ranges, spend};
use crate::storage::{Queue, Storage, Work};
use crate::{Error, Result};

pub use crate::drivers::{Extent, Limits, Mapping};
use allocation::frees::Frees;
pub use allocation::protect::OverlapChecks;
use allocation::protect::Protected;
use allocation::refcounts::Refcounts;
use allocation::space::Ahead;
use bitmaps::Bitmaps;
pub use driver::DRIVER;
pub(crate) use header::check_recorded;
pub(crate) use map::inflate::inflater;
pub use open::OpenImage;
pub use shared::SharedImage;
pub use snapshots::SnapshotChange;
pub use snapshots::SnapshotName;
use writer::dirty::Dirty;

/// How much of the tables is kept in memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheOptions {
    /// Bytes of L2 tables; None: enough for the whole disk, up to 32 MiB.
    pub size: Option<u64>,
    /// Bytes of one slice, the unit of caching: a power of two from 512 to the
    /// cluster size; None: 4096, or the cluster size if that is smaller.
    pub entry_size: Option<u64>,
}

/// An open qcow2 image.
///
/// Shared by reference between any number of threads, each with its queue.
#[derive(Debug)]
pub struct Image {
    file: Arc<dyn Storage>,
    /// What the guest's clusters are read and written through: the same as `file`, an external data file, or a
    /// filter over either that encrypts.
    data: Arc<dyn Storage>,
    /// Whether `data` is another storage than `file`.
    has_own_data: bool,
    /// Bytes that `file` has at least.
    file_len: AtomicU64,
    /// Bytes that an external data file has at least.
    data_len: AtomicU64,
    header: Header,
    geometry: Geometry,
    /// Whether the last cluster of the file must be complete.
    whole_clusters: bool,
    snapshots: Vec<Snapshot>,
    /// The snapshot that it shows instead of the active disk.
    shown: Option<Snapshot>,
    /// Its limits, if it is untrusted.
    limits: Option<Limits>,
    l1: map::table::L1Table,
    /// Entries of a slice; a power of two.
    slice_entries: usize,
    /// Logarithm of the bytes of the disk that a slice maps.
    slice_bits: u32,
    /// By slice number: guest offset over what a slice maps.
    slices: Cache<map::table::Slice>,
    /// Inflated clusters by the host offset and length of their data.
    inflated: Cache<Vec<u8>>,
    preallocated: map::preallocation::Known,
    /// The work that may still be done with an untrusted image.
    work: Option<Arc<Work>>,
    tasks: shared::Tasks,
    /// If it is open for writing.
    writer: Option<Box<Writer>>,
    /// How it was written, if it was closed.
    written: Option<WriteOptions>,
    /// Bitmaps that readers follow, while the image is not written.
    followed: bitmaps::Followed,
}

/// How an image is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// Punch holes into the file where the guest discards.
    pub punch_request: bool,
    /// Punch holes into the file where deleting a snapshot frees clusters.
    pub punch_snapshot: bool,
    /// Punch holes into the file where anything else frees clusters.
    pub punch_other: bool,
    /// Clusters of which the guest discards all stay allocated, as zeroes (version 3).
    pub keep_discarded: bool,
    /// The structures against which writes of data are checked.
    pub overlap_checks: OverlapChecks,
    /// Store bitmaps with each flush, not only when the image is closed.
    pub store_bitmaps: bool,
}

/// The shared state of the requests that change an image.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) options: WriteOptions,
    /// By number of the guest cluster: held by a request that changes its mapping.
    pub(crate) clusters: Ranges,
    /// By L1 index: held by a request that gives it a table of its own. Taken when
    /// clusters are held, never the other way round.
    pub(crate) tables: Ranges,
    /// Its gate is held while metadata are written to the disk, and taken after all of these.
    pub(crate) commits: Arc<Commits>,
    pub(crate) refcounts: Refcounts,
    pub(crate) protected: Protected,
    pub(crate) epochs: Arc<Epochs>,
    pub(crate) frees: Frees,
    pub(crate) dirty: Dirty,
    /// Held while the file is made longer; taken after the gate of `commits`.
    pub(crate) length: Gate,
    /// How long the file was when it was opened, in bytes.
    opened_len: u64,
    /// How far its space is taken ahead (`make_way`), in bytes.
    pub(crate) taken: AtomicU64,
    /// What is taken ahead for small tables.
    pub(crate) ahead: Ahead,
    /// How many requests change mappings now.
    pub(crate) changing: AtomicU64,
    /// Whether the last write to new clusters made the file longer itself.
    pub(crate) appending: AtomicBool,
    /// Whether a change of the whole image was dropped midway.
    cut_short: Arc<AtomicBool>,
    corrupt: AtomicBool,
    /// The header as it is on the disk.
    header: Mutex<Header>,
    /// Whether header and bitmaps are ready for the next change.
    announced: AtomicBool,
    /// The bitmaps, from the first change on if the image has some.
    bitmaps: OnceLock<Bitmaps>,
}

impl Image {
    /// The header, as it was read.
    #[doc(hidden)]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.geometry.version()
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.geometry.cluster_size()
    }

    /// The sizes that follow from the header.
    #[doc(hidden)]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The file that holds the metadata (and the data, unless there is an
    /// external data file).
    #[doc(hidden)]
    pub fn file(&self) -> &Arc<dyn Storage> {
        &self.file
    }

    /// What the guest's clusters are read and written through: the file, an external data file, or a filter over
    /// either that encrypts.
    #[doc(hidden)]
    pub fn data(&self) -> &Arc<dyn Storage> {
        &self.data
    }

    /// Size of the disk in bytes: the header's, rounded down to 512.
    pub fn size(&self) -> u64 {
        self.geometry.virtual_size()
    }

    /// Where the VM state starts: the guest offset of the first L2 table past
    /// the end of the disk.
    pub fn vm_state_offset(&self) -> u64 {
        self.size().next_multiple_of(self.geometry.l2_coverage())
    }

    /// The internal snapshots.
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots
    }

    /// Whether the byte at `offset` of the image file is past its end. For the start of a cluster:
    /// whether all of that is. (A file may end within a cluster: the rest reads as zeroes.)
    pub(crate) fn is_past_end(&self, offset: u64) -> Result<bool> {
        // The file only grows while it is open, so the common case needs no look at it.
        Ok(offset >= self.file_len() && offset >= self.file.len()?)
    }

    /// How many of the `length` bytes of data clusters from `host` on are in
    /// clusters that begin before the end of the file: the missing part of the
    /// last one reads as zeroes, unless it must be complete. An external data file
    /// is as long as the disk at least.
    pub(crate) fn data_before_end(&self, host: u64, length: u64) -> Result<u64> {
        let mask = self.geometry.cluster_size() - 1;
        let is_whole = self.whole_clusters || self.geometry.has_data_file();
        let last = match is_whole {
            true => host + length - 1,
            false => (host + length - 1) & !mask,
        };
        let inside = match self.geometry.has_data_file() {
            true => !self.is_past_data_file(last)?,
            false => !self.is_past_end(last)?,
        };
        if inside {
            return Ok(length);
        }
        let end = match is_whole {
            // Whole sectors.
            true => self.data.len()? & !511,
            false => self.data.len()?.saturating_add(mask) & !mask,
        };
        Ok(end.saturating_sub(host).min(length))
    }

    /// [`Image::is_past_end`] of an external data file, which is as long as the disk at
    /// least unless it was cut off: QEMU and zebu make it so.
    fn is_past_data_file(&self, offset: u64) -> Result<bool> {
        if offset < self.data_len.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let length = self.data.len()?;
        self.data_len.store(length, Ordering::Relaxed);
        Ok(offset >= length)
    }

    /// Refuses an external data file that lacks mapped data. A write behind its end would
    /// make it longer, and what was cut off would read as zeroes.
    pub(crate) async fn check_data_file(&self, queue: &Queue) -> Result<()> {
        if !self.geometry.has_data_file() {
            return Ok(());
        }
        let mut at = self.data.len()?;
        while at < self.size() {
            let extent = self.extent(queue, at, self.size() - at).await?;
            if matches!(extent.mapping, Mapping::Data { .. }) {
                return Err(self.past_end(at, at));
            }
            at += extent.length;
        }
        Ok(())
    }

    /// The error of data at `guest` that would be at `host`, past the end of the file.
    pub(crate) fn past_end(&self, guest: u64, host: u64) -> Error {
        let cluster = self.cluster_start(host);
        let file = match self.geometry.has_data_file() {
            true => "external data file",
            false => "file",
        };
        Error::Corrupt {
            guest,
            what: format!("Cluster offset {cluster:#x} is past the end of the {file}"),
        }
    }

    /// Refuses data past the end of the file, which was cut off, or whose table is wrong. QEMU reads
    /// them as zeroes.
    #[inline]
    pub(crate) fn check_data(&self, guest: u64, host: u64, length: u64) -> Result<()> {
        let there = self.data_before_end(host, length)?;
        if there == length {
            return Ok(());
        }
        Err(self.past_end(guest + there, host + there))
    }

    /// The part of compressed data, mapped at `guest`, that the file has: their stream may end before
    /// the length in their descriptor, and if it does not, it does not inflate.
    pub(crate) fn check_compressed(
        &self,
        guest: u64,
        data: CompressedData,
    ) -> Result<CompressedData> {
        if data.end().0 <= self.file_len() {
            return Ok(data);
        }
        match self.file.len()? {
            length if data.last() >= length => Err(data.past_end(guest)),
            length => Ok(data.within(length)),
        }
    }

    /// Bytes that the file has at least.
    fn file_len(&self) -> u64 {
        self.file_len.load(Ordering::Relaxed)
    }

    /// Cuts an external data file off.
    pub(crate) async fn shorten_data_file(&mut self, queue: &Queue, length: u64) -> Result<()> {
        // Before the file is shorter, so that this holds if the future is dropped meanwhile.
        *self.data_len.get_mut() = 0;
        Ok(crate::storage::set_len(&*self.data, queue, length).await?)
    }

    /// Notes that the file is so long now. It only grows while it is open.
    fn reaches(&self, length: u64) {
        self.file_len.fetch_max(length, Ordering::Relaxed);
    }

    /// Host offset of the active L1 table.
    fn l1_offset(&self) -> u64 {
        self.header.l1_offset
    }

    /// Counts work, if that has a limit.
    #[inline]
    pub(crate) fn spend(&self, amount: u64) -> Result<()> {
        spend(self.work.as_deref(), amount)
    }

    /// Where the cluster of `guest` starts.
    fn cluster_start(&self, guest: u64) -> u64 {
        guest & !(self.geometry.cluster_size() - 1)
    }

    /// Hits (approximate) and loads of the cache of L2 slices.
    #[doc(hidden)]
    pub fn cache_hits_and_loads(&self) -> (u64, u64) {
        (self.slices.hits(), self.slices.misses())
    }

    /// Whether it is open for writing.
    pub fn is_writable(&self) -> bool {
        self.writer.is_some()
    }
}
