//! LUKS containers as an image format: a header with the key in several slots, each behind a passphrase, and a
//! payload of encrypted sectors, which is the disk. LUKS1 On-Disk Format Specification.
//!
//! - `slots`: the slots of an open container: finding the key, counting what that costs;
//! - `options`, `header`, `create`: new containers; `cost`: how often a hash is iterated;
//! - `inside`: the same header inside images of other formats.
//!
//! The disk is a raw image over the file with a filter that encrypts ([`Encrypted`]).

mod cost;
mod create;
mod header;
mod inside;
mod options;
mod slots;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use zebu_core::parts::drivers::structures::{FormatError, LUKS_HEADER_BYTES, LuksHeader};
use zebu_core::parts::drivers::{
    AnyImage, Changing, Clear, Context, Driver, Extent, Format, FormatImage, OpenRequest,
    Preallocation, Raw, StorageId, refused,
};
use zebu_core::parts::filters::FilteredFile;
use zebu_core::parts::offset::HostOffset;
use zebu_core::parts::storage::{self, Iov, LockRequest};
use zebu_core::{Result, Storage};

use crate::{CryptError, Encrypted};
pub use inside::InImage;

/// The driver.
pub static DRIVER: Driver = Driver {
    is_writable: true,
    create_options: Some(&options::CREATE_OPTIONS),
    plan: Some(create::plan),
    open_options: &["key-secret"],
    locks: [LockRequest::RAW_READ, LockRequest::RAW_WRITE],
    ..Driver::read_only("luks", probe, |request| Box::pin(open(request)))
};

/// An open container.
#[derive(Debug)]
pub struct Luks {
    header: LuksHeader,
    disk: Raw,
    /// Whether the disk is that of the payload, and not what it is encrypted.
    is_unlocked: bool,
}

impl Luks {
    /// Its header, as it was when it was opened.
    #[doc(hidden)]
    pub fn header(&self) -> &LuksHeader {
        &self.header
    }

    fn check_unlocked(&self) -> Result<()> {
        match self.is_unlocked {
            true => Ok(()),
            false => Err(no_key("")),
        }
    }
}

fn failed(error: CryptError) -> zebu_core::Error {
    refused(error.to_string())
}

fn probe(head: &[u8]) -> bool {
    head.starts_with(b"LUKS\xba\xbe\0\x01")
}

/// The error of a container that is opened for its data without a secret, in QEMU's words.
fn no_key(prefix: &str) -> zebu_core::Error {
    refused(format!(
        "Parameter '{prefix}key-secret' is required for cipher"
    ))
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, _work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file);
    let bytes = storage::read_vec(&*file, queue, 0, LUKS_HEADER_BYTES).await?;
    if create::is_unfinished(&bytes) {
        return Err(FormatError::Incomplete.into());
    }
    let header = LuksHeader::decode(&bytes).map_err(FormatError::from)?;
    let start = header.payload_offset();
    if file.len()? < start {
        return Err(refused(format!(
            "The payload would start at {start}, behind the end of the file"
        )));
    }
    let key = match request.purpose.needs_data() {
        true => {
            let secret = (request.key)()?.ok_or_else(|| no_key(""))?;
            Some(slots::find_key(queue, &*file, &header, &secret, limits.is_some()).await?)
        }
        false => None,
    };
    let is_unlocked = key.is_some();
    let file: Arc<dyn Storage> = match key {
        None => file,
        Some(key) => {
            let cipher = key.cipher(&header).map_err(failed)?;
            let filter = Arc::new(Encrypted::new(cipher, start));
            Arc::new(FilteredFile::new(filter, file))
        }
    };
    let disk = Raw::part_of(file, Some(start), None)?.without_events();
    if let Some(limits) = limits {
        limits.check_size(disk.size())?;
    }
    Ok(AnyImage::new(Luks {
        header,
        disk,
        is_unlocked,
    }))
}

impl FormatImage for Luks {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        self.disk.storages()
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        match self.check_unlocked() {
            Ok(()) => self.disk.cached_extent(guest, limit),
            Err(error) => Some(Err(error)),
        }
    }

    fn is_encrypted(&self) -> bool {
        true
    }

    fn is_dirty(&self) -> Option<bool> {
        self.disk.is_dirty()
    }

    fn in_place(&self, guest: u64, length: u64) -> Option<(StorageId, HostOffset)> {
        self.disk.in_place(guest, length)
    }

    fn clear<'a>(&'a self, context: Context<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        self.disk.clear(context, range, how)
    }

    fn write<'a>(&'a self, context: Context<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        FormatImage::write(&self.disk, context, offset, iov)
    }

    fn flush<'a>(&'a self, context: Context<'a>) -> Changing<'a> {
        FormatImage::flush(&self.disk, context)
    }

    fn resize<'a>(
        &'a mut self,
        context: Context<'a>,
        size: u64,
        preallocation: Preallocation,
    ) -> Changing<'a> {
        self.disk.resize(context, size, preallocation)
    }

    fn reopen<'a>(&'a mut self, context: Context<'a>) -> Changing<'a> {
        self.disk.reopen(context)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}
