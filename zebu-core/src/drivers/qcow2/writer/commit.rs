//! Writing metadata to the disk, in the order that keeps the image consistent at every instant.
//!
//! Everything is changed in memory first. A commit writes what has gathered since the last one:
//! 1. dirty L2 slices and L1 entries are copied; the data of every mapping in the copy are written
//!    and its refcounts raised (in memory), and dropped references are not in it;
//! 2. refcount blocks are written; new ones are durable before the refcount table refers to them;
//! 3. the files are made durable, and with them refcounts and data;
//! 4. the copied L2 and L1 entries are written, neighbours together;
//! 5. the file is made durable: now the mappings are, and dropped references are gone.
//!
//! L1 entries and the L2 tables that they refer to may be written together: a new L2 table was
//! written in full (`change.rs`), and is durable since step 3.
//!
//! One commit runs at a time ([`Commits`](crate::drivers::Commits)).

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::Writer;
use crate::drivers::qcow2::allocation::frees::Freed;
use crate::drivers::qcow2::allocation::refcounts::Writing as RefcountWriting;
use crate::drivers::qcow2::map::table::Slice;
use crate::offset::GuestOffset;
use crate::storage::{self, Buffer, Queue, Storage};

/// Copied pieces of metadata, to be written.
struct Batch {
    buffer: Buffer,
    /// Host offset, place in the buffer, length; by host offset.
    pieces: Vec<(u64, usize, usize)>,
}

/// What a commit has taken, and gives back if it fails.
struct Frozen<'a> {
    writer: &'a Writer,
    slices: Vec<(u64, Arc<Slice>)>,
    l1: Vec<u64>,
    dropped: Vec<Freed>,
    refcounts: Vec<RefcountWriting>,
}

impl Frozen<'_> {
    /// All of it is durable.
    fn end(mut self) {
        self.writer.refcounts.written(&self.refcounts, true);
        self.writer.frees.gone(std::mem::take(&mut self.dropped));
        self.slices.clear();
        self.l1.clear();
        self.refcounts.clear();
    }
}

impl Drop for Frozen<'_> {
    /// Everything is as dirty as before, also if the commit was dropped midway.
    fn drop(&mut self) {
        self.writer.refcounts.written(&self.refcounts, false);
        self.writer.frees.back(std::mem::take(&mut self.dropped));
        let changed = (
            std::mem::take(&mut self.slices),
            std::mem::take(&mut self.l1),
        );
        self.writer.dirty.put_back(changed);
    }
}

impl Image {
    /// Makes durable what was completed before the call.
    pub(crate) async fn flush(&self, queue: &Queue) -> Result<()> {
        let mine = self.writer()?.commits.ask();
        self.as_task(queue, async move |image, queue| {
            let writer = image.writer()?;
            storage::event(&*image.file, storage::Event::FlushToOs);
            let commit = async || {
                image.commit(queue, true).await?;
                match writer.options.store_bitmaps {
                    true => image.store_bitmaps(queue).await,
                    false => Ok(()),
                }
            };
            writer.commits.serve(mine, commit).await
        })
        .await
    }

    /// Writes metadata back when much has gathered. Called by requests before
    /// they change anything or hold anything.
    pub(crate) async fn write_back_if_needed(&self, queue: &Queue) -> Result<()> {
        if !self.writer()?.is_pressed(self) {
            return Ok(());
        }
        self.as_task(queue, async move |image, queue| {
            let writer = image.writer()?;
            let _pass = writer.commits.gate.enter().await;
            if writer.is_pressed(image) {
                let durable = writer.frees.dropped() > 0;
                image.commit(queue, durable).await?;
            }
            Ok(())
        })
        .await
    }

    /// The commit described above. Without `durable`, step 5 is left to the
    /// next one (and 3, if there is nothing to follow it). The caller has
    /// passed the gate.
    pub(crate) async fn commit(&self, queue: &Queue, durable: bool) -> Result<()> {
        let writer = self.writer()?;
        writer.check()?;
        if is_broken(Rule::GoneBeforeFree) {
            self.free_dropped(queue).await?;
        }
        // References that were dropped before the copy are not in the copy.
        let dropped = writer.frees.take_dropped();
        let (mut slices, mut l1) = writer.dirty.take();
        slices.sort_unstable_by_key(|(number, _)| self.slice_host(*number));
        l1.sort_unstable();
        l1.dedup();
        let mut frozen = Frozen {
            writer,
            slices,
            l1,
            dropped,
            refcounts: Vec::new(),
        };
        let mut batch = self.copy(&frozen);
        // The refcounts of copied mappings were raised before these were set.
        frozen.refcounts = writer.refcounts.begin_writing();
        let late = is_broken(Rule::RefcountsBeforeMappings);
        if !late {
            self.write_refcounts(queue, &frozen.refcounts).await?;
        }
        // (What was dropped may have been written, not durably, before.)
        if durable || !batch.pieces.is_empty() || !frozen.dropped.is_empty() {
            self.make_durable(queue).await?;
        }
        if is_broken(Rule::CopyBeforeFlush) {
            batch = self.copy(&frozen);
        }
        if is_broken(Rule::DroppedBeforeCopy) {
            frozen.dropped.extend(writer.frees.take_dropped());
        }
        if !batch.pieces.is_empty() {
            if !frozen.slices.is_empty() {
                storage::event(&*self.file, storage::Event::L2Update);
            }
            if !frozen.l1.is_empty() {
                storage::event(&*self.file, storage::Event::L1Update);
            }
            self.write_batch(queue, batch).await?;
            let durable = durable && !is_broken(Rule::FlushIsDurable);
            if durable || !frozen.dropped.is_empty() {
                self.flush_file(queue, &*self.file).await?;
            }
        }
        if late {
            self.write_refcounts(queue, &frozen.refcounts).await?;
        }
        frozen.end();
        self.free_dropped(queue).await
    }

    /// Copies the dirty tables.
    fn copy(&self, frozen: &Frozen<'_>) -> Batch {
        let geometry = &self.geometry;
        let slice_bytes = self.slice_entries * geometry.l2_entry_size();
        let table = self.l1_offset();
        let mut l1: Vec<Range<u64>> = frozen.l1.iter().map(|i| self.l1_piece(*i)).collect();
        l1.dedup();
        let l1_bytes: u64 = l1.iter().map(|piece| piece.end - piece.start).sum();
        let length = frozen.slices.len() * slice_bytes + l1_bytes as usize;
        let mut batch = Batch {
            buffer: Buffer::new(length),
            pieces: Vec::new(),
        };
        let mut at = 0;
        for (number, slice) in &frozen.slices {
            slice.clean();
            slice.encode(&mut batch.buffer[at..at + slice_bytes], geometry);
            batch
                .pieces
                .push((self.slice_host(*number), at, slice_bytes));
            at += slice_bytes;
        }
        for piece in l1 {
            let length = (piece.end - piece.start) as usize;
            self.l1
                .encode(piece.start / 8, &mut batch.buffer[at..at + length]);
            batch.pieces.push((table + piece.start, at, length));
            at += length;
        }
        batch
    }

    /// Host offset of slice `number`.
    fn slice_host(&self, number: u64) -> u64 {
        let guest = GuestOffset(number << self.slice_bits);
        let table = self.l1.get(self.geometry.l1_index(guest)).raw_offset();
        let first = self.geometry.l2_index(guest);
        table.0 + (first * self.geometry.l2_entry_size()) as u64
    }

    async fn write_refcounts(&self, queue: &Queue, all: &[RefcountWriting]) -> Result<()> {
        let writer = self.writer()?;
        if all.is_empty() {
            return Ok(());
        }
        let mut buffer = Buffer::new(all.iter().map(|w| w.bytes.len()).sum());
        let mut pieces = Vec::new();
        let mut at = 0;
        for w in all {
            buffer[at..at + w.bytes.len()].copy_from_slice(&w.bytes);
            pieces.push((w.offset, at, w.bytes.len()));
            at += w.bytes.len();
        }
        storage::event(&*self.file, storage::Event::RefblockUpdatePart);
        self.write_batch(queue, Batch { buffer, pieces }).await?;
        let mut new: Vec<u64> = all.iter().filter(|w| w.new).map(|w| w.index).collect();
        if new.is_empty() {
            return Ok(());
        }
        if !is_broken(Rule::BlockBeforeTable) {
            self.flush_file(queue, &*self.file).await?;
        }
        let piece = self.table_piece();
        new.sort_unstable();
        new.dedup_by_key(|index| *index / (piece / 8));
        for index in new {
            let (offset, bytes) = writer.refcounts.table_piece(index, piece, all);
            storage::event(&*self.file, storage::Event::RefblockAllocHookup);
            storage::write_slice(&*self.file, queue, offset, &bytes).await?;
        }
        writer.refcounts.listed(all);
        Ok(())
    }

    /// Writes pieces, several at once, neighbours together.
    async fn write_batch(&self, queue: &Queue, mut batch: Batch) -> Result<()> {
        // SAFETY: the buffer lives until the last write has ended: `flight` is
        // dropped first, which waits for that.
        #[allow(unsafe_code)]
        let iov = unsafe { batch.buffer.iov() };
        let mut flight = storage::Writings::new(&*self.file, queue, queue.options().parts);
        let mut rest = &batch.pieces[..];
        while let Some(&(host, at, first)) = rest.first() {
            let mut length = first;
            let mut count = 1;
            while let Some(&(next, place, more)) = rest.get(count)
                && next == host + length as u64
                && place == at + length
            {
                length += more;
                count += 1;
            }
            rest = &rest[count..];
            let part = iov.slice(at, length);
            flight.write(host, part).await.map_err(|(_, e)| e)?;
        }
        flight.finish().await.map_err(|(_, e)| e)?;
        Ok(())
    }

    /// Makes the data and what was written of the metadata durable.
    async fn make_durable(&self, queue: &Queue) -> Result<()> {
        if is_broken(Rule::DurableBeforeMappings) {
            return Ok(());
        }
        if self.header.has_data_file() && !is_broken(Rule::DataFileBeforeMappings) {
            self.flush_file(queue, &*self.data).await?;
        }
        self.flush_file(queue, &*self.file).await
    }

    /// Flushes a file of the image.
    pub(crate) async fn flush_file(&self, queue: &Queue, file: &dyn Storage) -> Result<()> {
        self.writer()?.commits.flush_file(queue, file).await
    }
}
