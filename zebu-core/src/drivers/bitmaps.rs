//! Dirty bitmaps that an image stores, as the layers above see them.

use super::bits::Bits;

/// A persistent dirty bitmap, as an image lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BitmapInfo {
    /// The name, of 1 to 1023 bytes.
    pub name: Vec<u8>,
    /// Bytes of the disk to a bit.
    pub granularity: u64,
    /// Whether changes of the disk are recorded (the flag `auto` of the format).
    pub enabled: bool,
    /// Whether it cannot be relied on: its last writer did not store it (`in_use`), or it is
    /// damaged. Such a bitmap can only be removed.
    pub inconsistent: bool,
}

/// What is done to a bitmap.
#[derive(Debug)]
pub enum BitmapChange<'a> {
    /// It is made, without a set bit.
    Add {
        /// Bytes of the disk to a bit, as a power of two that the format allows.
        granularity_bits: u8,
        /// Whether changes of the disk are recorded.
        enabled: bool,
    },
    /// It is removed, in whatever state it is.
    Remove,
    /// No bit is set any more.
    Clear,
    /// Changes are recorded from now on, or not any more.
    Enable(bool),
    /// Bits are set that another bitmap has.
    Merge(&'a Bits),
}
