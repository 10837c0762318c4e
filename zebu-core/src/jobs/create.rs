//! Creation of images in storages.

use std::sync::Arc;

use super::Target;
use crate::block::{Device, JustMade, OpenOptions, Preallocation, Storages};
use crate::drivers::qcow2::create as qcow2;
use crate::drivers::raw::create as raw;
use crate::drivers::{Filling, Format, ImagePlan, Making, NewImage, begin_file};
use crate::progress::{IntoControlFlow, Progress, Report, Reporter};
use crate::storage::{Queue, Storage};
use crate::{Error, Result};

pub use crate::drivers::qcow2::create::{CreateQcow2, NewBacking, NewDataFile, NewEncryption};

impl CreateQcow2 {
    /// The image that can be made.
    ///
    /// # Errors
    /// Those of [`CreateQcow2::check`].
    pub fn plan(&self) -> Result<Box<dyn ImagePlan>> {
        Ok(Box::new(qcow2::Plan::new(self)?))
    }
}

/// Begins a new image in `files`, whatever they held: the image's own file, then
/// [`ImagePlan::other_files`]. Until it is filled, it does not open as far as the format allows.
pub(super) async fn begin(
    queue: &Queue,
    plan: &dyn ImagePlan,
    files: Vec<Arc<dyn Storage>>,
) -> Result<Box<dyn NewImage>> {
    let [own, others @ ..] = &files[..] else {
        return Err(other_files());
    };
    if others.len() != plan.other_files().len() {
        return Err(other_files());
    }
    begin_file(queue, &**own, plan.mark()?.as_deref()).await?;
    for other in others.iter().filter(|_| !plan.keeps_others()) {
        begin_file(queue, &**other, None).await?;
    }
    plan.begin(queue, files).await
}

fn other_files() -> Error {
    Error::Refused("The files are not those of the image".into())
}

/// Begins a new image in `files`, whatever they held: the image's own file, then
/// [`ImagePlan::other_files`]. They are open for writing, and the caller has locked them. The target
/// is filled and finished by [`convert`](super::convert) and [`copy`](super::copy). Blocks.
///
/// # Errors
/// If the number of files is another one, which is found before anything is written. If I/O fails:
/// then, and until the image is finished, the files are no image as far as the format allows.
///
/// # Panics
/// Within a future of the same queue: see [`Queue::block_on`].
pub fn begin_image(
    queue: &Queue,
    plan: &dyn ImagePlan,
    files: Vec<Arc<dyn Storage>>,
) -> Result<Target> {
    let new = queue.block_on(begin(queue, plan, files.clone()))?;
    Ok(match plan.filling() {
        Filling::New => Target::New(new),
        Filling::Raw => Target::Raw(files[0].clone()),
        Filling::Qcow2(version) => {
            let options = OpenOptions::default()
                .format(Some(Format::QCOW2))
                .write(true);
            let files = Storages::new(files[0].clone()).data(files.get(1).cloned());
            let made = JustMade {
                unfinished: Some(version),
                key: plan.key().cloned(),
            };
            Target::Image(Device::from_made(queue, files, &options, made)?)
        }
    })
}

/// Makes `files` a new image, whatever they held. It reads as zeroes, but where it shows what they
/// keep. The rest is as for [`begin_image`].
///
/// # Errors
/// As for [`begin_image`].
pub async fn create_image(
    queue: &Queue,
    plan: &dyn ImagePlan,
    files: Vec<Arc<dyn Storage>>,
) -> Result<()> {
    begin(queue, plan, files).await?.finish(queue).await
}

/// Makes `file` a new qcow2 image, whatever it held; `data` is the data file, if the options have one.
/// Both are open for writing, and the caller has locked them.
///
/// `on_progress` is called with the bytes written or allocated; see [`jobs`](super).
///
/// # Errors
/// If the options do not go together, which is found before anything is written; if I/O fails or
/// the job is cancelled: then `file` is an image that is not finished.
pub async fn create_qcow2<G: IntoControlFlow>(
    queue: &Queue,
    file: &dyn Storage,
    data: Option<&dyn Storage>,
    options: &CreateQcow2,
    on_progress: impl FnMut(Progress) -> G,
) -> Result<()> {
    let plan = qcow2::Plan::new(options)?;
    if data.is_some() != options.data_file.is_some() {
        let why = "An external data file and its name belong together";
        return Err(Error::Refused(why.into()));
    }
    let reporter = Reporter::new(on_progress);
    begin_file(queue, file, plan.mark()?.as_deref()).await?;
    if let Some(data) = data.filter(|_| !plan.keeps_others()) {
        begin_file(queue, data, None).await?;
    }
    plan.write(&plan.making(queue, &reporter), file, data)
        .await?;
    qcow2::finish(file, queue, options.version).await?;
    reporter.finish();
    Ok(())
}

/// Makes `file` a new raw image, whatever it held.
///
/// `on_progress` is called with the bytes allocated; see [`jobs`](super).
///
/// # Errors
/// If the preallocation is not one of raw images, if I/O fails, or if the job is cancelled: then
/// not all of the image may be allocated.
pub async fn create_raw<G: IntoControlFlow>(
    queue: &Queue,
    file: &dyn Storage,
    size: u64,
    preallocation: Preallocation,
    on_progress: impl FnMut(Progress) -> G,
) -> Result<()> {
    if preallocation == Preallocation::Metadata {
        let why = "Unsupported preallocation mode: metadata";
        return Err(Error::Refused(why.into()));
    }
    let reporter = Reporter::new(on_progress);
    let making = Making {
        queue,
        report: &reporter,
        preallocation,
    };
    begin_file(queue, file, None).await?;
    let plan = raw::Plan {
        size,
        preallocation,
    };
    plan.write(&making, file).await?;
    reporter.finish();
    Ok(())
}
