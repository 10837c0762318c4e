//! Opening a device whose image may have to be repaired first.

use super::check::{CheckMessage, RepairMode, repair};
use crate::block::{Device, ImageSpec, OpenOptions, Source};
use crate::storage::Queue;
use crate::{Error, Result};

/// Opens a device as [`Device::open`] does. An image that its last writer did
/// not close, and that says so (the dirty bit, which QEMU sets for
/// `lazy_refcounts`), is repaired before it is opened for writing; `say` is told
/// what is found and repaired. Blocks.
pub fn open(
    queue: &Queue,
    source: &Source,
    options: &OpenOptions,
    say: &mut dyn FnMut(CheckMessage),
) -> Result<Device> {
    repaired(queue, options, say, |options| {
        Device::open(queue, source, options)
    })
}

/// As [`open`], of an image that is specified already.
pub fn open_spec(
    queue: &Queue,
    spec: ImageSpec,
    options: &OpenOptions,
    say: &mut dyn FnMut(CheckMessage),
) -> Result<Device> {
    repaired(queue, options, say, |options| {
        Device::open_spec(queue, spec.clone(), options)
    })
}

fn repaired(
    queue: &Queue,
    options: &OpenOptions,
    say: &mut dyn FnMut(CheckMessage),
    open: impl Fn(&OpenOptions) -> Result<Device>,
) -> Result<Device> {
    match open(options) {
        Err(e) if e.is_dirty() => {}
        other => return other,
    }
    let damaged = open(&OpenOptions {
        check: true,
        ..options.clone()
    })?;
    if let Some(image) = damaged.top().as_qcow2() {
        let file = image.file().clone();
        let report = repair(queue, file, RepairMode::All, say)?;
        if report.corruptions > 0 || report.check_errors > 0 {
            return Err(Error::Refused(
                "Image is dirty, and its errors could not be repaired".into(),
            ));
        }
    }
    // Its locks are in the way.
    drop(damaged);
    open(options)
}
