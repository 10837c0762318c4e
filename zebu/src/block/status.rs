//! What a range of the device is made of.

/// A range whose bytes are alike, as `map` and convert see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Length in bytes, at least 1.
    pub length: u64,
    /// It reads as zeroes.
    pub zero: bool,
    /// Its bytes are stored somewhere: a cluster or file range of their own.
    pub data: bool,
    /// Some layer of the chain says what it is (false: no layer does, so it
    /// reads as zeroes).
    pub present: bool,
    /// It is stored compressed.
    pub compressed: bool,
    /// The layer that says so: 0 is the top.
    pub depth: usize,
    /// Where it starts in that layer's data storage, if it is stored there
    /// uncompressed, in bytes.
    pub host: Option<u64>,
}
