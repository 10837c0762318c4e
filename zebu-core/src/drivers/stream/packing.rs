//! How an image stores compressed data.

use crate::codec::Compression;

/// How an image stores compressed data.
#[derive(Clone, Copy, Debug)]
pub enum Packing {
    /// As streams that are shorter than their clusters; a cluster that does not shrink is written
    /// as it is.
    Shorter(Compression),
    /// As a zlib stream of every cluster.
    Zlib,
    /// As the image does by itself: a filter changes the bytes before.
    Below,
}
