//! How images and files are treated: the options of each driver.

pub use crate::drivers::VhdSize;
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
    /// Options of VHD images.
    pub vpc: VpcOptions,
}

/// Options that every image and every file has.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CommonOptions {
    /// `read-only`
    pub read_only: Option<bool>,
    /// `force-share`: open although another process may write.
    pub force_share: Option<bool>,
    /// `cache.direct`: with `O_DIRECT`. A file without this option takes it from its image.
    pub direct: Option<bool>,
    /// `cache.no-flush`: ignore flushes. A file without this option takes it from its image.
    pub no_flush: Option<bool>,
    /// `discard=unmap` (true) or `discard=ignore` (false).
    pub discard: Option<bool>,
    /// `detect-zeroes`
    pub detect_zeroes: Option<DetectZeroes>,
}

/// What becomes of writes of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DetectZeroes {
    /// They are written as data.
    Off,
    /// They are stored as zeroes.
    On,
    /// They are stored as zeroes, and their clusters are freed.
    Unmap,
}

/// Options of raw images: the part of the file that is the disk.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RawOptions {
    /// `offset`: where it starts, in bytes.
    pub offset: Option<u64>,
    /// `size` in bytes; None: to the end of the file.
    pub size: Option<u64>,
    /// Both as they were written, in JSON, for the name that is shown.
    pub(crate) offset_json: Option<String>,
    pub(crate) size_json: Option<String>,
}

/// Options of qcow2 images.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Qcow2Options {
    /// `pass-discard-request`: punch holes into the file where the guest discards.
    pub pass_discard_request: Option<bool>,
    /// `pass-discard-snapshot`: punch holes into the file where deleting a snapshot frees clusters.
    pub pass_discard_snapshot: Option<bool>,
    /// `pass-discard-other`: punch holes into the file where anything else frees clusters.
    pub pass_discard_other: Option<bool>,
    /// `discard-no-unref`: a discarded cluster stays allocated.
    pub discard_no_unref: Option<bool>,
    /// `overlap-check` and `overlap-check.*`
    pub overlap_check: Option<OverlapChecks>,
    /// `cache-size`: bytes of L2 tables and refcount blocks together.
    pub cache_size: Option<u64>,
    /// `l2-cache-size`: bytes of L2 tables.
    pub l2_cache_size: Option<u64>,
    /// `l2-cache-entry-size`: bytes of one slice of an L2 table.
    pub l2_cache_entry_size: Option<u64>,
    /// `refcount-cache-size`: bytes of refcount blocks.
    pub refcount_cache_size: Option<u64>,
}

/// Options of VHD images (`vpc`).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct VpcOptions {
    /// `force_size_calc`: how the size of the disk is determined.
    pub size: VhdSize,
}

/// Options of a file. None: not given, the default holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FileOptions {
    /// Options that every image and every file has.
    pub common: CommonOptions,
    /// `aio`: the engine. [`EngineKind::Native`] needs direct I/O, which is checked when the file
    /// is opened, since the cache mode may come from elsewhere.
    pub aio: Option<EngineKind>,
    /// `locking`
    pub locking: Locking,
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

/// The error of [`FileOptions::aio`] with [`EngineKind::Native`] without direct I/O, in QEMU's
/// words.
pub const NATIVE_NEEDS_DIRECT: &str =
    "aio=native was specified, but it requires cache.direct=on, which was not specified.";
