//! The state of an image that is open for writing.
//!
//! - `change`: the steps of an allocating write; `dirty`: the tables that have changed;
//! - `commit`: the order in which they reach the disk.

pub(in crate::drivers::qcow2) mod change;
mod commit;
pub(in crate::drivers::qcow2) mod dirty;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::allocation::frees::{Freed, Frees};
use crate::drivers::qcow2::allocation::protect::{
    BITMAP_DIRECTORY, L2_TABLE, OverlapChecks, Protected,
};
use crate::drivers::qcow2::allocation::refcounts::Refcounts;
use crate::drivers::qcow2::allocation::space::Ahead;
use crate::drivers::qcow2::bitmaps::Bitmaps;
use crate::drivers::qcow2::structures::{
    AUTOCLEAR_DATA_FILE_RAW, AUTOCLEAR_KNOWN, ClusterKind, CompressedCluster, Header,
    INCOMPATIBLE_CORRUPT, L1Entry, L2Entry, Replacement,
};
use crate::drivers::qcow2::writer::dirty::Dirty;
use crate::drivers::{Epochs, Gate, Ranges, Stay, inflate};
use crate::offset::HostOffset;
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// Bytes of dirty metadata that are written back at the latest.
const DIRTY_BYTES: usize = 8 << 20;
/// Dirty slices that are always allowed, however small the cache.
const DIRTY_SLICES: usize = 64;
/// Bytes of clusters that wait for a commit to become free, at most.
const PENDING_BYTES: u64 = 256 << 20;
/// Bytes that are inflated to see whether compressed data are whole that reach past the end of the file.
const MOST_INFLATED: u64 = 1 << 30;

/// A request that may change the image: [`Image::announce`] has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Announced<'a>(pub(in crate::drivers::qcow2) &'a Image);

/// How an image is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// Punch holes into the file where the guest discards.
    pub punch_request: bool,
    /// Punch holes into the file where deleting a snapshot frees clusters.
    pub punch_snapshot: bool,
    /// Punch holes into the file where anything else frees clusters.
    pub punch_other: bool,
    /// Clusters of which the guest discards all stay allocated, as zeroes (version 3).
    pub keep_discarded: bool,
    /// The structures against which writes of data are checked.
    pub overlap_checks: OverlapChecks,
    /// Store bitmaps with each flush, not only when the image is closed.
    pub store_bitmaps: bool,
}

/// The shared state of the requests that change an image.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) options: WriteOptions,
    /// By number of the guest cluster: held by a request that changes its mapping.
    pub(crate) clusters: Ranges,
    /// By L1 index: held by a request that gives it a table of its own. Taken when
    /// clusters are held, never the other way round.
    pub(crate) tables: Ranges,
    /// Held while metadata are written to the disk. Taken after all of these.
    pub(crate) gate: Gate,
    pub(crate) refcounts: Refcounts,
    pub(crate) protected: Protected,
    pub(crate) epochs: Arc<Epochs>,
    pub(crate) frees: Frees,
    pub(crate) dirty: Dirty,
    /// Requested flushes, and the number of them that a commit has served.
    pub(crate) asked: AtomicU64,
    pub(crate) committed: AtomicU64,
    /// Held while the file is made longer; taken after `gate`.
    pub(crate) length: Gate,
    /// How long the file was when it was opened, in bytes.
    opened_len: u64,
    /// How far its space is taken ahead (`make_way`), in bytes.
    pub(crate) taken: AtomicU64,
    /// What is taken ahead for small tables.
    pub(crate) ahead: Ahead,
    /// How many requests change mappings now.
    pub(crate) changing: AtomicU64,
    /// Whether the last write to new clusters made the file longer itself.
    pub(crate) appending: AtomicBool,
    /// The error number of a flush that failed; 0: none did.
    failed: Arc<AtomicI32>,
    /// Whether a change of the whole image was dropped midway.
    cut_short: Arc<AtomicBool>,
    corrupt: AtomicBool,
    /// The header as it is on the disk.
    header: Mutex<Header>,
    /// Whether header and bitmaps are ready for the next change.
    pub(in crate::drivers::qcow2) announced: AtomicBool,
    /// The bitmaps, from the first change on if the image has some.
    pub(in crate::drivers::qcow2) bitmaps: OnceLock<Bitmaps>,
}

impl Writer {
    /// Refuses changes after a failed flush, or of an image that is corrupt.
    pub(crate) fn check(&self) -> Result<()> {
        match self.failed.load(Ordering::Relaxed) {
            0 if self.corrupt.load(Ordering::Relaxed) => Err(Error::os(libc::EIO)),
            0 => Ok(()),
            errno => Err(Error::os(errno)),
        }
    }

    /// Damage of the tables that makes every change unsafe.
    fn flaw(&self) -> Option<Error> {
        self.refcounts.unaligned().or_else(|| self.protected.flaw())
    }

    /// A flush failed.
    pub(crate) fn fail(&self, errno: i32) {
        self.failed.store(errno, Ordering::Relaxed);
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
            failed: self.failed.clone(),
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

/// Refuses all further writes if it is dropped before the end: after an error, or with its request.
pub(crate) struct FailOnDrop<'a>(pub(crate) &'a Writer);

impl FailOnDrop<'_> {
    /// Ends it after a success.
    pub(crate) fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for FailOnDrop<'_> {
    fn drop(&mut self) {
        if self.0.check().is_ok() {
            self.0.fail(libc::EIO);
        }
    }
}

/// A change of the whole image. If its future is dropped midway the state on the
/// disk is unknown, and every write fails until the image is opened again.
pub(crate) struct Whole {
    failed: Arc<AtomicI32>,
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
            let (failed, errno) = (&self.failed, libc::EIO);
            let _ = failed.compare_exchange(0, errno, Ordering::Relaxed, Ordering::Relaxed);
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
        let fresh = (!self.file.is_device()).then_some(opened_len);
        let refcounts = Refcounts::new(self.geometry, table, header.refcount_table_offset, fresh);
        self.writer = Some(Box::new(Writer {
            options,
            clusters: Ranges::default(),
            tables: Ranges::default(),
            gate: Gate::default(),
            refcounts,
            protected: Protected::new(self.geometry.cluster_size(), options.overlap_checks),
            epochs: Arc::default(),
            frees: Frees::default(),
            dirty: Dirty::default(),
            asked: AtomicU64::new(0),
            committed: AtomicU64::new(0),
            length: Gate::default(),
            opened_len,
            taken: AtomicU64::new(opened_len),
            ahead: Ahead::default(),
            changing: AtomicU64::new(0),
            appending: AtomicBool::new(false),
            failed: Arc::default(),
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

    /// Refuses an image with damage that makes every change a danger to other data.
    pub(crate) async fn refuse_damage(&self, queue: &Queue) -> Result<()> {
        if let Some(flaw) = self.writer()?.flaw() {
            return Err(flaw);
        }
        self.refuse_cut_tables(queue).await?;
        // The header's cluster has one reference. If its refcount is another, the
        // place or the width of refcounts is wrong, and clusters in use may seem to
        // be free.
        let (refcount, _) = self.refcounts_alike(queue, 0, 1).await?;
        match refcount {
            1 => Ok(()),
            _ => Err(Error::Refused(format!(
                "The refcounts are damaged: that of the header is {refcount}"
            ))),
        }
    }

    /// Refuses an image with a refcount block, an L2 table or a mapped cluster that is past the end
    /// of the file. Once the file has grown over it, it would read as zeroes: clusters in use as
    /// free, data as unallocated or zero.
    async fn refuse_cut_tables(&self, queue: &Queue) -> Result<()> {
        let refcounts = &self.writer()?.refcounts;
        for offset in refcounts.block_offsets() {
            self.refuse_cut_table("A refcount block", offset)?;
        }
        let mut tables = BTreeSet::new();
        for index in 0..self.l1.len() as u64 {
            let entry: L1Entry = self.l1.get(index);
            if let Ok(Some(table)) = entry.without_reserved().l2_table(&self.geometry) {
                self.refuse_cut_table("An L2 table", table.0)?;
                tables.insert(table.0);
            }
        }
        // More is read only where the refcounts say that something is missing, which may also be
        // clusters that a crash has left without a mapping.
        if !self.counts_past_end(queue).await? {
            return Ok(());
        }
        match self.snapshot_tables(queue).await {
            // Where they make no sense, a change of snapshots is refused anyway.
            Err(Error::Format(_)) => {}
            inactive => {
                for offset in inactive?.into_keys() {
                    self.refuse_cut_table("An L2 table of a snapshot", offset)?;
                    tables.insert(offset);
                }
            }
        }
        let mut inflated = BTreeSet::new();
        for table in tables {
            self.refuse_cut_data(queue, table, &mut inflated).await?;
        }
        Ok(())
    }

    /// Refuses an L2 table that maps data past the end of the file. Of compressed data the file may
    /// lack a part, if they can be read without it. `inflated` has the offsets of
    /// those that were looked at: many entries of a damaged image may refer to one.
    async fn refuse_cut_data(
        &self,
        queue: &Queue,
        table: u64,
        inflated: &mut BTreeSet<HostOffset>,
    ) -> Result<()> {
        let size = self.geometry.cluster_size();
        let bytes = storage::read_vec(&*self.file, queue, table, size as usize).await?;
        for index in 0..self.geometry.l2_entries() {
            let entry = L2Entry::read(&bytes, index, &self.geometry).unwrap_or_default();
            let entry = entry.without_reserved(&self.geometry);
            let (host, is_there) = match entry.kind(&self.geometry) {
                Ok(ClusterKind::Data { host }) if !self.geometry.has_data_file() => {
                    (host, !self.is_past_end(host.0)?)
                }
                Ok(ClusterKind::Compressed(cluster)) => (
                    cluster.offset,
                    self.has_compressed(queue, cluster, inflated).await?,
                ),
                _ => continue,
            };
            if !is_there {
                return Err(Error::Refused(format!(
                    "The image is truncated: data at {:#x} are past the end of the file",
                    host.0
                )));
            }
        }
        Ok(())
    }

    /// Whether the file has the data of a compressed cluster, by its length or by inflating them.
    /// All that are inflated end with the file, so the offset tells them apart.
    async fn has_compressed(
        &self,
        queue: &Queue,
        cluster: CompressedCluster,
        inflated: &mut BTreeSet<HostOffset>,
    ) -> Result<bool> {
        let declared = self.compressed_data(cluster);
        match self.check_compressed(0, declared) {
            Ok(there) if there == declared || inflated.contains(&there.host) => Ok(true),
            // What is that much can only be meant to take time.
            Ok(_) if inflated.len() as u64 >= MOST_INFLATED >> self.geometry.cluster_bits() => {
                Ok(false)
            }
            Ok(there) => {
                inflated.insert(there.host);
                match inflate(queue, &*self.file, 0, there).await {
                    Err(Error::Compressed { .. }) => Ok(false),
                    result => result.map(|_| true),
                }
            }
            Err(Error::Corrupt { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn refuse_cut_table(&self, name: &str, offset: u64) -> Result<()> {
        let last = offset.saturating_add(self.geometry.cluster_size() - 1);
        match self.is_past_end(last)? {
            false => Ok(()),
            true => Err(Error::Refused(format!(
                "{name} at {offset:#x} is past the end of the file"
            ))),
        }
    }

    /// Whether a cluster that is not wholly inside the file has references, by the refcounts.
    async fn counts_past_end(&self, queue: &Queue) -> Result<bool> {
        let (_, table) = self.writer()?.refcounts.table();
        let end = table.len() as u64 * self.geometry.refcount_block_entries() as u64;
        let mut cluster = self.file_len() / self.geometry.cluster_size();
        while cluster < end {
            let (refcount, count) = self.refcounts_alike(queue, cluster, end - cluster).await?;
            if refcount > 0 {
                return Ok(true);
            }
            cluster += count;
        }
        Ok(false)
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
        let _pass = writer.gate.enter().await;
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
        let fail_on_drop = FailOnDrop(writer);
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
            let _pass = image.writer()?.gate.enter().await;
            let mark = |header: &mut Header| header.set_incompatible(INCOMPATIBLE_CORRUPT, true);
            image.change_header(queue, mark).await
        })
        .await
    }

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
        let _pass = writer.gate.enter().await;
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

/// Big-endian words of a table.
async fn read_words(image: &Image, queue: &Queue, offset: u64, count: u64) -> Result<Vec<u64>> {
    storage::event(&*image.file, storage::Event::ReftableLoad);
    let bytes = storage::read_vec(&*image.file, queue, offset, count as usize * 8).await?;
    let words = bytes.chunks_exact(8);
    Ok(words
        .map(|w| u64::from_be_bytes(w.try_into().expect("8 bytes")))
        .collect())
}
