//! Whether what a job reads is changed meanwhile.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use std::sync::Arc;

use crate::block::{Device, Layer, Stamped};
use crate::storage::Storage;
use crate::storage::named::named_file;
use crate::{Error, Result, printable};

/// The files that a job reads, with those of all backing files, as they were before anything was read
/// of them: which file it was, its length and its times of change.
///
/// Image locks keep other programs from writing, but only those that take them, and not on every file
/// system. What was read while a file changed is a mixture of its states, and no disk.
///
/// Block devices, exports and objects on servers have no time of change that could be compared;
/// objects are compared with each answer of their server.
#[derive(Debug)]
pub struct Unchanged {
    stamped: Vec<Stamped>,
    /// Files and block devices of this machine.
    named: Vec<Arc<dyn Storage>>,
}

impl Unchanged {
    /// The files of devices that are not written, except what was opened although others may write to
    /// it (`force_share`).
    pub fn of(devices: &[Device]) -> Unchanged {
        let layers = || devices.iter().flat_map(Device::all_layers);
        Unchanged {
            stamped: layers().flat_map(files).collect(),
            named: layers().flat_map(named).collect(),
        }
    }

    /// Whether another device reads the same files, in the same state.
    pub fn is_of(&self, device: &Device) -> bool {
        let mut before = self.stamped.iter();
        let mut now = device.all_layers().flat_map(files);
        now.all(|(_, now)| {
            before
                .next()
                .is_some_and(|(_, stamp)| now.has_content_of(stamp))
        }) && before.next().is_none()
    }

    /// Refuses what was read if one of the files was changed. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`], with the name of the file.
    pub fn check(&self) -> Result<()> {
        let is_as_before = |(file, before): &Stamped| match file.stamp() {
            Some(Ok(now)) if is_gone(&**file) => now.has_time_of(before),
            Some(Ok(now)) => now.has_content_of(before),
            _ => false,
        };
        match self.stamped.iter().find(|file| !is_as_before(file)) {
            None => Ok(()),
            Some((file, _)) => refuse(&**file, "was changed while it was read"),
        }
    }

    /// Refuses what was read if the name of one of the files leads to another one by now, or to none. What
    /// was read is one state of the disk nevertheless, but not the one that is found there next. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`], with the name of the file.
    pub fn check_names(&self) -> Result<()> {
        match self.named.iter().find(|file| is_gone(&***file)) {
            None => Ok(()),
            Some(file) => refuse(&**file, "was removed or replaced while it was read"),
        }
    }
}

/// Whether the name of a file leads to another one by now, or to none.
fn is_gone(file: &dyn Storage) -> bool {
    named_file(file).is_some_and(|file| !file.is_at_its_path())
}

fn refuse(file: &dyn Storage, what: &str) -> Result<()> {
    let name: &OsStr = file.path().as_os_str();
    let name = printable(name.as_bytes());
    Err(Error::Refused(format!("'{name}' {what}")))
}

/// The files of a layer that other names of this machine could take the place of.
fn named(layer: &Layer) -> Vec<Arc<dyn Storage>> {
    if layer.is_shared {
        return Vec::new();
    }
    let noted = layer.stamps.iter().map(|(file, _)| file.clone());
    let files = noted.chain(layer.storages());
    files.filter(|file| named_file(&**file).is_some()).collect()
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
