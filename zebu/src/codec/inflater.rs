//! Inflating a piece of compressed data of any format.

use super::{CodecError, Compression, decompress, workers};

/// How a piece of compressed data is inflated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inflater {
    /// How it is compressed, and with which window.
    pub compression: Compression,
    /// Bytes that it inflates to.
    pub size: u32,
}

impl Inflater {
    /// Bytes that the data inflate to.
    pub fn output_len(&self) -> usize {
        self.size as usize
    }

    /// Fills `out`, which is as long as the data inflate to.
    pub fn inflate(&self, source: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        decompress(self.compression, source, out)
    }

    /// The inflated bytes of `source`, by a thread that is there for it, or by this
    /// one if `here`.
    pub(crate) async fn inflated(self, source: Vec<u8>, here: bool) -> Result<Vec<u8>, CodecError> {
        let inflate = move || {
            let mut bytes = vec![0; self.output_len()];
            self.inflate(&source, &mut bytes).map(|()| bytes)
        };
        match here {
            true => inflate(),
            false => workers::run(inflate).await,
        }
    }
}
