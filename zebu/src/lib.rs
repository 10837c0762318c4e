//! zebu: a qcow2 engine.
//!
//! An image becomes a block device that many threads can drive with many
//! requests in flight. The rooms of the library, each knowing only the ones
//! below it, are described in `docs/design.md`.
#![deny(unsafe_code)]

pub mod codec;
pub mod format;
pub mod storage;
