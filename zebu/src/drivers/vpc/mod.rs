//! VHD, the image format of Virtual PC, which QEMU calls vpc. Numbers are big-endian. Images are
//! created; they are not read yet.
//!
//! The format is that of Microsoft's "Virtual Hard Disk Image Format Specification", version 1.0.

mod create;
mod geometry;

use super::{AnyImage, Driver};
use crate::storage::LockRequest;
use crate::{Error, Result};

/// The driver.
pub static DRIVER: Driver = Driver {
    name: "vpc",
    probe: Some(|head| head.starts_with(COOKIE)),
    is_writable: false,
    has_backing: false,
    has_data_file: false,
    can_compress: false,
    checks_data: false,
    create_options: Some(&create::CREATE_OPTIONS),
    plan: Some(create::plan),
    open_options: &[],
    // The locks of any format but raw.
    locks: [LockRequest::QCOW2_READ, LockRequest::QCOW2_WRITE],
    open: |_| Box::pin(std::future::ready(open())),
};

/// What a footer begins with.
const COOKIE: &[u8] = b"conectix";

fn open() -> Result<AnyImage> {
    Err(Error::Refused(
        "Driver 'vpc' is not supported by zebu (format 'raw' takes the file as it is)".into(),
    ))
}
