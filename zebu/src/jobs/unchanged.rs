//! Whether what a job reads is changed meanwhile.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::block::{Device, Layer, Stamped};
use crate::{Error, Result, printable};

/// The files that a job reads, with those of all backing files, as they were before anything was read
/// of them: which file it was, its length and its time of change.
///
/// Image locks keep other programs from writing, but only those that take them, and not on every file
/// system. What was read while a file changed is a mixture of its states, and no disk.
///
/// Block devices, exports and objects on servers have no time of change that could be compared;
/// objects are compared with each answer of their server.
#[derive(Debug)]
pub struct Unchanged(Vec<Stamped>);

impl Unchanged {
    /// The files of devices that are not written, except what was opened although others may write to
    /// it (`force_share`).
    pub fn of(devices: &[Device]) -> Unchanged {
        let layers = devices.iter().flat_map(Device::all_layers);
        Unchanged(layers.flat_map(files).collect())
    }

    /// Whether another device reads the same files, in the same state.
    pub fn is_of(&self, device: &Device) -> bool {
        let stamps = device.all_layers().flat_map(files).map(|(_, stamp)| stamp);
        stamps.eq(self.0.iter().map(|(_, stamp)| *stamp))
    }

    /// Refuses what was read if one of the files was changed. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`], with the name of the file.
    pub fn check(&self) -> Result<()> {
        let is_as_before =
            |(file, before): &Stamped| matches!(file.stamp(), Some(Ok(now)) if now == *before);
        match self.0.iter().find(|file| !is_as_before(file)) {
            None => Ok(()),
            Some((file, _)) => {
                let name: &OsStr = file.path().as_os_str();
                Err(Error::Refused(format!(
                    "'{}' was changed while it was read",
                    printable(name.as_bytes())
                )))
            }
        }
    }
}

/// The files of a layer that have a stamp: as it was noted when they were opened, or that of now.
fn files(layer: &Layer) -> Vec<Stamped> {
    if layer.is_shared {
        return Vec::new();
    }
    let mut files = layer.stamps.clone();
    for file in layer.storages() {
        let is_same = |(noted, _): &Stamped| std::ptr::addr_eq(&**noted, &*file);
        if !files.iter().any(is_same)
            && let Some(Ok(stamp)) = file.stamp()
        {
            files.push((file, stamp));
        }
    }
    files
}
