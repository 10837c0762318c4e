//! An open image, whatever its format.

use std::ops::Deref;
use std::sync::Arc;

use super::qcow2::{Image, SharedImage};
use super::{CompressedData, Extent, FormatImage, LOOKUP_WORK, StorageId};
use crate::Result;
use crate::storage::{Queue, Storage};

/// An open image of any format.
///
/// qcow2 images are not behind a trait object, so that a request to a mapped cluster makes no
/// virtual call. No other type depends on this.
#[derive(Debug)]
pub struct AnyImage {
    inner: Inner,
    storages: Box<[Arc<dyn Storage>]>,
    checks_data: bool,
}

#[derive(Debug)]
enum Inner {
    Qcow2(SharedImage),
    Other(Box<dyn FormatImage>),
}

impl AnyImage {
    /// An image of any format but qcow2.
    pub fn new(image: Box<dyn FormatImage>) -> Self {
        AnyImage {
            storages: image.storages().into(),
            checks_data: image.format().driver().checks_data,
            inner: Inner::Other(image),
        }
    }

    pub(super) fn from_qcow2(image: Image) -> Self {
        let image = SharedImage::new(image);
        AnyImage {
            storages: image.storages().into(),
            checks_data: true,
            inner: Inner::Qcow2(image),
        }
    }

    /// The image, if it is a qcow2 one.
    #[inline]
    pub fn as_qcow2(&self) -> Option<&Image> {
        match &self.inner {
            Inner::Qcow2(image) => Some(image),
            Inner::Other(_) => None,
        }
    }

    /// The qcow2 image, exclusively, with the state that its tasks share.
    pub(crate) fn as_qcow2_mut(&mut self) -> Option<&mut SharedImage> {
        match &mut self.inner {
            Inner::Qcow2(image) => Some(image),
            Inner::Other(_) => None,
        }
    }

    /// The image behind the trait object, exclusively; None: it is qcow2.
    pub(crate) fn other_mut(&mut self) -> Option<&mut dyn FormatImage> {
        match &mut self.inner {
            Inner::Qcow2(_) => None,
            Inner::Other(image) => Some(&mut **image),
        }
    }

    /// A storage that its extents refer to.
    #[inline]
    pub fn storage(&self, id: StorageId) -> &Arc<dyn Storage> {
        &self.storages[id.0 as usize]
    }

    /// The storage that holds the metadata.
    #[inline]
    pub fn file(&self) -> &Arc<dyn Storage> {
        self.storage(StorageId::FILE)
    }

    /// [`FormatImage::cached_extent`], or else [`FormatImage::load_extent`].
    #[inline]
    pub(crate) async fn extent(&self, queue: &Queue, guest: u64, limit: u64) -> Result<Extent> {
        match &self.inner {
            Inner::Qcow2(image) => image.extent(queue, guest, limit).await,
            Inner::Other(image) => {
                image.spend(LOOKUP_WORK)?;
                match image.cached_extent(guest, limit) {
                    Some(extent) => extent,
                    None => image.load_extent(queue, guest, limit).await,
                }
            }
        }
    }

    /// See [`FormatImage::check_data`].
    #[inline]
    pub(crate) fn check_data(
        &self,
        guest: u64,
        storage: StorageId,
        host: u64,
        length: u64,
    ) -> Result<()> {
        match &self.inner {
            Inner::Qcow2(image) => FormatImage::check_data(image, guest, storage, host, length),
            Inner::Other(image) if self.checks_data => {
                image.check_data(guest, storage, host, length)
            }
            Inner::Other(_) => Ok(()),
        }
    }
}

impl AnyImage {
    /// The part of compressed data, mapped at `guest`, that `storage` has.
    ///
    /// # Errors
    /// If it lacks more than the data's slack.
    pub(crate) fn check_compressed(
        &self,
        guest: u64,
        storage: StorageId,
        data: CompressedData,
    ) -> Result<CompressedData> {
        match &self.inner {
            Inner::Qcow2(image) => image.check_compressed(guest, data),
            Inner::Other(_) => match self.storage(storage).len()? {
                length if data.last() >= length => Err(data.past_end(guest)),
                length => Ok(data.within(length)),
            },
        }
    }

    /// See [`FormatImage::inflated`].
    pub(crate) async fn inflated(
        &self,
        queue: &Queue,
        guest: u64,
        storage: StorageId,
        data: CompressedData,
    ) -> Result<Arc<Vec<u8>>> {
        match &self.inner {
            Inner::Qcow2(image) => Image::inflated(image, queue, guest, data).await,
            Inner::Other(image) => {
                let storage = &**self.storage(storage);
                image.inflated(queue, guest, storage, data).await
            }
        }
    }
}

impl Deref for AnyImage {
    type Target = dyn FormatImage;

    fn deref(&self) -> &Self::Target {
        match &self.inner {
            Inner::Qcow2(image) => image,
            Inner::Other(image) => &**image,
        }
    }
}
