//! The core of the library `zebu`: disk images as block devices, qcow2 and raw, queues and engines.
//!
//! Programs use the crate `zebu`, which has all of this under the same names, and registers the other formats
//! and the protocols of other machines ([`register!`]). `docs/design.md` describes the modules.
#![deny(unsafe_code)]

#[macro_use]
mod options;

pub mod block;
mod broken;
mod codec;
mod drivers;
mod error;
mod filters;
#[doc(hidden)]
pub mod internal;
pub mod jobs;
mod luks;
pub mod names;
mod offset;
#[doc(hidden)]
pub mod parts;
mod printable;
mod progress;
mod protocols;
pub mod qcow2;
mod registered;
mod spelling;
mod statistics;
pub mod storage;
pub mod tls;

pub use block::{
    BitmapInfo, Device, DirtyBits, Extents, Format, InUse, Layer, Length, OpenOptions, Policy,
    Preallocation, Remote, RemoteRequest, SharedDevice, Status, Storages, Zeroing,
};
pub use drivers::Limits;
pub use error::{Error, ErrorKind, LimitExceeded, Result, strerror};
pub use names::Source;
use printable::printable;
pub use storage::{
    Buffer, CacheMode, EngineKind, Handle, Iov, Memory, Queue, QueueOptions, Storage,
};

/// Locks a mutex, also after a panic of its holder: the data that these hold are consistent at
/// every moment.
#[doc(hidden)]
pub fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
