//! Creation of images of formats that are not opened for writing.

use std::sync::Arc;

use crate::drivers::{ImagePlan, NewImage};
use crate::storage::{self, Queue, Storage};
use crate::{Error, Result};

/// Begins a new image in `files`, whatever they held: the image's own file, then
/// [`ImagePlan::other_files`]. They are open for writing, and the caller has locked them. A
/// [`Target::New`](super::super::Target::New) is filled and finished by
/// [`convert`](super::super::convert) and [`copy`](super::super::copy).
///
/// # Errors
/// If the number of files is another one, which is found before anything is written. If I/O fails:
/// then, and until the image is finished, the files are no image as far as the format allows.
pub async fn begin_image(
    queue: &Queue,
    plan: &dyn ImagePlan,
    files: Vec<Arc<dyn Storage>>,
) -> Result<Box<dyn NewImage>> {
    if files.len() != 1 + plan.other_files().len() {
        return Err(Error::Refused(
            "The files are not those of the image".into(),
        ));
    }
    for (nth, file) in files.iter().enumerate() {
        if !file.is_device() {
            storage::set_len(&**file, queue, 0).await?;
        }
        // An old image must not outlive its data in other files.
        if nth == 0 && files.len() > 1 {
            storage::flush(&**file, queue).await?;
        }
    }
    plan.begin(queue, files).await
}

/// Makes `files` a new image, whatever they held. It reads as zeroes. The rest is as for
/// [`begin_image`].
///
/// # Errors
/// As for [`begin_image`].
pub async fn create_image(
    queue: &Queue,
    plan: &dyn ImagePlan,
    files: Vec<Arc<dyn Storage>>,
) -> Result<()> {
    begin_image(queue, plan, files).await?.finish(queue).await
}
