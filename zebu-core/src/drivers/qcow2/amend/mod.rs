//! Amend: changes the options with which an image was created.
//!
//! Everything is checked before anything is changed. Each step leaves a consistent image, so after
//! a failure in between some of the changes have been made. What the open image can do it does. The
//! width of refcounts and a lower version change in the file of the closed image.

mod downgrade;
mod header;
mod options;
mod refcounts;

use super::{Image, SharedImage};
use crate::Result;
use crate::drivers::{Context, FormatImage, Preallocation};
use crate::progress::Report;
use crate::storage::{self, Queue};

use header::{read_header, write_header};
pub use options::AmendOptions;

impl SharedImage {
    /// See [`FormatImage::amend`].
    pub(super) async fn amend_open(
        &mut self,
        context: Context<'_>,
        options: &AmendOptions,
        report: &dyn Report,
    ) -> Result<()> {
        let queue = context.queue;
        options.check(self)?;
        let old = self.header();
        let version = options.version.unwrap_or(old.version);
        let (upgrade, downgrade) = (version > old.version, version < old.version);
        let order = options.refcount_order.unwrap_or(old.refcount_order);
        if order != old.refcount_order {
            // The new refcounts make the file longer.
            self.refuse_damage(queue).await?;
        }
        let file = &**self.file();
        let header = read_header(queue, file).await?;
        refcounts::check_width(queue, file, &header, order).await?;
        report.add(1)?;
        if upgrade {
            self.upgrade(queue).await?;
        }
        self.replace_header(queue, |header| options.change_header(header))
            .await?;
        let size = options.size.filter(|size| *size != Image::size(self));
        if let Some(size) = size {
            FormatImage::resize(self, context, size, Preallocation::Off).await?;
        }
        if downgrade {
            Image::flush(self, queue).await?;
            let has_backing = context.below.is_some() || self.header().backing_file().is_some();
            self.expand_zeroes(queue, has_backing).await?;
        }
        Ok(())
    }
}

impl Image {
    /// The rest, after the image was closed.
    pub(super) async fn amend_closed(
        &self,
        queue: &Queue,
        options: &AmendOptions,
        report: &dyn Report,
    ) -> Result<()> {
        report.add(1)?;
        let file = &*self.file;
        let mut header = read_header(queue, file).await?;
        let order = options.refcount_order.unwrap_or(header.refcount_order);
        refcounts::change_width(queue, file, &mut header, order).await?;
        report.add(1)?;
        if let Some(version) = options.version.filter(|version| *version < header.version) {
            let old = header.clone();
            header.set_version(version);
            write_header(queue, file, &old, &mut header).await?;
        }
        Ok(())
    }

    /// Cuts off the end of the file of the closed image that nothing uses.
    pub(super) async fn cut_end(&self, queue: &Queue) -> Result<()> {
        let file = &*self.file;
        if file.is_device() {
            return Ok(());
        }
        let header = read_header(queue, file).await?;
        let end = refcounts::used_end(queue, file, &header).await?;
        if end < file.len()? {
            storage::set_len(file, queue, end).await?;
        }
        Ok(())
    }
}
