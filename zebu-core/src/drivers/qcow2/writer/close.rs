//! The end of writing, and its beginning anew.

use std::sync::atomic::Ordering;

use crate::Result;
use crate::drivers::qcow2::Image;
use crate::storage::{self, Queue};

impl Image {
    /// Makes everything durable, and cuts off what the file was extended by in
    /// advance. Only when no request is in flight and none will come.
    ///
    /// # Errors
    ///
    /// If anything cannot be written. Unless it was the last step, the cut, the image can be written
    /// still, and its bitmaps record that: they have no other copy.
    pub(crate) async fn close(&mut self, queue: &Queue) -> Result<()> {
        self.finish_writing(queue).await?;
        let Some(writer) = &self.writer else {
            return Ok(());
        };
        let stored = self.store_bitmaps(queue).await;
        self.finish_writing(queue).await?;
        stored.map_err(|error| error.during("Lost persistent bitmaps"))?;
        let size = self.geometry.cluster_size();
        // The cluster that the file ended in may have been written in place.
        let end = (writer.refcounts.high() * size).max(writer.opened_len.next_multiple_of(size));
        if !self.file.is_device()
            && end < self.file_len()
            && let Ok(end) = self.end_in_use(queue, end).await
            && end < self.file_len()
        {
            // Before the file is shorter, so that this holds if the future is dropped meanwhile.
            self.end_writing();
            *self.file_len.get_mut() = end;
            storage::set_len(&*self.file, queue, end).await?;
        }
        self.end_writing();
        Ok(())
    }

    /// It is only read from now on. Its header stays what the disk has.
    fn end_writing(&mut self) {
        if let Some(writer) = self.writer.take() {
            self.header = writer.header().clone();
            self.written = Some(writer.options);
            if let Some(bitmaps) = writer.bitmaps.get() {
                self.followed.keep(bitmaps);
            }
        }
    }

    /// Begins to write again after [`Image::close`]. If a change of the whole image was dropped midway
    /// since then, the image is read again first: it is as that has left it on the disk.
    pub(crate) async fn reopen(&mut self, queue: &Queue) -> Result<()> {
        let Some(options) = self.written else {
            return self.writer().map(drop);
        };
        let writer = self.writer.as_ref();
        if writer.is_some_and(|writer| writer.cut_short.load(Ordering::Relaxed)) {
            self.read_again(queue).await?;
            self.writer = None;
        }
        match &self.writer {
            None => self.begin_writing(queue, options).await,
            Some(_) => Ok(()),
        }
    }

    /// The end of the last cluster in use, at least `from`. The file may have been
    /// shorter than its clusters when it was opened, so that clusters allocated
    /// before this session were written behind its old end.
    async fn end_in_use(&self, queue: &Queue, from: u64) -> Result<u64> {
        let size = self.geometry.cluster_size();
        let mut cluster = from / size;
        let last = self.file_len().div_ceil(size);
        let mut end = cluster;
        while cluster < last {
            let (refcount, count) = self.refcounts_alike(queue, cluster, last - cluster).await?;
            cluster += count;
            if refcount > 0 {
                end = cluster;
            }
        }
        Ok(end * size)
    }

    /// Commits until nothing is left to be written or freed. Only when no
    /// request is in flight.
    pub(crate) async fn finish_writing(&self, queue: &Queue) -> Result<()> {
        let Some(writer) = &self.writer else {
            return Ok(());
        };
        let _pass = writer.commits.gate.enter().await;
        writer.check()?;
        // Each round moves what is freed one stage on.
        for _ in 0..4 {
            self.commit(queue, true).await?;
            let clean = writer.refcounts.dirty_blocks() == 0 && writer.dirty.slices() == 0;
            if clean && writer.frees.is_empty() {
                break;
            }
        }
        Ok(())
    }
}
