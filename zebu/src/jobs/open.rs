//! Opening a device whose image may have to be repaired first.

use super::check::{RepairMode, repair};
use crate::block::{Device, ImageSpec, LayerImage, OpenOptions, Source};
use crate::storage::Queue;
use crate::{Error, Result};

/// Opens a device as [`Device::open`] does. An image that its last writer did
/// not close, and that says so (the dirty bit, which QEMU sets for
/// `lazy_refcounts`), is repaired before it is opened for writing. Blocks.
pub fn open(queue: &Queue, source: &Source, options: &OpenOptions) -> Result<Device> {
    repaired(queue, options, |options| {
        Device::open(queue, source, options)
    })
}

/// As [`open`], of an image that is specified already.
pub fn open_spec(queue: &Queue, spec: ImageSpec, options: &OpenOptions) -> Result<Device> {
    repaired(queue, options, |options| {
        Device::open_spec(queue, spec.clone(), options)
    })
}

fn repaired(
    queue: &Queue,
    options: &OpenOptions,
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
    if let LayerImage::Qcow2(image) = &damaged.top().image {
        let file = image.file().clone();
        let report = repair(queue, file, RepairMode::All, &mut |_| {})?;
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
