//! What an image is.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use pyo3::IntoPyObject;
use zebu::Device;

/// The members of the dictionary.
#[derive(Debug, IntoPyObject)]
pub struct Info {
    filename: OsString,
    format: &'static str,
    virtual_size: u64,
    actual_size: Option<u64>,
    cluster_size: Option<u64>,
    backing_filename: Option<OsString>,
    backing_filename_format: Option<OsString>,
    snapshots: usize,
    writable: bool,
    encrypted: bool,
    dirty: bool,
}

impl Info {
    /// Of the top image of the device.
    pub fn of(device: &Device) -> Info {
        let layer = device.top();
        let backing = layer.backing();
        let name = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let files = layer.storages().into_iter();
        Info {
            filename: layer.spec.display_name(),
            format: layer.format().name(),
            virtual_size: device.size(),
            actual_size: files.map(|file| file.allocated().ok()).sum(),
            cluster_size: layer.cluster_size(),
            backing_filename: backing.map(|backing| name(backing.name)),
            backing_filename_format: backing
                .and_then(|backing| backing.format)
                .filter(|format| !format.is_empty())
                .map(name),
            snapshots: layer.snapshots().map_or(0, <[_]>::len),
            writable: device.is_writable(),
            encrypted: layer.is_encrypted(),
            dirty: layer.is_dirty() == Some(true),
        }
    }
}
