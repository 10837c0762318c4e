//! What the crates of formats, of protocols and of filters are made of, which are below `zebu`. Nothing here is part
//! of the API: it changes without notice, also in patch releases.

pub use crate::block;
pub use crate::lock;
pub use crate::printable::printable;

/// Rules of the order on the disk, which tests break.
pub mod broken {
    pub use crate::broken::*;
}

/// Compression of clusters and of streams.
pub mod codec {
    pub use crate::codec::*;
}

/// What a format is made of.
pub mod drivers {
    pub use crate::drivers::*;

    /// Parts of tables in memory.
    pub mod cache {
        pub use crate::drivers::cache::*;
    }
    /// Inflating.
    pub mod inflate {
        pub use crate::drivers::inflate::*;
    }
    /// Bounds of images.
    pub mod limits {
        pub use crate::drivers::limits::*;
    }
    /// Names of other files.
    pub mod open {
        pub use crate::drivers::open::*;
    }
    /// Images that are read and written in order.
    pub mod stream {
        pub use crate::drivers::stream::*;
    }
    /// Structures of qcow2.
    pub mod structures {
        pub use crate::drivers::qcow2::structures::*;
    }
    /// What files are by their first bytes.
    pub mod signature {
        pub use crate::drivers::signature::*;
    }
}

/// Errors.
pub mod error {
    pub use crate::error::*;
}

/// What a filter is made of.
pub mod filters {
    pub use crate::filters::*;
}

/// Offsets.
pub mod offset {
    pub use crate::offset::*;
}

/// Progress.
pub mod progress {
    pub use crate::progress::*;
}

/// What a protocol is made of.
pub mod protocols {
    pub use crate::protocols::opened::*;
    pub use crate::protocols::other::*;
    pub use crate::protocols::*;
    /// Names that QEMU shows.
    pub mod shown {
        pub use crate::protocols::shown::*;
    }
}

/// QEMU's spelling of names and options.
pub mod spelling {
    pub use crate::spelling::*;
}

/// What a storage is made of.
pub mod storage {
    pub use crate::storage::connect;
    pub use crate::storage::version::{CacheIdentity, Check};
    pub use crate::storage::*;
    /// Files of this machine.
    pub mod file {
        pub use crate::storage::file::*;
    }
    /// Addresses of hosts.
    pub mod host {
        pub use crate::storage::host::*;
    }
    /// Text that is not printed.
    pub mod secret {
        pub use crate::storage::secret::*;
    }
    /// Which bytes a storage on another machine has.
    pub mod version {
        pub use crate::storage::version::*;
    }
}
