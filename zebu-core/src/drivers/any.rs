//! An open image, whatever its format.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::qcow2::SharedImage;
use super::{Context, Epochs, Extent, FormatImage, LOOKUP_WORK, Stay, StorageId, spend};
use crate::Result;
use crate::storage::{Queue, Storage, Work};

/// An open image of any format, with what every request asks of it.
///
/// What every read asks of qcow2 (`cached_extent`, `check_data`) is not behind a trait object: two
/// virtual calls are more than 2 % of a small read from memory. All else is.
#[derive(Debug)]
pub struct AnyImage {
    inner: Inner,
    storages: Box<[Arc<dyn Storage>]>,
    checks_data: bool,
    epochs: Option<Arc<Epochs>>,
    work: Option<Arc<Work>>,
}

#[derive(Debug)]
enum Inner {
    Qcow2(SharedImage),
    Other(Box<dyn FormatImage>),
}

impl AnyImage {
    /// An image that a driver has opened.
    pub fn new(image: impl FormatImage + 'static) -> Self {
        Self::of(Inner::Other(Box::new(image)))
    }

    /// The same of qcow2.
    pub(super) fn from_qcow2(image: SharedImage) -> Self {
        Self::of(Inner::Qcow2(image))
    }

    fn of(inner: Inner) -> Self {
        let image = inner.as_dyn();
        AnyImage {
            storages: image.storages().into(),
            checks_data: image.format().driver().checks_data,
            epochs: image.epochs(),
            work: image.work().cloned(),
            inner,
        }
    }

    /// Enters the epoch of a request. Until the guard is dropped, nothing that the request finds
    /// mapped gets another use.
    #[inline]
    pub(crate) fn enter(&self) -> Option<Stay<'_>> {
        self.epochs.as_ref().map(|epochs| epochs.enter())
    }

    /// Counts work that is done with the image, if it has a limit.
    #[inline]
    pub(crate) fn spend(&self, amount: u64) -> Result<()> {
        spend(self.work.as_deref(), amount)
    }

    /// [`FormatImage::reopen`]
    pub(crate) async fn reopen(&mut self, context: Context<'_>) -> Result<()> {
        let inner: &mut dyn FormatImage = &mut **self;
        inner.reopen(context).await?;
        self.epochs = self.inner.as_dyn().epochs();
        Ok(())
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
        self.spend(LOOKUP_WORK)?;
        let cached = match &self.inner {
            Inner::Qcow2(image) => FormatImage::cached_extent(image, guest, limit),
            Inner::Other(image) => image.cached_extent(guest, limit),
        };
        match cached {
            Some(extent) => extent,
            None => self.load_extent(queue, guest, limit).await,
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
            Inner::Qcow2(image) => image.check_data(guest, storage, host, length),
            Inner::Other(image) if self.checks_data => {
                image.check_data(guest, storage, host, length)
            }
            Inner::Other(_) => Ok(()),
        }
    }
}

impl Inner {
    fn as_dyn(&self) -> &(dyn FormatImage + 'static) {
        match self {
            Inner::Qcow2(image) => image,
            Inner::Other(image) => &**image,
        }
    }
}

impl Deref for AnyImage {
    type Target = dyn FormatImage;

    fn deref(&self) -> &Self::Target {
        self.inner.as_dyn()
    }
}

impl DerefMut for AnyImage {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match &mut self.inner {
            Inner::Qcow2(image) => image,
            Inner::Other(image) => &mut **image,
        }
    }
}
