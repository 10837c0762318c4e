//! New LUKS1 containers, as QEMU makes them.

use std::sync::Arc;

use zebu_core::parts::drivers::structures::{LUKS_HEADER_BYTES, LuksHeader};
use zebu_core::parts::drivers::{
    BoxFuture, ImagePlan, Making, NewEncryption, NewImage, PlanRequest, Preallocation,
    check_inside, make_valid, too_large,
};
use zebu_core::parts::filters::FilteredFile;
use zebu_core::parts::storage::{self, Iov, LockRequest, Secret};
use zebu_core::{Queue, Result, Storage};

use super::failed;
use super::header::NewHeader;
use super::options::{Named, SECTOR};
use crate::Encrypted;

/// The name of the cipher of a container that is not finished.
const UNFINISHED: &[u8] = b"zebu-unfinished";
/// Where the name of the cipher is in a header.
const CIPHER_NAME: usize = 8;

/// Whether a container that begins with `bytes` is not finished.
pub(super) fn is_unfinished(bytes: &[u8]) -> bool {
    let name = bytes.get(CIPHER_NAME..CIPHER_NAME + UNFINISHED.len());
    name == Some(UNFINISHED)
}

#[derive(Debug)]
struct Plan {
    size: u64,
    new: NewHeader,
    preallocation: Preallocation,
}

pub(super) fn plan(request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
    let new = NewHeader::of(Named {
        values: request.options,
        prefix: "",
    })?;
    let is_possible = |size: &u64| {
        let end = size.checked_add(new.payload_offset());
        end.is_some_and(|end| end <= i64::MAX as u64)
    };
    let size = request.size.checked_next_multiple_of(SECTOR);
    let size = size.filter(is_possible);
    Ok(Box::new(Plan {
        size: size.ok_or_else(|| too_large("The requested file size is too large"))?,
        new,
        preallocation: request.options.file_preallocation()?,
    }))
}

impl ImagePlan for Plan {
    fn size(&self) -> u64 {
        self.size
    }

    fn alignment(&self) -> u64 {
        SECTOR
    }

    fn lock(&self) -> LockRequest {
        LockRequest::CREATE
    }

    fn key(&self) -> Option<&Secret> {
        Some(self.new.secret())
    }

    fn overhead(&self) -> Option<u64> {
        Some(self.new.payload_offset())
    }

    fn compression(&self) -> Option<zebu_core::parts::codec::Compression> {
        None
    }

    fn mark(&self) -> Result<Option<Vec<u8>>> {
        let mut mark = vec![0; SECTOR as usize];
        mark[..CIPHER_NAME].copy_from_slice(b"LUKS\xba\xbe\0\x01");
        mark[CIPHER_NAME..CIPHER_NAME + UNFINISHED.len()].copy_from_slice(UNFINISHED);
        Ok(Some(mark))
    }

    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>> {
        Box::pin(async move {
            let [file] = <[_; 1]>::try_from(files).expect("the image's own file");
            let key = self.new.key()?;
            let (header, material) = self.new.seal(&key)?;
            let start = header.payload_offset();
            storage::set_len(&*file, queue, start + self.size).await?;
            let making = Making {
                queue,
                report: &(),
                preallocation: self.preallocation,
            };
            if self.preallocation != Preallocation::Off {
                making.allocate(&*file, start, self.size).await?;
            }
            let filter = Encrypted::new(key.cipher(&header).map_err(failed)?, start);
            let disk = FilteredFile::new(Arc::new(filter), file.clone());
            Ok(Box::new(NewLuks {
                file,
                disk,
                header,
                material,
                size: self.size,
            }) as Box<dyn NewImage>)
        })
    }
}

/// A container that is being filled.
#[derive(Debug)]
struct NewLuks {
    file: Arc<dyn Storage>,
    /// The file, whose payload is encrypted when it is written.
    disk: FilteredFile,
    header: LuksHeader,
    /// The key material of the first slot.
    material: Vec<u8>,
    size: u64,
}

impl NewImage for NewLuks {
    /// What is not written is what zeroes, or old content, decrypt to.
    fn is_filled_whole(&self) -> bool {
        true
    }

    fn has_order(&self) -> bool {
        false
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            check_inside(offset, &iov, self.size)?;
            let at = self.header.payload_offset() + offset;
            Ok(storage::write(&self.disk, queue, at, &iov).await?)
        })
    }

    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let file = &*self.file;
            let at = self.header.slots[0].key_offset();
            storage::write_slice(file, queue, at, &self.material).await?;
            let bytes = self.header.encode();
            let (first, rest) = bytes.split_at(SECTOR as usize);
            debug_assert_eq!(first.len() + rest.len(), LUKS_HEADER_BYTES);
            storage::write_slice(file, queue, SECTOR, rest).await?;
            make_valid(file, queue, 0, first).await
        })
    }
}
