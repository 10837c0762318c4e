//! Allocating host clusters.
//!
//! - `refcounts`: the refcounts in memory, and the search for free clusters;
//! - `frees`: references that were dropped, until the clusters may be used again;
//! - `grow`: a larger refcount table;
//! - `space`: space in the file for metadata, taken before anything changes;
//! - `protect`: the places of the image's own tables.

pub(in crate::drivers::qcow2) mod frees;
mod grow;
pub(in crate::drivers::qcow2) mod protect;
pub(in crate::drivers::qcow2) mod refcounts;
pub(in crate::drivers::qcow2) mod space;

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::Writer;
use crate::drivers::qcow2::allocation::frees::Freed;
use crate::drivers::qcow2::allocation::refcounts::{Load, Missing, Run, Taken};
use crate::offset::HostOffset;
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// How far the file is made longer than it must be, in bytes: so that most
/// writes to new clusters are inside it, which the file system does side by
/// side. As far again as it is, within these bounds: ext4 waits for all direct writes in
/// flight before it makes a file longer or takes space. Closing the image cuts
/// off what was not used.
const LEAST_AHEAD: u64 = 1 << 20;
const MOST_AHEAD: u64 = 64 << 20;

/// Clusters that were allocated for a request. Unless they are kept, the drop frees them.
#[derive(Debug)]
pub(crate) struct Allocation<'a> {
    image: &'a Image,
    writer: &'a Writer,
    run: Run,
    /// They read as zeroes.
    pub fresh: bool,
}

impl Allocation<'_> {
    /// Host offset of the first.
    pub(crate) fn host(&self) -> HostOffset {
        HostOffset(self.run.first * self.image.geometry.cluster_size())
    }

    /// How many.
    pub(crate) fn clusters(&self) -> u64 {
        self.run.count
    }

    /// Host offset of what follows.
    fn end(&self) -> u64 {
        self.host().0 + self.run.count * self.image.geometry.cluster_size()
    }

    /// Keeps them: an entry refers to them now.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Allocation<'_> {
    /// The clusters of a write that failed are free after the next commit. To lower their
    /// refcounts here could mean reading a refcount block, for which a drop cannot wait.
    fn drop(&mut self) {
        self.writer.frees.push_ready(Freed {
            first: self.run.first,
            count: self.run.count,
            punch: false,
            table: false,
        });
    }
}

impl Image {
    /// Allocates up to `want` (at least 1) adjacent clusters, in memory. Whatever refers to them is
    /// written after their refcounts, by `commit`.
    pub(crate) async fn allocate(&self, queue: &Queue, want: u64) -> Result<Allocation<'_>> {
        let allocation = self.allocate_place(queue, want).await?;
        self.lengthen(queue, allocation.end()).await?;
        Ok(allocation)
    }

    /// [`Image::allocate`] of clusters that may lie behind the end of the file: see
    /// [`Image::make_way`].
    pub(crate) async fn allocate_place(&self, queue: &Queue, want: u64) -> Result<Allocation<'_>> {
        storage::event(&*self.file, storage::Event::ClusterAlloc);
        let writer = self.writer()?;
        loop {
            match writer.refcounts.take(want, &writer.protected)? {
                Taken::Run { run, fresh } => {
                    return Ok(Allocation {
                        image: self,
                        writer,
                        run,
                        fresh,
                    });
                }
                Taken::Missing(missing) => self.load_missing(queue, missing).await?,
            }
        }
    }

    /// Allocates `count` adjacent clusters. Beside other requests it may take several tries.
    pub(crate) async fn allocate_contiguous(
        &self,
        queue: &Queue,
        count: u64,
    ) -> Result<HostOffset> {
        if count >= self.geometry.refcount_block_entries() as u64 {
            // A run from `take` ends where a refcount block does.
            return self.allocate_area(queue, count).await;
        }
        // Pieces are allocated until enough of them are adjacent; the others are freed afterwards.
        let mut useless = Vec::new();
        let mut run: Option<Run> = None;
        let result = loop {
            let have = run.map_or(0, |r| r.count);
            if have == count {
                break Ok(());
            }
            let more = match self.allocate(queue, count - have).await {
                Ok(more) => more,
                Err(e) => break Err(e),
            };
            let piece = more.run;
            more.keep();
            match &mut run {
                Some(run) if run.first + run.count == piece.first => run.count += piece.count,
                other => useless.extend(other.replace(piece)),
            }
        };
        if result.is_err() {
            useless.extend(run);
        }
        let writer = self.writer()?;
        for run in useless {
            writer.frees.push_ready(Freed {
                first: run.first,
                count: run.count,
                punch: false,
                table: false,
            });
        }
        result?;
        let first = run.map_or(0, |r| r.first);
        Ok(HostOffset(first * self.geometry.cluster_size()))
    }

    /// Allocates `count` clusters behind all that are counted, and before them the refcount blocks
    /// that count them.
    async fn allocate_area(&self, queue: &Queue, count: u64) -> Result<HostOffset> {
        let writer = self.writer()?;
        loop {
            match writer.refcounts.take_area(count, &writer.protected)? {
                Ok(first) => {
                    let size = self.geometry.cluster_size();
                    self.lengthen(queue, (first + count) * size).await?;
                    return Ok(HostOffset(first * size));
                }
                Err(missing) => self.load_missing(queue, missing).await?,
            }
        }
    }

    /// The clusters that `length` bytes at `offset` touch, as one reference.
    pub(crate) fn reference(&self, offset: u64, length: u64, punch: bool) -> Freed {
        let size = self.geometry.cluster_size();
        let first = offset / size;
        Freed {
            first,
            count: (offset + length).div_ceil(size) - first,
            punch,
            table: false,
        }
    }

    /// The reference of an L1 entry of the active disk to its L2 table.
    pub(crate) fn table_reference(&self, offset: u64, punch: bool) -> Freed {
        Freed {
            table: true,
            ..self.reference(offset, self.geometry.cluster_size(), punch)
        }
    }

    /// Adds `delta` to the refcounts of clusters side by side whose refcounts
    /// are alike ([`Image::refcounts_alike`]).
    pub(crate) async fn change_refcounts(
        &self,
        queue: &Queue,
        first: u64,
        count: u64,
        delta: i64,
    ) -> Result<()> {
        loop {
            match self.writer()?.refcounts.change(first, count, delta)? {
                Ok(()) => return Ok(()),
                Err(missing) => self.load_missing(queue, missing).await?,
            }
        }
    }

    /// The refcount of a cluster, and how many from there on, at most `most`,
    /// are known to have the same.
    pub(crate) async fn refcounts_alike(
        &self,
        queue: &Queue,
        cluster: u64,
        most: u64,
    ) -> Result<(u64, u64)> {
        loop {
            match self.writer()?.refcounts.alike(cluster, most)? {
                Ok(found) => return Ok(found),
                Err(missing) => self.load_missing(queue, missing).await?,
            }
        }
    }

    /// Loads or makes a missing refcount block.
    pub(in crate::drivers::qcow2) async fn load_missing(
        &self,
        queue: &Queue,
        missing: Missing,
    ) -> Result<()> {
        match missing {
            Missing::Load(load) => self.load_refcounts(queue, load).await,
            Missing::Grow(index) => self.grow_refcount_table(queue, index).await,
            Missing::Space(blocks) => self.reserve_refcount_blocks(queue, blocks).await,
        }
    }

    async fn load_refcounts(&self, queue: &Queue, load: Load) -> Result<()> {
        if self.is_past_end(load.offset.0)? {
            return Err(Error::Refused(format!(
                "Refcount block {:#x} at {:#x} is past the end of the file",
                load.index, load.offset.0
            )));
        }
        let size = self.geometry.cluster_size() as usize;
        storage::event(&*self.file, storage::Event::RefblockLoad);
        let bytes = storage::read_vec(&*self.file, queue, load.offset.0, size).await?;
        self.writer()?.refcounts.loaded(load, bytes);
        Ok(())
    }

    /// Makes the file reach to `end` at least.
    pub(in crate::drivers::qcow2) async fn lengthen(&self, queue: &Queue, end: u64) -> Result<()> {
        if end <= self.file_len() {
            return Ok(());
        }
        self.as_task(queue, async move |image, queue| {
            image.lengthen_to(queue, end).await
        })
        .await
    }

    async fn lengthen_to(&self, queue: &Queue, end: u64) -> Result<()> {
        let writer = self.writer()?;
        let _pass = writer.length.enter().await;
        if end <= self.file_len() {
            return Ok(());
        }
        if self.file.is_device() {
            return Err(Error::os(libc::ENOSPC));
        }
        let cluster_size = self.geometry.cluster_size();
        let unit = cluster_size.max(self.length_unit());
        // A little for a small image, more for one that grows; nothing while
        // writes follow that make it longer themselves.
        let ahead = match writer.appending.load(Ordering::Relaxed) {
            true if writer.changing.load(Ordering::Relaxed) == 1 => 0,
            _ => end.clamp(LEAST_AHEAD, MOST_AHEAD).max(cluster_size),
        };
        // Never shorter than it is. What is written behind this length meanwhile was announced
        // here before, or ends before `end` (`make_way`).
        let now = self.file.len()?;
        let wanted = (end + ahead).next_multiple_of(unit).max(now);
        let mut length = wanted;
        if storage::set_len(&*self.file, queue, wanted).await.is_err() {
            // A limit may lie just behind the length that is needed.
            length = end.next_multiple_of(unit).max(now);
            storage::set_len(&*self.file, queue, length).await?;
        }
        self.reaches(length);
        Ok(())
    }

    /// Prepares the file for the one write, of the host range `written`, that
    /// fills new clusters. When that is done, call [`Image::arrived`].
    ///
    /// ext4 has to find space for each write to a hole, and to convert each in
    /// space taken ahead; with one write at a time both cost more than a write
    /// that makes the file longer, which is what such a write does here. With
    /// several these wait for each other, so they go into space taken ahead,
    /// or, where little of many clusters is written, into holes.
    pub(crate) async fn make_way(
        &self,
        queue: &Queue,
        allocation: &Allocation<'_>,
        written: &Range<u64>,
    ) -> Result<()> {
        let writer = allocation.writer;
        let (host, end) = (allocation.host().0, allocation.end());
        let most = allocation.fresh && 2 * (written.end - written.start) >= end - host;
        let len = self.file_len();
        let unit = self.length_unit();
        let appends = most
            && writer.changing.load(Ordering::Relaxed) == 1
            && written.end == end
            && end > len
            && written.start <= len
            && written.start.is_multiple_of(unit)
            && end.is_multiple_of(unit);
        writer.appending.store(appends, Ordering::Relaxed);
        if appends {
            // A request that takes a later place meanwhile makes the file reach beyond
            // this one; an earlier one is inside the file. So no request cuts off
            // what is written here.
            return Ok(());
        }
        self.lengthen(queue, end).await?;
        let before = match most {
            true => writer.taken.fetch_max(self.file_len(), Ordering::Relaxed),
            false => return Ok(()),
        };
        // Whole pages: others are zeroed by the file system (`blocks.rs`).
        let start = host.max(before).next_multiple_of(unit);
        let length = self.file_len().saturating_sub(start);
        if length > 0 && !self.file.is_device() {
            // If that fails, the write itself reports the error.
            let _ = storage::allocate(&*self.file, queue, start, length).await;
        }
        Ok(())
    }

    /// Ends the write that `make_way` prepared for.
    pub(crate) fn arrived(&self, written: &Range<u64>) {
        self.reaches(written.end);
    }

    /// What the length of the file is a multiple of while it is written, in
    /// bytes: with direct I/O, whole pages (see `storage/blocks.rs`).
    pub(in crate::drivers::qcow2) fn length_unit(&self) -> u64 {
        match self.file.is_device() {
            true => 1,
            false => self.file.blocks().map_or(1, |blocks| blocks.page()),
        }
    }

    /// Lowers the refcounts of dropped references that are ready, and punches holes where that is
    /// wanted. The caller holds the metadata gate.
    ///
    /// A refcount that cannot be read stays too high, which costs space until a repair. It is not
    /// retried: in a damaged image the cluster may have been allocated again, and a failing disk
    /// would be read at every flush.
    pub(crate) async fn free_dropped(&self, queue: &Queue) -> Result<()> {
        let writer = self.writer()?;
        writer.frees.advance(&writer.epochs);
        let mut ready = writer.frees.take_ready();
        while let Some(freed) = ready.first() {
            match self.free_some(queue, freed).await {
                Ok(done) => ready.pass(done),
                Err(error) => {
                    let (first, count) = (freed.first, freed.count);
                    tracing::warn!("{count} clusters from {first:#x} on are not freed: {error}");
                    ready.pass(count);
                }
            }
        }
        Ok(())
    }

    /// Drops a reference. The error has the part of it that is left.
    pub(in crate::drivers::qcow2) async fn drop_reference(
        &self,
        queue: &Queue,
        freed: Freed,
    ) -> std::result::Result<(), (Freed, Error)> {
        let mut left = freed;
        while left.count > 0 {
            match self.free_some(queue, left).await {
                Ok(done) => {
                    left.first += done;
                    left.count -= done;
                }
                Err(e) => return Err((left, e)),
            }
        }
        Ok(())
    }

    /// Frees the first clusters of `freed`, and returns their number.
    async fn free_some(&self, queue: &Queue, freed: Freed) -> Result<u64> {
        let size = self.geometry.cluster_size();
        let writer = self.writer()?;
        if freed.table {
            // A snapshot may still refer to it; the active disk does not.
            writer
                .protected
                .forget_l2_tables(freed.first * size, freed.count * size);
        }
        // From here on no request raises a refcount that is found to be 1.
        writer.refcounts.leave(freed.first, freed.count);
        let (refcount, count) = self
            .refcounts_alike(queue, freed.first, freed.count)
            .await?;
        if refcount == 0 {
            // The refcount was too low: another request may have allocated the cluster already.
            return Ok(count);
        }
        storage::event(&*self.file, storage::Event::ClusterFree);
        if refcount == 1 {
            let (start, length) = (freed.first * size, count * size);
            // All this before the cluster can be allocated again.
            if !writer.protected.may_be_free(start..start + length) {
                // The image is damaged. A cluster in use is not freed.
                return Ok(count);
            }
            self.inflated.clear();
            if freed.punch {
                // An error costs only space.
                let _ = storage::deallocate(&*self.file, queue, start, length).await;
            }
        }
        self.change_refcounts(queue, freed.first, count, -1).await?;
        Ok(count)
    }
}
