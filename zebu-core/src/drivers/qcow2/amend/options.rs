//! What can be changed of an image, and what cannot.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use crate::drivers::qcow2::structures::{
    AUTOCLEAR_DATA_FILE_RAW, COMPATIBLE_LAZY_REFCOUNTS, Header, INCOMPATIBLE_DIRTY, MAX_L1_BYTES,
    MAX_REFCOUNT_ORDER,
};
use crate::drivers::qcow2::{Image, check_recorded};
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

impl AmendOptions {
    /// Refuses invalid changes, with QEMU's messages.
    pub(super) fn check(&self, image: &Image) -> Result<()> {
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

    /// Changes of the header only. A lower version comes last.
    pub(super) fn change_header(&self, header: &mut Header) {
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
