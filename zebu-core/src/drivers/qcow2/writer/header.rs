//! Changes of the header of an image that is written.

use std::sync::atomic::Ordering;

use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::drivers::commits::FailOnDrop;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::{Header, INCOMPATIBLE_CORRUPT, Replacement};
use crate::storage::{self, Queue};

impl Image {
    /// Changes the header on the disk, durably. The caller has passed the
    /// gate, or is alone.
    pub(crate) async fn change_header(
        &self,
        queue: &Queue,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        let writer = self.writer()?;
        let old = writer.header().clone();
        let mut header = old.clone();
        change(&mut header);
        let length = header.replaced_len(&old).min(self.file_len());
        let bytes = storage::read_vec(&*self.file, queue, 0, length as usize).await?;
        let replacement = header.replace(&old, &bytes)?;
        // Unless this ends well it is unknown which header is valid, and nothing
        // more may be written.
        let _unbroken = queue.unbroken(&*self.file);
        let fail_on_drop = FailOnDrop(&writer.commits);
        self.write_header(queue, replacement).await?;
        *writer.header() = header;
        fail_on_drop.disarm();
        Ok(())
    }

    /// Writes a header, durably.
    async fn write_header(&self, queue: &Queue, new: Replacement) -> Result<()> {
        let early = is_broken(Rule::NameBeforeHeader);
        if early {
            storage::write_slice(&*self.file, queue, 0, &new.last).await?;
        }
        if let Some((at, bytes)) = &new.before {
            storage::write_slice(&*self.file, queue, *at, bytes).await?;
            self.flush_file(queue, &*self.file).await?;
        }
        if !early {
            storage::write_slice(&*self.file, queue, 0, &new.last).await?;
        }
        self.flush_file(queue, &*self.file).await
    }

    /// Marks the image as corrupt on the disk, which version 2 cannot, and refuses writes from now
    /// on.
    pub(crate) async fn mark_corrupt(&self, queue: &Queue) -> Result<()> {
        let writer = self.writer()?;
        if writer.corrupt.swap(true, Ordering::Relaxed) || self.geometry.version() < 3 {
            return Ok(());
        }
        self.as_task(queue, async move |image, queue| {
            let _pass = image.writer()?.commits.gate.enter().await;
            let mark = |header: &mut Header| header.set_incompatible(INCOMPATIBLE_CORRUPT, true);
            image.change_header(queue, mark).await
        })
        .await
    }
}
