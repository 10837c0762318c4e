//! How images and files are treated: the options that each driver has.

pub use crate::drivers::qcow2::OverlapChecks;
use crate::storage::EngineKind;

/// Options of an image. None: not given, the default holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ImageOptions {
    /// Options that every image and every file has.
    pub common: CommonOptions,
    /// Options of raw images.
    pub raw: RawOptions,
    /// Options of qcow2 images.
    pub qcow2: Qcow2Options,
}

/// Options that every image and every file has.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CommonOptions {
    /// `read-only`
    pub read_only: Option<bool>,
    /// `auto-read-only`: open read-only what cannot be written.
    pub auto_read_only: Option<bool>,
    /// `force-share`: open also what another process writes to.
    pub force_share: Option<bool>,
    /// `cache.direct`: with `O_DIRECT`. A file takes it from its image unless
    /// it says otherwise.
    pub direct: Option<bool>,
    /// `cache.no-flush`: ignore flushes. Taken from the image likewise.
    pub no_flush: Option<bool>,
    /// `discard=unmap` (true) or `discard=ignore` (false).
    pub discard: Option<bool>,
    /// `detect-zeroes`
    pub detect_zeroes: Option<DetectZeroes>,
}

/// What is done with writes of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DetectZeroes {
    /// They are writes.
    Off,
    /// They are recorded as zeroes.
    On,
    /// They are recorded as zeroes, and what they cover is freed.
    Unmap,
}

/// Options of raw images: the part of the file that is the disk.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RawOptions {
    /// `offset`: where it starts, in bytes.
    pub offset: Option<u64>,
    /// `size` in bytes; None: to the end of the file.
    pub size: Option<u64>,
    /// Both as they were written, in JSON: QEMU shows them so.
    pub(crate) offset_json: Option<String>,
    pub(crate) size_json: Option<String>,
}

/// Options of qcow2 images.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Qcow2Options {
    /// `lazy-refcounts`
    pub lazy_refcounts: Option<bool>,
    /// `pass-discard-request`: tell the file of what the guest discards.
    pub pass_discard_request: Option<bool>,
    /// `pass-discard-snapshot`: tell the file of what deleting a snapshot frees.
    pub pass_discard_snapshot: Option<bool>,
    /// `pass-discard-other`: tell the file of whatever else is freed.
    pub pass_discard_other: Option<bool>,
    /// `discard-no-unref`: a discarded cluster stays allocated.
    pub discard_no_unref: Option<bool>,
    /// `overlap-check` and its like
    pub overlap_check: Option<OverlapChecks>,
    /// `cache-size`: bytes of L2 tables and refcount blocks together.
    pub cache_size: Option<u64>,
    /// `l2-cache-size`: bytes of L2 tables.
    pub l2_cache_size: Option<u64>,
    /// `l2-cache-entry-size`: bytes of one slice of an L2 table.
    pub l2_cache_entry_size: Option<u64>,
    /// `refcount-cache-size`: bytes of refcount blocks.
    pub refcount_cache_size: Option<u64>,
    /// `cache-clean-interval`: seconds after which unused cache is freed.
    pub cache_clean_interval: Option<u64>,
}

/// Options of a file. None: not given, the default holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FileOptions {
    /// Options that every image and every file has.
    pub common: CommonOptions,
    /// `aio`: the engine. [`EngineKind::Native`] needs `cache.direct=on`,
    /// which is checked when the file is opened: the cache mode may come from elsewhere.
    pub aio: Option<EngineKind>,
    /// `locking`
    pub locking: Locking,
    /// `drop-cache`: let the host forget what it caches of the file, as
    /// migration needs it.
    pub drop_cache: Option<bool>,
    /// `aio-max-batch`: how many requests are submitted together at most.
    pub aio_max_batch: Option<u64>,
}

/// Whether a file is locked while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Locking {
    /// Where the system can (`auto`).
    #[default]
    Auto,
    /// Always (`on`).
    On,
    /// Never (`off`).
    Off,
}

/// What [`FileOptions::aio`] of [`EngineKind::Native`] without direct I/O is
/// refused with, in QEMU's words.
pub const NATIVE_NEEDS_DIRECT: &str =
    "aio=native was specified, but it requires cache.direct=on, which was not specified.";
