//! The list of bitmaps that an image stores.

use crate::Result;
use crate::drivers::qcow2::Image;
use crate::format::{BitmapEntry, check_table};
use crate::storage::{self, Queue};

/// Reads the bitmap directory. Empty if the image has none, or if what it
/// says of them is out of date.
///
/// # Errors
/// If the directory is not valid, or cannot be read.
pub async fn bitmaps(queue: &Queue, image: &Image) -> Result<Vec<BitmapEntry>> {
    let header = image.header();
    let Some(extension) = header.extensions.bitmaps().filter(|_| header.has_bitmaps()) else {
        return Ok(Vec::new());
    };
    check_table(
        "Bitmap directory",
        extension.directory_offset,
        extension.directory_size,
        1,
        image.geometry().cluster_size(),
        image.file().len()?,
    )?;
    let bytes = storage::read_vec(
        &**image.file(),
        queue,
        extension.directory_offset,
        extension.directory_size as usize,
    )
    .await?;
    let list = BitmapEntry::decode_directory(&bytes, extension.count)?;
    for bitmap in &list {
        bitmap.check(image.geometry())?;
    }
    Ok(list)
}
