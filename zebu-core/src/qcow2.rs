//! What is in a qcow2 image: see [`Layer::as_qcow2`](crate::block::Layer::as_qcow2).

pub use crate::drivers::qcow2::structures::{
    BitmapEntry, Compression, FormatError, LuksAlgorithm, LuksCipher, LuksError, LuksHash, Snapshot,
};
pub use crate::drivers::qcow2::{Image, SnapshotName};
