//! Doors for the crates of this workspace that use `zebu` (`zebu::internal`), for the tests and for the fuzzers. Nothing here
//! is part of the API: it changes without notice, also in patch releases.

pub use crate::drivers::Mapping;
pub use crate::drivers::qcow2::{CacheOptions, OpenImage};
pub use crate::jobs::check::check_device;
pub use crate::printable::{printable, printable_bytes, printable_message};
pub use crate::statistics::{Statistics, Totals};
pub use crate::storage::file::{identity, sync_name};
pub use crate::storage::host::addresses;
pub use crate::storage::polling::Polling;
pub use crate::storage::queue::tasks::yield_once;
pub use crate::storage::request_pool::{Permit, RequestPool};
pub use crate::storage::same::is_same;

/// Storages that fail on purpose.
pub mod blkdebug {
    pub use crate::storage::blkdebug::*;
    pub use crate::storage::event::Event;
}

/// Rules of the order on the disk, which tests break.
pub mod broken {
    pub use crate::broken::*;
}

/// Compression of clusters.
pub mod codec {
    pub use crate::codec::*;
}

/// Engines, which a simulation replaces.
pub mod engine {
    pub use crate::storage::engine::*;
}

/// Structures of qcow2 on the disk as pure values.
pub mod structures {
    pub use crate::drivers::qcow2::structures::*;
    pub use crate::offset::{GuestOffset, HostOffset};
}

/// Names of files, which a simulation replaces.
pub mod names {
    pub use crate::storage::lock::LockBytes;
    pub use crate::storage::named::*;
    pub use crate::storage::names::*;
}

/// Images that are made of options in text.
pub mod new_image {
    pub use crate::jobs::new_image::*;
}
