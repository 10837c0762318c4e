//! What an image does that is open for writing; its state is `Writer` in `qcow2/mod.rs`.
//!
//! - `change`: the steps of an allocating write; `dirty`: the tables that have changed;
//! - `commit`: the order in which they reach the disk;
//! - `damage`: images that no change would be safe for;
//! - `header`: its changes; `close`: the end of writing.

pub(in crate::drivers::qcow2) mod change;
mod close;
mod commit;
mod damage;
pub(in crate::drivers::qcow2) mod dirty;
mod header;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use crate::drivers::commits::Commits;
use crate::drivers::qcow2::allocation::frees::{Freed, Frees};
use crate::drivers::qcow2::allocation::protect::{BITMAP_DIRECTORY, L2_TABLE, Protected};
use crate::drivers::qcow2::allocation::refcounts::Refcounts;
use crate::drivers::qcow2::allocation::space::Ahead;
use crate::drivers::qcow2::structures::{
    AUTOCLEAR_DATA_FILE_RAW, AUTOCLEAR_KNOWN, Header, L1Entry,
};
use crate::drivers::qcow2::writer::dirty::Dirty;
use crate::drivers::qcow2::{Image, WriteOptions, Writer};
use crate::drivers::{Gate, Ranges, Stay};
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// Bytes of dirty metadata that are written back at the latest.
const DIRTY_BYTES: usize = 8 << 20;
/// Dirty slices that are always allowed, however small the cache.
const DIRTY_SLICES: usize = 64;
/// Bytes of clusters that wait for a commit to become free, at most.
const PENDING_BYTES: u64 = 256 << 20;

/// A request that may change the image: [`Image::announce`] has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Announced<'a>(pub(in crate::drivers::qcow2) &'a Image);

impl Writer {
    /// Refuses changes after a failed flush, or of an image that is corrupt.
    pub(crate) fn check(&self) -> Result<()> {
        self.commits.check()?;
        match self.corrupt.load(Ordering::Relaxed) {
            true => Err(Error::os(libc::EIO)),
            false => Ok(()),
        }
    }

    /// Damage of the tables that makes every change unsafe.
    fn flaw(&self) -> Option<Error> {
        self.refcounts.unaligned().or_else(|| self.protected.flaw())
    }

    /// Frees, with the next commit, clusters to which nothing refers.
    pub(crate) fn free_at_commit(&self, place: Freed) {
        if place.count > 0 {
            self.frees.push_ready(place);
        }
    }

    /// A change of the whole image begins.
    pub(crate) fn whole(&self) -> Whole {
        Whole {
            commits: self.commits.clone(),
            cut_short: self.cut_short.clone(),
            is_over: self.check().is_err(),
        }
    }

    pub(crate) fn header(&self) -> MutexGuard<'_, Header> {
        crate::lock(&self.header)
    }

    /// The next change announces itself anew.
    pub(in crate::drivers::qcow2) fn announce_again(&self) {
        self.announced.store(false, Ordering::SeqCst);
    }

    /// Whether enough has gathered to be written.
    pub(crate) fn is_pressed(&self, image: &Image) -> bool {
        let cluster_size = image.geometry.cluster_size();
        let slice_bytes = image.slice_entries * image.geometry.l2_entry_size();
        let most = (DIRTY_BYTES / slice_bytes)
            .min(image.slices.capacity() / 2)
            .max(DIRTY_SLICES);
        self.dirty.slices() > most
            || self.refcounts.dirty_blocks() as u64 * cluster_size > DIRTY_BYTES as u64
            || self.frees.dropped() * cluster_size > PENDING_BYTES
    }
}

/// A change of the whole image. If its future is dropped midway the state on the
/// disk is unknown, and every write fails until the image is opened again.
pub(crate) struct Whole {
    commits: Arc<Commits>,
    cut_short: Arc<AtomicBool>,
    is_over: bool,
}

impl Whole {
    /// It succeeded, or its error is returned to the caller.
    pub(crate) fn end(mut self) {
        self.is_over = true;
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        if !self.is_over {
            self.commits.fail(libc::EIO);
            self.cut_short.store(true, Ordering::Relaxed);
        }
    }
}

impl Image {
    /// Prepares an image for being written: reads the refcount table.
    pub(crate) async fn begin_writing(
        &mut self,
        queue: &Queue,
        options: WriteOptions,
    ) -> Result<()> {
        let header = &self.header;
        let table = read_words(
            self,
            queue,
            header.refcount_table_offset,
            u64::from(header.refcount_table_clusters) * self.geometry.cluster_size() / 8,
        )
        .await?;
        let opened_len = self.file_len();
        // What zeroes decrypt to are none.
        let reads_as_zeroes = !self.file.is_device() && !header.is_encrypted();
        let fresh = reads_as_zeroes.then_some(opened_len);
        let refcounts = Refcounts::new(self.geometry, table, header.refcount_table_offset, fresh);
        self.writer = Some(Box::new(Writer {
            options,
            clusters: Ranges::default(),
            tables: Ranges::default(),
            commits: Arc::default(),
            refcounts,
            protected: Protected::new(self.geometry.cluster_size(), options.overlap_checks),
            epochs: Arc::default(),
            frees: Frees::default(),
            dirty: Dirty::default(),
            length: Gate::default(),
            opened_len,
            taken: AtomicU64::new(opened_len),
            ahead: Ahead::default(),
            changing: AtomicU64::new(0),
            appending: AtomicBool::new(false),
            cut_short: Arc::default(),
            corrupt: AtomicBool::new(false),
            header: Mutex::new(header.clone()),
            announced: AtomicBool::new(false),
            bitmaps: OnceLock::new(),
        }));
        self.protect_tables(self.writer()?);
        self.protect_inactive(queue).await?;
        Ok(())
    }

    /// Notes the places of the image's tables by the header, the L1 table and the refcount table.
    pub(crate) fn protect_tables(&self, writer: &Writer) {
        let protected = &writer.protected;
        let header = &self.header;
        let size = self.geometry.cluster_size();
        protected.clear();
        protected.set("qcow2_header", 0..size);
        let l1 = header.l1_offset..header.l1_offset + u64::from(header.l1_size) * 8;
        protected.set("active L1 table", l1);
        let (offset, entries) = writer.refcounts.table();
        protected.set("refcount table", offset..offset + entries.len() as u64 * 8);
        if !self.snapshots.is_empty() {
            let length: usize = self.snapshots.iter().map(|s| s.encoded_len()).sum();
            let start = header.snapshots_offset;
            protected.set("snapshot table", start..start + length as u64);
        }
        for snapshot in &self.snapshots {
            let start = snapshot.l1_offset;
            let end = start.saturating_add(u64::from(snapshot.l1_size) * 8);
            protected.add("inactive L1 table", start..end);
        }
        // Until the first change it is not known whether the directory is one.
        if let Some(bitmaps) = writer.bitmaps.get() {
            protected.set(BITMAP_DIRECTORY, bitmaps.directory_place());
        }
        protected.compare();
        // Several entries may have one table if none of them has the copied flag
        // (a repair leaves such tables): it is copied before it is written.
        let mut shared = BTreeSet::new();
        for copied in [true, false] {
            for index in 0..self.l1.len() as u64 {
                let entry: L1Entry = self.l1.get(index);
                let offset = entry.raw_offset().0;
                if offset == 0 || entry.copied() != copied {
                    continue;
                }
                if copied || shared.insert(offset) {
                    protected.add_table(offset, L2_TABLE);
                }
            }
        }
        for offset in writer.refcounts.block_offsets() {
            protected.add_table(offset, "refcount block");
        }
    }

    /// Notes where the L2 tables of the snapshots are now, if they are checked.
    pub(crate) async fn protect_inactive(&self, queue: &Queue) -> Result<()> {
        let protected = &self.writer()?.protected;
        if !protected.checks().has_inactive_l2() {
            return Ok(());
        }
        let tables = self.snapshot_tables(queue).await?;
        protected.set_inactive(tables.into_keys().collect());
        Ok(())
    }

    /// The state of a writable image.
    pub(crate) fn writer(&self) -> Result<&Writer> {
        match &self.writer {
            Some(writer) => Ok(writer),
            None => Err(Error::os(libc::EBADF)),
        }
    }

    /// Enters the epoch until the guard is dropped. None if the image is not open for writing.
    pub(crate) fn enter(&self) -> Option<Stay<'_>> {
        self.writer.as_ref().map(|writer| writer.epochs.enter())
    }

    /// Called before a request changes anything, with the range of the disk that it changes. Makes
    /// sure that the image can be written, sets bits of bitmaps, and clears feature bits that are
    /// not maintained here.
    pub(crate) async fn announce(&self, queue: &Queue, range: Range<u64>) -> Result<Announced<'_>> {
        let writer = self.writer()?;
        writer.check()?;
        loop {
            if let Some(announced) = self.announced(writer, &range) {
                return Ok(announced);
            }
            self.as_task(queue, async move |image, queue| {
                image.announce_first(queue).await
            })
            .await?;
        }
    }

    /// [`Image::announce`] if that needs no I/O.
    #[inline]
    pub(in crate::drivers::qcow2) fn announced(
        &self,
        writer: &Writer,
        range: &Range<u64>,
    ) -> Option<Announced<'_>> {
        if !writer.announced.load(Ordering::Acquire) {
            return None;
        }
        match writer.bitmaps.get() {
            Some(bitmaps) if !self.note_change(bitmaps, range) => None,
            _ => Some(Announced(self)),
        }
    }

    async fn announce_first(&self, queue: &Queue) -> Result<()> {
        let writer = self.writer()?;
        let _pass = writer.commits.gate.enter().await;
        if writer.announced.load(Ordering::Acquire) {
            return Ok(());
        }
        self.refuse_damage(queue).await?;
        self.round_length(queue).await?;
        // Bits that are not known go before anything changes, a bitmap's flag too.
        self.keep_autoclear(queue, AUTOCLEAR_KNOWN).await?;
        if !self.begin_bitmaps(queue, writer).await? {
            self.keep_autoclear(queue, AUTOCLEAR_DATA_FILE_RAW).await?;
        }
        writer.announced.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Clears all other autoclear bits on the disk, durably, if there are any.
    async fn keep_autoclear(&self, queue: &Queue, kept: u64) -> Result<()> {
        let is_kept = self.writer()?.header().autoclear & !kept == 0;
        if is_kept {
            return Ok(());
        }
        self.change_header(queue, |header| header.autoclear &= kept)
            .await
    }

    /// Makes the file as long as it must be to be written. No write to its last
    /// page is in flight.
    pub(in crate::drivers::qcow2) async fn round_length(&self, queue: &Queue) -> Result<()> {
        let wanted = self.file_len().next_multiple_of(self.length_unit());
        if wanted > self.file_len() {
            storage::set_len(&*self.file, queue, wanted).await?;
            self.reaches(wanted);
        }
        Ok(())
    }
}

/// Big-endian words of a table.
async fn read_words(image: &Image, queue: &Queue, offset: u64, count: u64) -> Result<Vec<u64>> {
    storage::event(&*image.file, storage::Event::ReftableLoad);
    let bytes = storage::read_vec(&*image.file, queue, offset, count as usize * 8).await?;
    let words = bytes.chunks_exact(8);
    Ok(words
        .map(|w| u64::from_be_bytes(w.try_into().expect("8 bytes")))
        .collect())
}
