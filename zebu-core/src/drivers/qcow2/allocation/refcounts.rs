//! Refcounts in memory, and the allocation of clusters. There is no I/O here: the caller loads what
//! is missing and tries again.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use crate::drivers::qcow2::allocation::protect::Protected;
use crate::drivers::qcow2::structures::{Geometry, RefcountBlock, RefcountTableEntry};
use crate::offset::HostOffset;
use crate::{Error, Result};

/// Bytes of clean refcount blocks kept in memory, and at least [`MIN_KEPT`]
/// blocks.
const KEPT: u64 = 4 << 20;
const MIN_KEPT: usize = 8;

/// How many entries behind the first free one a longer run is looked for.
const FAR: usize = 512;

/// Clusters side by side in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Number of the first: host offset over cluster size.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// The result of an allocation.
#[derive(Debug)]
pub(crate) enum Taken {
    /// These are the caller's, each with refcount 1. `fresh`: they read as
    /// zeroes, since nothing was ever written there.
    Run { run: Run, fresh: bool },
    /// A refcount block is needed first.
    Missing(Missing),
}

/// What the caller must provide before it tries again.
#[derive(Debug)]
pub(crate) enum Missing {
    /// This block is in the file.
    Load(Load),
    /// The refcount table must grow to have this entry.
    Grow(u64),
    /// Space for new blocks in these clusters ([`Refcounts::note_space`]).
    Space(Run),
}

/// A block to be loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Its number.
    pub index: u64,
    /// Where it is.
    pub offset: HostOffset,
    /// Tells whether it was loaded and evicted since.
    evictions: u64,
}

#[derive(Debug)]
pub(crate) struct Refcounts {
    state: Mutex<State>,
}

#[derive(Debug)]
struct Block {
    bytes: Vec<u8>,
    /// Bytes that differ from the disk.
    dirty: Range<usize>,
    /// The table on the disk does not point to it yet.
    new: bool,
    /// A copy of its bytes is on the way to the disk.
    writing: bool,
    used: u64,
}

#[derive(Debug)]
struct State {
    geometry: Geometry,
    /// The refcount table: entries as they are on the disk, but for those of
    /// new blocks.
    table: Vec<u64>,
    table_offset: u64,
    blocks: HashMap<u64, Block>,
    /// Blocks with dirty bytes, or new ones.
    dirty_blocks: usize,
    tick: u64,
    evictions: u64,
    /// Below it no cluster is free.
    cursor: u64,
    /// From here on nothing was ever written; `u64::MAX` if that is unknown.
    fresh: u64,
    /// Behind the last cluster ever taken.
    high: u64,
    /// Where the next compressed data go: host offset, inside a cluster.
    tail: Option<u64>,
    /// Clusters whose space in the file was taken for new blocks.
    reserved: HashSet<u64>,
}

/// A dirty block on its way to the disk.
#[derive(Debug)]
pub(crate) struct Writing {
    /// Number of the block.
    pub index: u64,
    /// Host offset of `bytes`.
    pub offset: u64,
    /// What is to be written.
    pub bytes: Vec<u8>,
    range: Range<usize>,
    /// The table does not point to it yet.
    pub new: bool,
}

impl Refcounts {
    /// Refcounts of an image whose refcount table has these entries. What is
    /// behind `fresh` bytes of the file was never written. Reserved bits of
    /// entries are left out, as QEMU does: they are no part of a block's offset.
    pub(crate) fn new(
        geometry: Geometry,
        mut table: Vec<u64>,
        table_offset: u64,
        fresh: Option<u64>,
    ) -> Self {
        for entry in &mut table {
            *entry = RefcountTableEntry(*entry).without_reserved().0;
        }
        Refcounts {
            state: Mutex::new(State {
                geometry,
                table,
                table_offset,
                blocks: HashMap::new(),
                dirty_blocks: 0,
                tick: 0,
                evictions: 0,
                cursor: 0,
                fresh: fresh.map_or(u64::MAX, |bytes| geometry.clusters_for(bytes)),
                high: 0,
                tail: None,
                reserved: HashSet::new(),
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while holding the lock.
        crate::lock(&self.state)
    }

    /// Takes up to `want` (at least 1) free clusters side by side.
    pub(crate) fn take(&self, want: u64, protected: &Protected) -> Result<Taken> {
        self.state().take(want, protected)
    }

    /// Takes `count` clusters side by side, behind everything that is counted;
    /// the first.
    pub(crate) fn take_area(
        &self,
        count: u64,
        protected: &Protected,
    ) -> Result<Result<u64, Missing>> {
        self.state().take_area(count, protected)
    }

    /// Allocates places for compressed data of these lengths, at most a cluster
    /// each, one behind the other where that is possible; adds them (host
    /// offset, length) to `places` until something is missing.
    pub(crate) fn take_bytes(
        &self,
        lengths: &[u64],
        places: &mut Vec<(u64, u64)>,
        protected: &Protected,
    ) -> Result<Option<Missing>> {
        let mut state = self.state();
        for length in lengths {
            match state.take_bytes(*length, protected)? {
                Ok(offset) => places.push((offset, *length)),
                Err(missing) => return Ok(Some(missing)),
            }
        }
        Ok(None)
    }

    /// Adds `delta` to the refcounts of clusters side by side whose refcounts
    /// are alike ([`Refcounts::alike`]).
    pub(crate) fn change(&self, first: u64, count: u64, delta: i64) -> Result<Result<(), Missing>> {
        self.state().change(first, count, delta)
    }

    /// The refcount of a cluster, and how many from there on, at most `most`
    /// (at least 1), have the same and are counted by the same block.
    pub(crate) fn alike(&self, cluster: u64, most: u64) -> Result<Result<(u64, u64), Missing>> {
        let mut state = self.state();
        let per_block = state.per_block();
        let index = cluster / per_block;
        let most = most.min(per_block - cluster % per_block);
        if state.entry(index)?.is_none() {
            return Ok(Ok((0, most)));
        }
        let geometry = state.geometry;
        Ok(match state.resident(index)? {
            Err(missing) => Err(missing),
            Ok(block) => {
                let view = RefcountBlock::new(&block.bytes[..], &geometry);
                let at = |n: u64| view.get((cluster % per_block + n) as usize).unwrap_or(0);
                let refcount = at(0);
                let count = (1..most).find(|n| at(*n) != refcount).unwrap_or(most);
                Ok((refcount, count))
            }
        })
    }

    /// Compressed data are not added to these clusters any more: their last
    /// reference may go.
    pub(crate) fn leave(&self, first: u64, count: u64) {
        let mut state = self.state();
        let size = state.geometry.cluster_size();
        let inside = |at: &u64| (first..first + count).contains(&(at / size));
        state.tail = state.tail.filter(|at| !inside(at));
    }

    /// Inserts a loaded block, unless it is outdated.
    pub(crate) fn loaded(&self, load: Load, bytes: Vec<u8>) {
        let mut state = self.state();
        // A block that was evicted meanwhile may have been this one, changed since it was read.
        if state.evictions != load.evictions || state.blocks.contains_key(&load.index) {
            return;
        }
        state.evict();
        let used = state.now();
        state.blocks.insert(
            load.index,
            Block {
                bytes,
                dirty: 0..0,
                new: false,
                writing: false,
                used,
            },
        );
    }

    /// Blocks that differ from the disk, and new ones.
    pub(crate) fn dirty_blocks(&self) -> usize {
        self.state().dirty_blocks
    }

    /// Copies what is dirty, to be written. The caller reports with
    /// [`Refcounts::written`] how that ended; one caller at a time.
    pub(crate) fn begin_writing(&self) -> Vec<Writing> {
        self.state().begin_writing()
    }

    /// Ends a write of what `begin_writing` returned: it is on the disk, or (`ok` false) it may not
    /// be.
    pub(crate) fn written(&self, writing: &[Writing], ok: bool) {
        let mut state = self.state();
        for w in writing {
            let Some(block) = state.blocks.get_mut(&w.index) else {
                continue;
            };
            block.writing = false;
            if !ok {
                let was_clean = block.dirty.is_empty();
                block.dirty = join(block.dirty.clone(), w.range.clone());
                state.dirty_blocks += usize::from(was_clean);
            }
        }
    }

    /// The table now points to these new blocks, on the disk too.
    pub(crate) fn listed(&self, writing: &[Writing]) {
        let mut state = self.state();
        for w in writing.iter().filter(|w| w.new) {
            if let Some(block) = state.blocks.get_mut(&w.index) {
                block.new = false;
            }
        }
    }

    /// The part of the refcount table with entry `index`, of at most `length`
    /// bytes: its host offset, and its bytes as they shall be on the disk.
    /// Entries of new blocks are left out but for those of `writing`.
    pub(crate) fn table_piece(
        &self,
        index: u64,
        length: u64,
        writing: &[Writing],
    ) -> (u64, Vec<u8>) {
        let state = self.state();
        let entries = length / 8;
        let first = index / entries * entries;
        let mut bytes = vec![0; length as usize];
        for (place, index) in bytes.chunks_exact_mut(8).zip(first..) {
            place.copy_from_slice(&state.durable_entry(index, writing).to_be_bytes());
        }
        (state.table_offset + first * 8, bytes)
    }

    /// Notes that the file has space for new blocks in these clusters. If another request has made
    /// one of them meanwhile, the space is used, and must not be noted for a later block.
    pub(crate) fn note_space(&self, blocks: Run) {
        let mut state = self.state();
        let first = (blocks.first / state.per_block()) as usize;
        let mut entries = state.table.iter().skip(first).take(blocks.count as usize);
        if entries.all(|entry| *entry == 0) {
            state
                .reserved
                .extend(blocks.first..blocks.first + blocks.count);
        }
    }

    /// The host ranges of those pieces of the table, of `piece` bytes each, that
    /// have nothing in them yet and get entries of new blocks in these clusters.
    pub(crate) fn empty_pieces(&self, blocks: Run, piece: u64) -> Vec<Range<u64>> {
        let state = self.state();
        let (per_block, entries) = (state.per_block(), piece / 8);
        // They lie at the start of what the first of them counts, and are numbered
        // from there.
        let first = blocks.first / per_block;
        let last = (first + blocks.count - 1).min(state.table.len().saturating_sub(1) as u64);
        (first / entries..=last / entries)
            .filter(|nth| {
                let from = (nth * entries) as usize;
                let rest = state.table.iter().skip(from).take(entries as usize);
                rest.into_iter().all(|entry| *entry == 0)
            })
            .map(|nth| {
                let start = state.table_offset + nth * piece;
                start..start + piece
            })
            .collect()
    }

    /// Entries of the table.
    pub(crate) fn table_len(&self) -> u64 {
        self.state().table.len() as u64
    }

    /// Where the table is, and its entries as they are on the disk.
    pub(crate) fn table(&self) -> (u64, Vec<u64>) {
        let state = self.state();
        let entries = 0..state.table.len() as u64;
        let entries = entries.map(|i| state.durable_entry(i, &[])).collect();
        (state.table_offset, entries)
    }

    /// The first entry of the table whose offset is not aligned to clusters.
    pub(crate) fn unaligned(&self) -> Option<Error> {
        let state = self.state();
        let mask = state.geometry.cluster_size() - 1;
        let index = state.table.iter().position(|entry| entry & mask != 0)?;
        Some(Error::RefcountBlockUnaligned {
            offset: state.table[index],
            index: index as u64,
        })
    }

    /// Where the blocks of the table are.
    pub(crate) fn block_offsets(&self) -> Vec<u64> {
        let state = self.state();
        state.table.iter().copied().filter(|o| *o != 0).collect()
    }

    /// A new, larger table is in use: at `offset`, with `entries` entries, of
    /// which `blocks` (number and host offset) are new. Clusters from there to
    /// `high` are taken.
    pub(crate) fn grown(&self, offset: u64, entries: u64, blocks: &[(u64, u64)], high: u64) {
        let mut state = self.state();
        state.table.resize(entries as usize, 0);
        for (index, block) in blocks {
            state.table[*index as usize] = *block;
        }
        state.table_offset = offset;
        state.use_up(high);
    }

    /// Behind the last cluster that was ever taken here.
    pub(crate) fn high(&self) -> u64 {
        self.state().high
    }
}

/// The smallest range with both; an empty one counts for nothing.
fn join(a: Range<usize>, b: Range<usize>) -> Range<usize> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b,
        (_, true) => a,
        _ => a.start.min(b.start)..a.end.max(b.end),
    }
}

impl State {
    fn per_block(&self) -> u64 {
        self.geometry.refcount_block_entries() as u64
    }

    fn now(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    /// Where block `index` is, if the table has one.
    fn entry(&self, index: u64) -> Result<Option<HostOffset>> {
        let Some(entry) = self.table.get(index as usize) else {
            return Ok(None);
        };
        let entry = RefcountTableEntry(*entry).without_reserved();
        let block = entry.block(&self.geometry);
        block.map_err(|e| Error::Format(e.at("refcount table entry", index)))
    }

    /// The entry as it may be on the disk: not that of a block whose bytes may
    /// not be there yet.
    fn durable_entry(&self, index: u64, writing: &[Writing]) -> u64 {
        let is_new = self.blocks.get(&index).is_some_and(|b| b.new)
            && !writing.iter().any(|w| w.index == index);
        match self.table.get(index as usize) {
            Some(entry) if !is_new => *entry,
            _ => 0,
        }
    }

    /// Block `index`, which the table has.
    fn resident(&mut self, index: u64) -> Result<Result<&mut Block, Missing>> {
        let now = self.now();
        if !self.blocks.contains_key(&index) {
            let Some(offset) = self.entry(index)? else {
                return Err(Error::Refused(format!(
                    "Refcount block {index:#x} is missing"
                )));
            };
            return Ok(Err(Missing::Load(Load {
                index,
                offset,
                evictions: self.evictions,
            })));
        }
        let block = self.blocks.get_mut(&index).expect("looked for above");
        block.used = now;
        Ok(Ok(block))
    }

    /// Lets the least recently used clean blocks go when there are too many.
    fn evict(&mut self) {
        let kept = ((KEPT / self.geometry.cluster_size()) as usize).max(MIN_KEPT);
        loop {
            let is_clean = |b: &Block| b.dirty.is_empty() && !b.new && !b.writing;
            let clean = self.blocks.iter().filter(|(_, b)| is_clean(b));
            let (count, oldest) = clean.fold((0, None), |(count, oldest), (index, b)| {
                let this = (b.used, *index);
                (
                    count + 1,
                    Some(oldest.map_or(this, |o: (u64, u64)| o.min(this))),
                )
            });
            let Some((_, index)) = oldest.filter(|_| count >= kept) else {
                return;
            };
            self.blocks.remove(&index);
            self.evictions += 1;
        }
    }

    fn set(&mut self, index: u64, entry: usize, refcount: u64) -> Result<()> {
        let geometry = self.geometry;
        let block = self.blocks.get_mut(&index).expect("resident");
        let mut view = RefcountBlock::new(&mut block.bytes[..], &geometry);
        view.set(entry, refcount)?;
        let range = RefcountBlock::new(&block.bytes[..], &geometry).byte_range(entry);
        if block.dirty.is_empty() {
            self.dirty_blocks += 1;
        }
        block.dirty = join(block.dirty.clone(), range);
        Ok(())
    }

    /// Clusters up to `end` are taken, or were.
    fn use_up(&mut self, end: u64) {
        self.high = self.high.max(end);
        if self.fresh != u64::MAX {
            self.fresh = self.fresh.max(end);
        }
    }

    /// Whether there is space for new blocks in these clusters, which are about
    /// to be made then.
    fn take_space(&mut self, blocks: Run) -> bool {
        let mut clusters = blocks.first..blocks.first + blocks.count;
        if !clusters.all(|cluster| self.reserved.contains(&cluster)) {
            return false;
        }
        for cluster in blocks.first..blocks.first + blocks.count {
            self.reserved.remove(&cluster);
        }
        true
    }

    /// A new block, with itself as its only cluster: the first of those that it
    /// counts. No block means that none of them is taken.
    fn new_block(&mut self, index: u64, protected: &Protected) -> Result<()> {
        let cluster = index * self.per_block();
        self.new_block_at(index, cluster, protected)?;
        self.set(index, 0, 1)?;
        self.use_up(cluster + 1);
        Ok(())
    }

    /// A new block, all zeroes, in a free cluster.
    fn new_block_at(&mut self, index: u64, cluster: u64, protected: &Protected) -> Result<()> {
        let offset = self.offset(cluster)?;
        let size = self.geometry.cluster_size();
        protected.check(offset, size)?;
        self.evict();
        let used = self.now();
        self.blocks.insert(
            index,
            Block {
                bytes: vec![0; size as usize],
                dirty: 0..size as usize,
                new: true,
                writing: false,
                used,
            },
        );
        self.dirty_blocks += 1;
        self.table[index as usize] = offset;
        protected.add_table(offset, "refcount block");
        Ok(())
    }

    fn take_area(&mut self, count: u64, protected: &Protected) -> Result<Result<u64, Missing>> {
        let per_block = self.per_block();
        let used = self.table.iter().rposition(|entry| *entry != 0);
        let index = used.map_or(0, |last| last as u64 + 1);
        // The blocks lie in front of what they count, and count themselves.
        let blocks = count.div_ceil(per_block - 1);
        let last = index + blocks - 1;
        if last >= self.table.len() as u64 {
            return Ok(Err(Missing::Grow(last)));
        }
        let start = index * per_block;
        let end = start + blocks + count;
        let (from, to) = (self.offset(start)?, self.offset(end)?);
        protected.check(from, to - from)?;
        let run = Run {
            first: start,
            count: blocks,
        };
        if !self.take_space(run) {
            return Ok(Err(Missing::Space(run)));
        }
        for nth in 0..blocks {
            self.new_block_at(index + nth, start + nth, protected)?;
        }
        for cluster in start..end {
            self.set(cluster / per_block, (cluster % per_block) as usize, 1)?;
        }
        self.use_up(end);
        Ok(Ok(start + blocks))
    }

    /// The host offset of a cluster that is to be used.
    fn offset(&self, cluster: u64) -> Result<u64> {
        match self.geometry.cluster_offset(cluster) {
            Some(offset) if offset.0 < 1 << 56 => Ok(offset.0),
            _ => Err(Error::os(libc::EFBIG)),
        }
    }

    fn take(&mut self, want: u64, protected: &Protected) -> Result<Taken> {
        let per_block = self.per_block();
        loop {
            let index = self.cursor / per_block;
            if index >= self.table.len() as u64 {
                return Ok(Taken::Missing(Missing::Grow(index)));
            }
            if self.entry(index)?.is_none() {
                let run = Run {
                    first: index * per_block,
                    count: 1,
                };
                protected.check(self.offset(run.first)?, self.geometry.cluster_size())?;
                if !self.take_space(run) {
                    return Ok(Taken::Missing(Missing::Space(run)));
                }
                self.new_block(index, protected)?;
            }
            let from = (self.cursor % per_block) as usize;
            let geometry = self.geometry;
            let block = match self.resident(index)? {
                Err(missing) => return Ok(Taken::Missing(missing)),
                Ok(block) => block,
            };
            let view = RefcountBlock::new(&block.bytes[..], &geometry);
            let Some((first, start, count)) = find_run(&view, from, want) else {
                self.cursor = (index + 1) * per_block;
                continue;
            };
            let cluster = index * per_block + start as u64;
            let offset = self.offset(cluster)?;
            self.offset(cluster + count)?;
            protected.check(offset, count * geometry.cluster_size())?;
            for entry in start..start + count as usize {
                self.set(index, entry, 1)?;
            }
            self.cursor = index * per_block + first as u64;
            if first == start {
                self.cursor += count;
            }
            let fresh = cluster >= self.fresh;
            self.use_up(cluster + count);
            let run = Run {
                first: cluster,
                count,
            };
            return Ok(Taken::Run { run, fresh });
        }
    }

    fn take_bytes(&mut self, length: u64, protected: &Protected) -> Result<Result<u64, Missing>> {
        let size = self.geometry.cluster_size();
        let max = self.geometry.refcount_max();
        // What the tail's cluster has left, if it can be referred to once more.
        let mut tail = None;
        if let Some(at) = self.tail {
            let cluster = at / size;
            let (index, entry) = (cluster / self.per_block(), cluster % self.per_block());
            let geometry = self.geometry;
            let block = match self.resident(index)? {
                Err(missing) => return Ok(Err(missing)),
                Ok(block) => block,
            };
            let view = RefcountBlock::new(&block.bytes[..], &geometry);
            let refcount = view.get(entry as usize).unwrap_or(0);
            if refcount > 0 && refcount < max {
                tail = Some((at, cluster, refcount));
            }
        }
        let mut start = None;
        if let Some((at, cluster, refcount)) = tail {
            let left = (cluster + 1) * size - at;
            if length > left {
                // On into the next cluster, if that is what is free.
                let (run, _) = match self.take(1, protected)? {
                    Taken::Missing(missing) => return Ok(Err(missing)),
                    Taken::Run { run, fresh } => (run, fresh),
                };
                if run.first != cluster + 1 {
                    start = Some(run.first * size);
                }
            }
            if start.is_none() {
                let per_block = self.per_block();
                self.set(
                    cluster / per_block,
                    (cluster % per_block) as usize,
                    refcount + 1,
                )?;
                start = Some(at);
            }
        }
        let start = match start {
            Some(start) => start,
            None => match self.take(1, protected)? {
                Taken::Missing(missing) => return Ok(Err(missing)),
                Taken::Run { run, .. } => run.first * size,
            },
        };
        if start + length > self.geometry.compressed_offset_limit() {
            return Err(Error::os(libc::EFBIG));
        }
        let end = start + length;
        self.tail = (!end.is_multiple_of(size)).then_some(end);
        Ok(Ok(start))
    }

    fn change(&mut self, first: u64, count: u64, delta: i64) -> Result<Result<(), Missing>> {
        let index = first / self.per_block();
        let start = (first % self.per_block()) as usize;
        let geometry = self.geometry;
        let wrong = |what: &str, cluster: u64| {
            let offset = cluster * geometry.cluster_size();
            Error::Refused(format!("{what} of the cluster at {offset:#x}"))
        };
        if self.entry(index)?.is_none() {
            return Err(wrong("No refcount block for the refcount", first));
        }
        if let Err(missing) = self.resident(index)? {
            return Ok(Err(missing));
        }
        for (entry, cluster) in (start..).zip(first..first + count) {
            let block = self.blocks.get(&index).expect("resident");
            let view = RefcountBlock::new(&block.bytes[..], &geometry);
            let before = view.get(entry).unwrap_or(0);
            let after = match before.checked_add_signed(delta) {
                Some(after) if after <= geometry.refcount_max() => after,
                Some(_) => return Err(wrong("Overflow of the refcount", cluster)),
                None => return Err(wrong("Underflow of the refcount", cluster)),
            };
            self.set(index, entry, after)?;
            if after == 0 {
                self.cursor = self.cursor.min(cluster);
                // Nothing may be added to what is allocated to another next.
                let size = geometry.cluster_size();
                self.tail = self.tail.filter(|at| at / size != cluster);
            }
        }
        Ok(Ok(()))
    }

    fn begin_writing(&mut self) -> Vec<Writing> {
        let size = self.geometry.cluster_size() as usize;
        let mut all = Vec::new();
        for (index, block) in &mut self.blocks {
            if block.dirty.is_empty() {
                continue;
            }
            // Whole blocks of any device.
            let start = block.dirty.start & !4095;
            let end = block.dirty.end.next_multiple_of(4096).min(size);
            block.dirty = 0..0;
            block.writing = true;
            all.push(Writing {
                index: *index,
                offset: self.table[*index as usize] + start as u64,
                bytes: block.bytes[start..end].to_vec(),
                range: start..end,
                new: block.new,
            });
        }
        // New ones are dirty from the start, so all that count are in `all`.
        self.dirty_blocks = 0;
        all.sort_unstable_by_key(|w| w.offset);
        all
    }
}

/// In a block, from entry `from` on: the first free entry, and where up to
/// `want` free entries side by side start: the first place that has them all,
/// or else the first free entry, and how many there are.
fn find_run(view: &RefcountBlock<&[u8]>, from: usize, want: u64) -> Option<(usize, usize, u64)> {
    let first = view.next_free(from)?;
    // A fragmented block is not searched through at each call.
    let limit = first + FAR;
    let mut best = None;
    let mut start = Some(first);
    while let Some(at) = start {
        // No further than needed: most of a block may be free.
        let mut count = 1;
        while count < want && view.get(at + count as usize) == Some(0) {
            count += 1;
        }
        if count == want {
            return Some((first, at, want));
        }
        best = best.or(Some((first, at, count)));
        start = view
            .next_free(at + count as usize)
            .filter(|next| *next < limit);
    }
    best
}

#[cfg(test)]
mod tests {
    //! Guards against a new refcount block whose space is not allocated.
    use super::*;
    use crate::drivers::qcow2::structures::Header;

    #[test]
    fn a_block_that_two_requests_prepare_is_used_once() {
        let geometry = Geometry::new(&Header::new(16, 1 << 30)).unwrap();
        let mut table = vec![0; 8];
        table[0] = 1 << 16;
        let refcounts = Refcounts::new(geometry, table, 2 << 16, None);
        let protected = Protected::new(geometry.cluster_size(), Default::default());
        let needed = || match refcounts.take_area(1, &protected).unwrap() {
            Err(Missing::Space(blocks)) => Some(blocks),
            Err(other) => panic!("{other:?}"),
            Ok(_) => None,
        };
        // Two requests find that a block is missing, and make one each.
        let (one, two) = (needed().unwrap(), needed().unwrap());
        assert_eq!(one, two);
        refcounts.note_space(one);
        assert_eq!(needed(), None);
        refcounts.note_space(two);
        assert!(refcounts.state().reserved.is_empty());
    }
}
