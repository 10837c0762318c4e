//! Counts the references of L1 tables, L2 tables and data clusters.

use std::collections::HashMap;
use std::mem::take;

use super::cells::Cells;
use super::refcounts::StoredRefcounts;
use super::{Check, CheckMessage, Metadata, Reader, Use};
use crate::Result;
use crate::drivers::qcow2::inflater;
use crate::drivers::qcow2::structures::{
    ALL_ALLOCATED, COMPRESSED, COPIED, Geometry, OFFSET_MASK, ZERO,
};

/// Bits of an L1 entry that a check reports.
const L1_RESERVED: u64 = !(OFFSET_MASK | COPIED);
/// The same of an L2 entry that is not compressed. With subclusters, QEMU ignores bit 0.
const L2_RESERVED: u64 = !(OFFSET_MASK | COPIED | COMPRESSED | ZERO);
/// Unaligned L2 tables that are read at most. They may overlap, so the length of the file does not
/// bound their number.
const UNALIGNED: u32 = 64;
/// Bytes that are inflated to see whether compressed data are whole that reach past the end of the file.
const CUT_STREAMS: u64 = 1 << 30;

/// The place of an L1 table.
#[derive(Clone, Copy, Debug)]
pub(super) struct L1Table {
    pub(super) offset: u64,
    pub(super) entries: u64,
    /// Whether it is the L1 table of the disk, not of a snapshot.
    pub(super) active: bool,
}

/// Which L2 tables are to be read, and for how many L1 entries each counts.
pub(super) struct Visits {
    geometry: Geometry,
    /// Clusters of L2 tables that were not read yet.
    waiting: Cells,
    /// L1 entries that name a table, without the first.
    again: HashMap<u64, u64>,
    /// Those of them that are in the active L1 table.
    again_active: HashMap<u64, u64>,
    unaligned_left: u32,
    /// Whether the snapshots' L1 tables are read: not if they overlap.
    snapshots: bool,
}

/// One L2 table to read.
#[derive(Clone, Copy, Debug)]
struct Visit {
    /// L1 entries that name it.
    times: u64,
    /// How many of them are in the active L1 table.
    active: u64,
}

impl Visits {
    /// Reads the L1 tables, but no L2 table.
    pub(super) async fn plan(
        reader: &Reader,
        metadata: &Metadata,
        active: &L1Table,
        others: &[Result<L1Table, CheckMessage>],
    ) -> Result<Self> {
        let file_len = metadata.file.len()?;
        let geometry = metadata.geometry;
        let mut visits = Visits {
            geometry,
            waiting: Cells::new(geometry.clusters_for(file_len), 0),
            again: HashMap::new(),
            again_active: HashMap::new(),
            unaligned_left: UNALIGNED,
            snapshots: true,
        };
        visits.plan_table(reader, active).await?;
        visits.again_active.clone_from(&visits.again);
        let others: Vec<&L1Table> = others.iter().flatten().collect();
        let bytes: u64 = others
            .iter()
            .map(|t| reader.inside(t.offset, t.entries * 8))
            .sum();
        visits.snapshots = bytes <= file_len;
        if visits.snapshots {
            for table in others {
                visits.plan_table(reader, table).await?;
            }
        }
        Ok(visits)
    }

    async fn plan_table(&mut self, reader: &Reader, table: &L1Table) -> Result<()> {
        let mut numbers = reader.numbers(table.offset, table.entries);
        loop {
            let entries = numbers.next().await?;
            if entries.is_empty() {
                return Ok(());
            }
            for entry in entries {
                let Some(cluster) = self.table_cluster(entry) else {
                    continue;
                };
                if self.waiting.get(cluster) == 0 {
                    self.waiting.set(cluster, 1);
                } else {
                    *self.again.entry(cluster).or_default() += 1;
                }
            }
        }
    }

    /// The cluster of the L2 table that an L1 entry names, if it is in the file.
    fn table_cluster(&self, entry: u64) -> Option<u64> {
        let offset = entry & OFFSET_MASK;
        let cluster = offset >> self.geometry.cluster_bits();
        (entry != 0 && self.geometry.offset_in_cluster(offset) == 0 && cluster < self.waiting.len())
            .then_some(cluster)
    }

    /// The L2 table of an L1 entry, if it is to be read now.
    fn take(&mut self, entry: u64, table: &L1Table) -> Option<Visit> {
        let active = u64::from(table.active);
        if self.geometry.offset_in_cluster(entry & OFFSET_MASK) != 0 {
            let left = self.unaligned_left.checked_sub(1)?;
            self.unaligned_left = left;
            return Some(Visit { times: 1, active });
        }
        let cluster = self.table_cluster(entry)?;
        if self.waiting.get(cluster) == 0 {
            return None;
        }
        self.waiting.set(cluster, 0);
        let more = |map: &HashMap<u64, u64>| map.get(&cluster).copied().unwrap_or(0);
        Some(Visit {
            times: 1 + more(&self.again),
            active: active * (1 + more(&self.again_active)),
        })
    }
}

impl Check<'_> {
    /// Counts the references of an L1 table, and of its L2 tables that were not read before.
    pub(super) async fn count_l1(
        &mut self,
        table: &L1Table,
        visits: &mut Visits,
        stored: &StoredRefcounts,
    ) -> Result<()> {
        // Many tables may overlap, each as long as the file.
        self.counted_l1 += self.reader.inside(table.offset, table.entries * 8);
        if table.active || self.counted_l1 <= 2 * self.file_len {
            self.count(Use::L1Table, table.offset, table.entries * 8, 1);
        }
        if !table.active && !visits.snapshots {
            if !std::mem::replace(&mut self.skipped_snapshots, true) {
                self.unchecked(CheckMessage::SnapshotL1Overlap);
            }
            return Ok(());
        }
        let cluster_size = self.metadata.geometry.cluster_size();
        let mut numbers = self.reader.numbers(table.offset, table.entries);
        loop {
            let mut entries = numbers.next().await?;
            if entries.is_empty() {
                return Ok(());
            }
            // As in QEMU, an entry that is not 0 names a table, also one at offset 0.
            let all = entries.len();
            entries.retain(|entry| *entry != 0);
            self.reporter.add((all - entries.len()) as u64)?;
            let seen: Vec<_> = entries.iter().map(|e| visits.take(*e, table)).collect();
            let offsets: Vec<u64> = entries
                .iter()
                .zip(&seen)
                .filter_map(|(entry, visit)| visit.map(|_| entry & OFFSET_MASK))
                .collect();
            let mut tables = self
                .reader
                .ahead(offsets.into_iter(), cluster_size as usize);
            for (entry, visit) in entries.into_iter().zip(seen) {
                self.reporter.add(1)?;
                self.count_l1_entry(entry, visits);
                self.suspicious |= table.active && !stored.agrees(entry);
                if visit.is_none() {
                    continue;
                }
                if let (Some(visit), Some(bytes)) = (visit, tables.next().await?) {
                    self.count_l2(bytes, entry & OFFSET_MASK, visit, stored);
                    if let Some(writable) = &mut self.writable {
                        writable.write_zeroed().await?;
                    }
                }
            }
        }
    }

    fn count_l1_entry(&mut self, entry: u64, visits: &Visits) {
        let offset = entry & OFFSET_MASK;
        if entry & L1_RESERVED != 0 {
            self.corrupt(CheckMessage::L1Reserved { entry }, 1);
        }
        let geometry = &self.metadata.geometry;
        let unaligned = geometry.offset_in_cluster(offset) != 0;
        self.count(Use::L2Table, offset, geometry.cluster_size(), 1);
        self.check_whole(Use::L2Table, offset);
        if unaligned {
            self.corrupt(CheckMessage::L2Unaligned { offset }, 1);
            if visits.unaligned_left == 0 && !std::mem::replace(&mut self.skipped_unaligned, true) {
                self.unchecked(CheckMessage::L2UnalignedSkipped);
            }
        }
    }

    /// Counts the references of the L2 table at `offset`.
    fn count_l2(&mut self, table: &[u8], offset: u64, visit: Visit, stored: &StoredRefcounts) {
        let geometry = self.metadata.geometry;
        let mut l2 = L2 {
            visit,
            offset,
            next_host: 0,
        };
        if geometry.has_extended_l2() {
            for (index, entry) in table.as_chunks::<16>().0.iter().enumerate() {
                let (desc, bitmap) = entry.split_at(8);
                let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_be_bytes);
                self.count_entry(&mut l2, index, number(desc), number(bitmap), stored);
            }
        } else {
            let (entries, _) = table.as_chunks::<8>();
            let mut index = 0;
            while let Some(entry) = entries.get(index) {
                let desc = u64::from_be_bytes(*entry);
                let mut done = 1;
                if desc != 0 {
                    done = self.count_run(&mut l2, desc, &entries[index..], stored);
                    if done == 0 {
                        self.count_entry(&mut l2, index, desc, 0, stored);
                        done = 1;
                    }
                }
                index += done;
            }
        }
    }

    /// Counts a run of entries of plain data clusters that are contiguous in the file: most entries
    /// of most images. Returns their number, 0 if the first needs [`Check::count_entry`].
    fn count_run(
        &mut self,
        l2: &mut L2,
        desc: u64,
        entries: &[[u8; 8]],
        stored: &StoredRefcounts,
    ) -> usize {
        let geometry = self.metadata.geometry;
        let host = desc & OFFSET_MASK;
        let is_plain = desc & !(OFFSET_MASK | COPIED) == 0
            && host != 0
            && geometry.offset_in_cluster(host) == 0
            && !geometry.has_data_file();
        if !is_plain {
            return 0;
        }
        let first = host >> geometry.cluster_bits();
        let in_file = (self.file_len >> geometry.cluster_bits()).saturating_sub(first);
        let room = entries
            .len()
            .min(usize::try_from(in_file).unwrap_or(usize::MAX));
        let mut expected = desc;
        let mut count = 0;
        for entry in &entries[..room] {
            if u64::from_be_bytes(*entry) != expected {
                break;
            }
            count += 1;
            // No overflow: the end of the file is below 2^63.
            expected += geometry.cluster_size();
        }
        let added = self.counts.add_run(first, count, l2.visit.times);
        if added == 0 {
            return 0;
        }
        if let Some(uses) = &mut self.uses {
            uses.note(Use::Data, first, first + added);
        }
        self.report.allocated_clusters += l2.visit.active * added;
        if l2.next_host != 0 && host != l2.next_host {
            self.report.fragmented_clusters += l2.visit.active;
        }
        l2.next_host = host + (added << geometry.cluster_bits());
        if l2.visit.active != 0 {
            self.suspicious |= !stored.agrees_run(desc, added);
        }
        added as usize
    }

    #[inline]
    fn count_entry(
        &mut self,
        l2: &mut L2,
        index: usize,
        desc: u64,
        bitmap: u64,
        stored: &StoredRefcounts,
    ) {
        let geometry = self.metadata.geometry;
        let times = l2.visit.times;
        if desc & COMPRESSED != 0 {
            return self.count_compressed(l2, index, desc, bitmap);
        }
        if desc & L2_RESERVED != 0 {
            self.corrupt(CheckMessage::L2Reserved { entry: desc }, times);
        }
        match kind(desc, &geometry) {
            Kind::Nothing => {
                if bitmap & ALL_ALLOCATED != 0 {
                    self.corrupt(CheckMessage::SubclustersUnallocated, times);
                }
            }
            Kind::Zero => {}
            Kind::Host => {
                let host = desc & OFFSET_MASK;
                if (bitmap >> 32) & bitmap != 0 {
                    self.corrupt(CheckMessage::SubclustersCorrupt { offset: host }, times);
                }
                if geometry.offset_in_cluster(host) != 0 {
                    let message = unaligned(host, desc, bitmap, &geometry);
                    if self.zero_entry(l2, index, &message) {
                        return;
                    }
                    self.corrupt(message, times);
                }
                self.count_host(l2, host);
                if is_data(desc, bitmap, &geometry) {
                    self.check_data_file(host, times);
                }
                if l2.visit.active != 0 {
                    self.suspicious |= !stored.agrees_data(desc);
                }
            }
        }
    }

    /// Counts an uncompressed cluster.
    #[inline]
    fn count_host(&mut self, l2: &mut L2, host: u64) {
        let cluster_size = self.metadata.geometry.cluster_size();
        self.report.allocated_clusters += l2.visit.active;
        if l2.next_host != 0 && host != l2.next_host {
            self.report.fragmented_clusters += l2.visit.active;
        }
        l2.next_host = host + cluster_size;
        if !self.metadata.geometry.has_data_file() {
            self.count(Use::Data, host, cluster_size, l2.visit.times);
        }
    }

    /// Reports data past the end of the external data file.
    fn check_data_file(&mut self, host: u64, times: u64) {
        // It is as long as the disk at least, and host offsets are those of the disk.
        let size = self.metadata.header.size;
        let end = match host < size {
            true => (host + self.metadata.geometry.cluster_size()).min(size),
            // An interrupted change of the size leaves clusters behind the end of the disk, the last of
            // which need not be whole.
            false => host + 1,
        };
        if (self.metadata.data_len).is_some_and(|length| length < end) {
            self.corrupt(CheckMessage::OutsideDataFile { offset: host }, times);
        }
    }

    fn count_compressed(&mut self, l2: &mut L2, index: usize, desc: u64, bitmap: u64) {
        let geometry = self.metadata.geometry;
        let visit = l2.visit;
        let offset = desc & geometry.compressed_offset_mask();
        let entry = desc & !COPIED;
        if desc & COPIED != 0 {
            self.corrupt(CheckMessage::CompressedCopied { offset }, visit.times);
        }
        if geometry.has_data_file() {
            let message = CheckMessage::CompressedInDataFile { index, entry };
            return self.corrupt(message, visit.times);
        }
        if bitmap != 0 {
            let message = CheckMessage::CompressedSubclusters { index, entry };
            return self.corrupt(message, visit.times);
        }
        let more = (desc >> geometry.compressed_size_shift()) & geometry.compressed_size_mask();
        let length = (more + 1) * 512 - offset % 512;
        self.count_stream(offset, length, visit.times);
        self.report.allocated_clusters += visit.active;
        self.report.compressed_clusters += visit.active;
        // Compressed clusters are not aligned.
        self.report.fragmented_clusters += visit.active;
    }

    /// Counts `times` references to compressed data, by the length in sectors that the entry has.
    fn count_stream(&mut self, offset: u64, length: u64, times: u64) {
        let inside = self.reader.inside(offset, length);
        if inside == 0 || inside == length {
            return self.count(Use::Data, offset, length, times);
        }
        let key = (offset, inside);
        let most = CUT_STREAMS >> self.metadata.geometry.cluster_bits();
        let has_room =
            (self.cut_streams.len() as u64) < most || self.cut_streams.contains_key(&key);
        if has_room {
            // All of the stream may be there nevertheless.
            *self.cut_streams.entry(key).or_default() += times;
        } else {
            self.count_outside(self.file_len, length - inside, times);
        }
        self.count(Use::Data, offset, inside, times);
    }

    /// Reports compressed data that the end of the file cuts off, unless they can be read without what
    /// is missing.
    pub(super) async fn check_cut_streams(&mut self) -> Result<()> {
        let inflater = inflater(&self.metadata.header);
        for ((offset, length), times) in take(&mut self.cut_streams) {
            let source = self.reader.read(offset, length).await?;
            if inflater.inflated(source, true).await.is_err() {
                self.count_outside(self.file_len, 1, times);
            }
        }
        Ok(())
    }

    /// Repairs an entry without data: it reads as zeroes and names no cluster.
    fn zero_entry(&mut self, l2: &L2, index: usize, message: &CheckMessage) -> bool {
        let geometry = &self.metadata.geometry;
        let is_empty = matches!(message, CheckMessage::PreallocatedUnaligned { .. });
        let at = l2.offset + (index * geometry.l2_entry_size()) as u64;
        // With subclusters the bitmap says which are zeroes, and stays.
        let desc = if geometry.has_extended_l2() { 0 } else { ZERO };
        match &mut self.writable {
            Some(writable) if is_empty && writable.may_zero(l2.offset) => {
                writable.zeroed.push((at, desc));
            }
            _ => return false,
        }
        self.repaired(message.clone());
        true
    }

    /// Reports the entries of the active disk whose copied flag is wrong, and
    /// repairs those that can be.
    ///
    /// For a repair the refcounts must be durable before: a flag that says
    /// "one reference" is believed.
    pub(super) async fn check_copied(&mut self, stored: &StoredRefcounts, fix: bool) -> Result<()> {
        if !self.suspicious {
            return Ok(());
        }
        let active = &self.active_table();
        let geometry = self.metadata.geometry;
        let mut visits = Visits::plan(&self.reader, self.metadata, active, &[]).await?;
        let mut cache = stored.lookup(&self.reader);
        let mut numbers = self.reader.numbers(active.offset, active.entries);
        let mut index = 0;
        loop {
            let entries = numbers.next().await?;
            if entries.is_empty() {
                return Ok(());
            }
            for (entry, index) in entries.iter().copied().zip(index..) {
                let offset = entry & OFFSET_MASK;
                if offset == 0 {
                    continue;
                }
                let Some(refcount) = cache.get(offset >> geometry.cluster_bits()).await? else {
                    continue;
                };
                if (refcount == 1) != (entry & COPIED != 0) {
                    let message = CheckMessage::CopiedL2 {
                        index,
                        entry,
                        refcount,
                    };
                    let at = active.offset + index * 8;
                    match self.writable.as_ref().filter(|w| fix && w.may_flag_l1(at)) {
                        Some(writable) => {
                            let new = entry ^ COPIED;
                            writable.writer.write(at, &new.to_be_bytes()).await?;
                            self.repaired(message);
                        }
                        None => self.corrupt(message, 1),
                    }
                }
                if let Some(visit) = visits.take(entry, active) {
                    self.check_copied_l2(offset, visit, &mut cache, fix).await?;
                }
            }
            index += entries.len() as u64;
        }
    }

    /// The same for the entries of the L2 table at `offset`.
    async fn check_copied_l2(
        &mut self,
        offset: u64,
        visit: Visit,
        cache: &mut super::refcounts::Lookup<'_>,
        fix: bool,
    ) -> Result<()> {
        let geometry = self.metadata.geometry;
        let mut table = self.reader.read(offset, geometry.cluster_size()).await?;
        let fix = fix && (self.writable.as_ref()).is_some_and(|w| w.may_change_l2(offset));
        // The entries that are changed, from the first to the last.
        let mut changed = table.len()..0;
        let mut at = 0;
        for bytes in table.chunks_exact_mut(geometry.l2_entry_size()) {
            let here = at..at + 8;
            at += bytes.len();
            let entry = bytes[..8].try_into().map_or(0, u64::from_be_bytes);
            if entry & COMPRESSED != 0 || !matches!(kind(entry, &geometry), Kind::Host) {
                continue;
            }
            let refcount = if geometry.has_data_file() {
                Some(1)
            } else {
                let host = entry & OFFSET_MASK;
                cache.get(host >> geometry.cluster_bits()).await?
            };
            let Some(refcount) = refcount else {
                continue;
            };
            if (refcount == 1) == (entry & COPIED != 0) {
                continue;
            }
            let message = CheckMessage::CopiedData { entry, refcount };
            if fix {
                bytes[..8].copy_from_slice(&(entry ^ COPIED).to_be_bytes());
                changed = changed.start.min(here.start)..here.end;
                self.repaired(message);
            } else {
                self.corrupt(message, visit.times);
            }
        }
        if let (Some(bytes), Some(writable)) = (table.get(changed.clone()), &self.writable)
            && !bytes.is_empty()
        {
            let start = offset + changed.start as u64;
            writable.writer.write(start, bytes).await?;
        }
        Ok(())
    }

    /// Reports an error that was repaired.
    fn repaired(&mut self, message: CheckMessage) {
        (self.emit)(CheckMessage::Repairing(Box::new(message)));
        self.report.corruptions_fixed += 1;
    }
}

/// An L2 table under way.
struct L2 {
    visit: Visit,
    /// Where it is.
    offset: u64,
    /// Where the next cluster is if the file is not fragmented; 0 at first.
    next_host: u64,
}

/// The kinds of uncompressed clusters that a check distinguishes.
enum Kind {
    /// Unallocated.
    Nothing,
    /// Zero, without a host cluster.
    Zero,
    /// With a host cluster.
    Host,
}

#[inline]
fn kind(desc: u64, geometry: &Geometry) -> Kind {
    let has_host = desc & OFFSET_MASK != 0;
    if desc & ZERO != 0 && !geometry.has_extended_l2() {
        return if has_host { Kind::Host } else { Kind::Zero };
    }
    if has_host || (geometry.has_data_file() && desc & COPIED != 0) {
        Kind::Host
    } else {
        Kind::Nothing
    }
}

/// Whether a cluster with a host cluster has data in it.
fn is_data(desc: u64, bitmap: u64, geometry: &Geometry) -> bool {
    if geometry.has_extended_l2() {
        bitmap & ALL_ALLOCATED != 0
    } else {
        desc & ZERO == 0
    }
}

fn unaligned(offset: u64, desc: u64, bitmap: u64, geometry: &Geometry) -> CheckMessage {
    if is_data(desc, bitmap, geometry) {
        CheckMessage::DataUnaligned { offset }
    } else {
        CheckMessage::PreallocatedUnaligned { offset }
    }
}
