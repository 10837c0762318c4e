//! The device that everything above speaks to: read and status over a range,
//! whatever the image's format and however long its backing chain.

mod compressed;
mod device;
mod guess;
mod header;
mod open;
mod opened;
mod quick_zeroes;
mod raw;
mod read;
mod remote;
mod resize;
mod snapshots;
mod source;
mod stacked;
mod status;
mod vm_state;
mod whole;
mod write;
mod zero;

pub use device::{Device, Layer, LayerImage};
pub use open::{OpenOptions, Policy, Storages};
pub use opened::{OpenedFile, TlsObjects};
pub use raw::Raw;
pub use remote::{Remote, RemoteRequest};
pub use resize::Preallocation;
pub use source::{
    BackingOptions, BackingSpec, BlkdebugSpec, CommonOptions, DetectZeroes, FileDriver,
    FileOptions, FileSpec, ImageOptions, ImageSpec, Locking, NATIVE_NEEDS_DIRECT, NbdSpec, NbdTls,
    NullSpec, OverlapChecks, Qcow2Options, RawOptions, SizeError, Source, first_item, json_text,
    parse_size, protocol, split_list,
};
pub use status::Status;
pub use write::Zeroing;

/// The image formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The bytes of the disk, as they are.
    Raw,
    /// qcow2, versions 2 and 3.
    Qcow2,
}

impl Format {
    /// The name that `-f` takes.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        }
    }
}

impl std::str::FromStr for Format {
    type Err = crate::Error;
    fn from_str(name: &str) -> Result<Self, crate::Error> {
        match name {
            "raw" => Ok(Format::Raw),
            "qcow2" => Ok(Format::Qcow2),
            other => Err(crate::Error::Refused(format!("Unknown driver '{other}'"))),
        }
    }
}
