//! The device: an image of any format with its backing chain, its data and its extents.

mod bitmaps;
mod compressed;
mod device;
mod extents;
mod header;
mod known_data;
mod objects;
mod open;
mod opened;
mod read;
mod remote;
mod remote_bitmap;
mod resize;
mod resolver;
mod shared;
mod snapshots;
mod spec;
mod stacked;
mod status;
mod vm_state;
mod write;
mod zero;

pub use crate::drivers::{
    BackingName, CreateOption, Format, OptionKind, Preallocation, Raw, StorageId, Vmdk, VmdkExtent,
};
pub use bitmaps::{BitmapInfo, DirtyBits};
pub(crate) use device::Stamped;
pub use device::{Device, Layer};
pub use extents::Extents;
pub(crate) use header::check_recorded;
pub use objects::{Objects, TlsObjects};
pub use open::{Length, OpenOptions, Policy, Storages};
pub use opened::OpenedFile;
#[doc(hidden)]
pub use opened::in_first;
pub(crate) use opened::{ATTEMPTS, REPLACED};
pub use remote::{Remote, RemoteRequest};
pub(crate) use resolver::NameResolver;
pub use shared::{InUse, SharedDevice};
#[cfg(feature = "rbd")]
pub use spec::RbdSpec;
#[cfg(feature = "ssh")]
pub use spec::SshSpec;
#[cfg(feature = "object-store")]
pub use spec::StoreSpec;
pub use spec::{
    BackingOptions, BackingSpec, BlkdebugSpec, CommonOptions, DetectZeroes, FileDriver,
    FileOptions, FileSpec, ImageOptions, ImageSpec, Locking, NATIVE_NEEDS_DIRECT, NullSpec,
    OverlapChecks, Qcow2Options, RawOptions, VhdSize, VpcOptions,
};
#[cfg(feature = "http")]
pub use spec::{HttpCookie, HttpSpec, RemoteOptions};
#[cfg(feature = "nbd")]
pub use spec::{NbdSpec, NbdTls};
pub(crate) use spec::{OptionSet, OptionValue, is_descriptor};
pub use status::Status;
pub use write::Zeroing;

#[cfg(feature = "object-store")]
pub use crate::storage::object::StoreKind;
pub use crate::storage::secret::Secret;
#[cfg(feature = "ssh")]
pub use crate::storage::ssh::{HashKind, HostKeyCheck};
