//! Opening a device whose image may have to be repaired first.

use crate::block::{Device, ImageSpec, OpenOptions};
use crate::drivers::RepairMode;
use crate::drivers::qcow2::check::{CheckMessage, repair};
use crate::names::Source;
use crate::storage::Queue;
use crate::{Error, Result};

/// Opens a device as [`Device::open`] does. An image that its last writer left dirty (the dirty
/// bit, which QEMU sets for `lazy_refcounts`) is repaired before it is opened for writing; `emit`
/// receives what is found and repaired. Blocks.
///
/// # Errors
/// Those of [`Device::open`]. Or the image is dirty and cannot be repaired.
pub fn open(
    queue: &Queue,
    source: &Source,
    options: &OpenOptions,
    emit: &mut dyn FnMut(CheckMessage),
) -> Result<Device> {
    repaired(queue, options, emit, |options| {
        Device::open(queue, source, options)
    })
}

/// As [`open`], for an [`ImageSpec`].
///
/// # Errors
/// Those of [`open`].
pub fn open_spec(
    queue: &Queue,
    spec: ImageSpec,
    options: &OpenOptions,
    emit: &mut dyn FnMut(CheckMessage),
) -> Result<Device> {
    repaired(queue, options, emit, |options| {
        Device::open_spec(queue, spec.clone(), options)
    })
}

fn repaired(
    queue: &Queue,
    options: &OpenOptions,
    emit: &mut dyn FnMut(CheckMessage),
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
        let repair = repair(queue, file, RepairMode::All, emit, |_| {});
        let report = queue.block_on(repair)?;
        if report.corruptions > 0 || report.check_errors > 0 {
            return Err(Error::Refused(
                "Image is dirty, and its errors could not be repaired".into(),
            ));
        }
    }
    // The repaired image is opened again, so its locks must be released.
    drop(damaged);
    open(options)
}
