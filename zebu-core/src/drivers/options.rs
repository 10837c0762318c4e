//! Options that an image of one format is opened with.

use super::qcow2::{CacheOptions, WriteOptions};

/// Options of a raw image.
#[derive(Clone, Copy, Debug, Default)]
pub struct RawPart {
    /// Where in the file it starts, in bytes; None: at the start.
    pub offset: Option<u64>,
    /// Its size in bytes; None: to the end of the file.
    pub size: Option<u64>,
    /// No format driver was named: the file reports no events of a format.
    pub is_bare: bool,
    /// The format was guessed: see [`Raw::is_guessed`](super::Raw::is_guessed).
    pub is_guessed: bool,
}

/// How the size of a VHD disk is determined (`force_size_calc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum VhdSize {
    /// By the program that made the image.
    #[default]
    ByCreator,
    /// By the geometry, unless it is the largest one (`chs`).
    Chs,
    /// By the field for the current size (`current_size`).
    CurrentSize,
}

/// Options of a qcow2 image.
#[derive(Clone, Debug, Default)]
pub struct Qcow2Opening {
    /// How much of the tables is kept in memory.
    pub caches: CacheOptions,
    /// How it is written, if it is.
    pub write: WriteOptions,
    /// Its last cluster must be complete.
    pub whole_clusters: bool,
    /// How it must be encrypted (`encrypt.format`).
    pub encryption: Option<String>,
    /// It is a new image, whose header is to have this version when it is finished.
    pub unfinished: Option<u32>,
}
