//! The device: an image of any format with its backing chain, its data and its extents.
//!
//! To be read in this order:
//!
//! - `device`: a device, and its layers, one for each image;
//! - `open`: from a description of a chain to the open one;
//! - `read`, `extents`, `status`: reads, and where their bytes are; `known_data` remembers answers;
//! - `write`, `zero`, `compressed`: changes of a range; `hooks` are told of them;
//! - `resize`, `header`, `snapshots`, `bitmaps`, `vm_state`: changes of the image;
//! - `filtered`: filters that requests pass through;
//! - `shared`, `exchange`, `stacked`: a device whose images are exchanged under load;
//! - `remote`, `remote_bitmap`: a device for async runtimes.

mod bitmaps;
mod compressed;
mod device;
mod exchange;
mod extents;
mod filtered;
mod header;
mod hooks;
mod known_data;
mod open;
mod read;
mod remote;
mod remote_bitmap;
mod resize;
mod shared;
mod snapshots;
mod stacked;
mod status;
mod vm_state;
mod write;
mod zero;

pub use crate::drivers::{
    BackingName, BitmapInfo, CreateOption, Format, OptionKind, Preallocation, Raw, StorageId,
};
pub use crate::filters::{ThrottleBucket, ThrottleGroup, ThrottleGroups, ThrottleLimits};
pub use crate::protocols::*;
pub use bitmaps::DirtyBits;
pub(crate) use device::Stamped;
pub use device::{Device, Layer};
pub use extents::Extents;
pub use hooks::{ChangeHook, HookFuture};
pub(crate) use open::JustMade;
pub use open::{Length, OpenOptions, Policy, Storages};
pub use remote::{Remote, RemoteRequest};
pub use shared::{InUse, SharedDevice};
pub use status::Status;
pub use write::Zeroing;
