//! Amend: changes the options with which an image was created.
//!
//! Everything is checked before anything is changed. Each step leaves a consistent image, so after
//! a failure in between some of the changes have been made.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use crate::block::{Device, Preallocation};
use crate::drivers::qcow2::amend::{change_width, check_width, read_header, write_header};
use crate::drivers::qcow2::structures::{
    AUTOCLEAR_DATA_FILE_RAW, COMPATIBLE_LAZY_REFCOUNTS, Header, INCOMPATIBLE_DIRTY, MAX_L1_BYTES,
    MAX_REFCOUNT_ORDER,
};
use crate::drivers::qcow2::{Image, check_recorded};
use crate::progress::{IntoControlFlow, Progress, Report, Reporter};
use crate::storage::Queue;
use crate::{Error, Result};

options! {
    /// What to change; None: unchanged.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub struct AmendOptions {
        /// Version: 2 or 3.
        pub version: Option<u32>,
        /// Refcount width as a power of two of bits.
        pub refcount_order: Option<u32>,
        /// Refcount updates may be postponed.
        pub lazy_refcounts: Option<bool>,
        /// Size of the disk in bytes. What is cut off is lost.
        pub size: Option<u64>,
        /// The name of the external data file that the header shall have; empty: none. The file itself
        /// is not examined.
        pub data_file: Option<OsString>,
        /// Whether the data file is always the raw image of the disk. This can only be turned off.
        pub data_file_raw: Option<bool>,
    }
}

fn refuse<T>(why: impl Into<String>) -> Result<T> {
    Err(Error::Refused(why.into()))
}

/// Changes `device`, open for writing, and closes it. Blocks.
///
/// `on_progress` is called between the steps; see [`jobs`](super).
///
/// # Errors
/// If the image cannot have these options, if I/O fails, or if the job is cancelled. What was
/// changed before stays so, and the image is consistent.
pub fn amend<G: IntoControlFlow>(
    queue: &Queue,
    mut device: Device,
    options: &AmendOptions,
    on_progress: impl FnMut(Progress) -> G,
) -> Result<()> {
    let steps = Reporter::new(on_progress);
    steps.plan(4);
    steps.add(0)?;
    let Some(image) = device.top().as_qcow2() else {
        return refuse(format!(
            "Format driver '{}' does not support option amendment",
            device.top().format().name()
        ));
    };
    options.check(image)?;
    let version = options.version.unwrap_or(image.header().version);
    let order = options
        .refcount_order
        .unwrap_or(image.header().refcount_order);
    let downgrade = version < image.header().version;
    if order != image.header().refcount_order {
        // The new refcounts make the file longer.
        queue.block_on(image.refuse_damage(queue))?;
    }
    // The file stays open, and locked, when the device is closed.
    let file = image.file().clone();
    queue.block_on(async {
        let header = read_header(queue, &*file).await?;
        check_width(queue, &*file, &header, order).await?;
        steps.add(1)?;
        let result = options.change_device(queue, &mut device, downgrade).await;
        let closed = device.close(queue).await;
        result.and(closed)?;
        steps.add(1)?;
        let mut header = read_header(queue, &*file).await?;
        change_width(queue, &*file, &mut header, order).await?;
        steps.add(1)?;
        if downgrade {
            let old = header.clone();
            header.set_version(version);
            write_header(queue, &*file, &old, &mut header).await?;
        }
        steps.finish();
        Ok(())
    })
}

impl AmendOptions {
    /// Refuses invalid changes, with QEMU's messages.
    fn check(&self, image: &Image) -> Result<()> {
        let header = image.header();
        let version = self.version.unwrap_or(header.version);
        let order = self.refcount_order.unwrap_or(header.refcount_order);
        if order > MAX_REFCOUNT_ORDER {
            return refuse("Refcount width must be a power of two and may not exceed 64 bits");
        }
        if let Some(size) = self.size.filter(|size| *size != image.size()) {
            if !size.is_multiple_of(512) {
                return refuse("The new size must be a multiple of 512");
            }
            if header.version.max(version) < 3 && !image.snapshots().is_empty() {
                return refuse("Can't resize a v2 image which has snapshots");
            }
            let l1_bytes = image.geometry().l1_entries_for(size) * 8;
            if size > i64::MAX as u64 || l1_bytes > MAX_L1_BYTES {
                let error = Error::Io(std::io::Error::from_raw_os_error(libc::EFBIG));
                return Err(error.during("Failed to grow the L1 table"));
            }
        }
        if self.refcount_order.is_some() && order != 4 && version < 3 {
            return refuse(
                "Refcount widths other than 16 bits require compatibility level 1.1 or above (use \
                 compat=1.1 or greater)",
            );
        }
        self.data_file.as_deref().map_or(Ok(()), check_recorded)?;
        if self.data_file.is_some() && !header.has_data_file() {
            return refuse("data-file can only be set for images that use an external data file");
        }
        if self.data_file_raw == Some(true) && !header.is_data_file_raw() {
            return refuse("data-file-raw cannot be set on existing images");
        }
        if self.lazy_refcounts == Some(true) && version < 3 {
            return refuse(
                "Lazy refcounts only supported with compatibility level 1.1 and above (use \
                 compat=1.1 or greater)",
            );
        }
        match version < header.version {
            true => self.check_downgrade(image, order),
            false => Ok(()),
        }
    }

    fn check_downgrade(&self, image: &Image, order: u32) -> Result<()> {
        if order != 4 {
            return refuse("compat=0.10 requires refcount_bits=16");
        }
        let header = image.header();
        let size = self.size.unwrap_or(header.size);
        // Version 2 has no space for these numbers in its snapshot table.
        let prevents = |vm_state: u64, disk: u64| vm_state > u64::from(u32::MAX) || disk != size;
        if (image.snapshots().iter())
            .any(|s| prevents(s.vm_state_size(), s.disk_size().unwrap_or(header.size)))
        {
            return refuse("Internal snapshots prevent downgrade of image");
        }
        if header.has_data_file() {
            return refuse("Cannot downgrade an image with a data file");
        }
        if header.has_bitmaps() {
            return refuse("Bitmaps prevent downgrade of image");
        }
        // Closed, it is not dirty.
        match header.incompatible & !INCOMPATIBLE_DIRTY {
            0 => Ok(()),
            bits => refuse(format!(
                "Cannot downgrade an image with incompatible features {bits:#x} set"
            )),
        }
    }

    /// What is changed while the image is open.
    async fn change_device(
        &self,
        queue: &Queue,
        device: &mut Device,
        downgrade: bool,
    ) -> Result<()> {
        let version = device.top_qcow2()?.header().version;
        if self.version.is_some_and(|new| new > version) {
            device.upgrade(queue).await?;
        }
        device
            .change_header(queue, |header| self.change_header(header))
            .await?;
        if let Some(size) = self.size.filter(|size| *size != device.size()) {
            device.resize(queue, size, Preallocation::Off).await?;
        }
        if downgrade {
            device.expand_zeroes(queue).await?;
        }
        Ok(())
    }

    /// Changes of the header only. A lower version comes last.
    fn change_header(&self, header: &mut Header) {
        if let Some(name) = &self.data_file {
            header.set_data_file_name(Some(name.as_bytes()).filter(|name| !name.is_empty()));
        }
        if self.data_file_raw == Some(false) {
            header.autoclear &= !AUTOCLEAR_DATA_FILE_RAW;
        }
        match self.lazy_refcounts {
            Some(true) => header.compatible |= COMPATIBLE_LAZY_REFCOUNTS,
            Some(false) => header.compatible &= !COMPATIBLE_LAZY_REFCOUNTS,
            None => {}
        }
    }
}
