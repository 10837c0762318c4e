//! Check and repair of qcow2 images. A check counts all references to each cluster of the file and
//! compares them with the stored refcounts. A repair also corrects the image.
//!
//! Work and memory are bounded by the length of the file. An L2 table is read once, however many
//! snapshots share it: its references count once for each L1 entry that names it.
//!
//! - `cells`: small counters, one for each cluster of the file;
//! - `counts`: counted references, and the search for free clusters;
//! - `read`: readahead of tables;
//! - `tables`: L1 tables, L2 tables and data clusters;
//! - `bitmaps`: stored bitmaps;
//! - `refcounts`: stored refcounts, and the comparison;
//! - `snapshots`: the snapshot table, also one that is refused when an image is opened;
//! - `uses`: the uses of each cluster, for repairs;
//! - `message`: the messages, in QEMU's words;
//! - `repair`: the order of a repair's writes;
//! - `writer`: the writes.

mod bitmaps;
mod cells;
mod counts;
mod message;
mod read;
mod refcounts;
mod repair;
mod snapshots;
mod tables;
#[cfg(test)]
mod tests;
mod uses;
mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::drivers::qcow2::structures::{Geometry, Header, MAX_L1_BYTES, Snapshot};
use crate::drivers::qcow2::{Image, OpenImage};
use crate::drivers::{CheckReport, RepairMode};
use crate::progress::{IntoControlFlow, Progress, Report, Reporter};
use crate::storage::{Queue, Storage};
use crate::{Error, Result};

use counts::Counts;
pub use message::CheckMessage;
use read::Reader;
use refcounts::{Fix, StoredRefcounts};
use repair::Writable;
pub use repair::{repair, repair_image};
use snapshots::SnapshotTable;
use tables::{L1Table, Visits};
pub use uses::Use;
use uses::Uses;
use writer::RepairWriter;

/// Checks an image, and changes nothing. The header is read anew: it may have been repaired since
/// the image was opened.
///
/// `report` is called for everything found, in the order of QEMU's check. `on_progress` is called
/// with the L1 entries looked at; see [`jobs`](crate::jobs).
///
/// # Errors
/// If the check could not be done: the header or a table cannot be read, or the job is cancelled.
pub async fn check<G: IntoControlFlow>(
    queue: &Queue,
    image: &Image,
    report: &mut dyn FnMut(CheckMessage),
    on_progress: impl FnMut(Progress) -> G,
) -> Result<CheckReport> {
    image
        .check(queue, report, &Reporter::new(on_progress))
        .await
}

impl Image {
    /// See [`check`].
    pub(crate) async fn check(
        &self,
        queue: &Queue,
        emit: &mut dyn FnMut(CheckMessage),
        reporter: &dyn Report,
    ) -> Result<CheckReport> {
        let mut metadata = Metadata::load(queue, self.file(), None, emit).await?;
        metadata.data_len = data_len(self)?;
        reporter.plan(metadata.l1_entries());
        let found = check_metadata(queue, &metadata, emit, reporter).await?;
        reporter.finish();
        Ok(found)
    }
}

/// The metadata that a check begins with.
struct Metadata {
    file: Arc<dyn Storage>,
    header: Header,
    geometry: Geometry,
    snapshots: SnapshotTable,
    /// The length of the external data file, if it is known.
    data_len: Option<u64>,
}

/// The length of the external data file, if it is open.
fn data_len(image: &Image) -> Result<Option<u64>> {
    // It stays closed where only the metadata are shown.
    let is_open = image.header().has_data_file() && !Arc::ptr_eq(image.file(), image.data());
    is_open
        .then(|| image.data().len())
        .transpose()
        .map_err(Error::from)
}

impl Metadata {
    /// Reads the header and the snapshot table; for a repair if `mode` is given.
    async fn load(
        queue: &Queue,
        file: &Arc<dyn Storage>,
        mode: Option<RepairMode>,
        emit: &mut dyn FnMut(CheckMessage),
    ) -> Result<Self> {
        let image = OpenImage::for_check(queue, file.clone()).await?;
        let header = image.header().clone();
        let snapshots = SnapshotTable::load(queue, &**file, &header, mode, emit).await?;
        Ok(Metadata {
            file: file.clone(),
            geometry: *image.geometry(),
            header,
            snapshots,
            data_len: None,
        })
    }

    /// Entries of all L1 tables: the work of one pass.
    fn l1_entries(&self) -> u64 {
        let snapshots = self.snapshots.snapshots.iter().map(|s| s.l1_size);
        let tables = std::iter::once(self.header.l1_size).chain(snapshots);
        tables.map(u64::from).sum()
    }
}

async fn check_metadata(
    queue: &Queue,
    metadata: &Metadata,
    report: &mut dyn FnMut(CheckMessage),
    reporter: &dyn Report,
) -> Result<CheckReport> {
    let mut check = Check::new(queue, metadata, report, reporter)?;
    let stored = check.count_all().await?;
    check.compare(&stored, Fix::NOTHING).await?;
    check.check_copied(&stored, false).await?;
    check.report.corruptions += metadata.snapshots.errors;
    Ok(check.report)
}

/// A check that is running.
struct Check<'a> {
    reader: Reader,
    metadata: &'a Metadata,
    file_len: u64,
    counts: Counts,
    report: CheckReport,
    emit: &'a mut dyn FnMut(CheckMessage),
    reporter: &'a dyn Report,
    /// Whether a copied flag of the active disk may be wrong.
    suspicious: bool,
    /// Bytes of the L1 tables examined so far.
    counted_l1: u64,
    /// Whether it was reported that snapshots were not examined.
    skipped_snapshots: bool,
    /// The same for unaligned L2 tables.
    skipped_unaligned: bool,
    /// Compressed data that the end of the file cuts off: offset and bytes in the file, and references.
    cut_streams: BTreeMap<(u64, u64), u64>,
    /// Whether some references may not be counted. No cluster may be freed then.
    incomplete: bool,
    /// Whether refcounts can only be repaired by a rebuild.
    rebuild: bool,
    /// Tables that a repair may change during the check.
    writable: Option<Writable>,
    /// The uses of the clusters, for a repair.
    uses: Option<Uses>,
}

impl<'a> Check<'a> {
    fn new(
        queue: &Queue,
        metadata: &'a Metadata,
        emit: &'a mut dyn FnMut(CheckMessage),
        reporter: &'a dyn Report,
    ) -> Result<Self> {
        let file_len = metadata.file.len()?;
        let geometry = &metadata.geometry;
        if geometry.clusters_for(file_len) > i32::MAX as u64 {
            return Err(Error::Io(std::io::Error::from_raw_os_error(libc::EFBIG)));
        }
        Ok(Check {
            reader: Reader::new(queue, &metadata.file, file_len),
            metadata,
            file_len,
            counts: Counts::new(geometry, file_len),
            report: CheckReport {
                total_clusters: geometry.guest_clusters(),
                ..CheckReport::default()
            },
            emit,
            reporter,
            suspicious: false,
            counted_l1: 0,
            skipped_snapshots: false,
            skipped_unaligned: false,
            cut_streams: BTreeMap::new(),
            incomplete: false,
            rebuild: false,
            writable: None,
            uses: None,
        })
    }
}

impl Check<'_> {
    /// Counts all references, and returns the stored refcounts.
    async fn count_all(&mut self) -> Result<StoredRefcounts> {
        let stored = StoredRefcounts::load(&self.reader, self.metadata).await?;
        self.count_references(&stored).await?;
        Ok(stored)
    }

    async fn count_references(&mut self, stored: &StoredRefcounts) -> Result<()> {
        let cluster_size = self.metadata.geometry.cluster_size();
        self.count(Use::Header, 0, cluster_size, 1);
        let active = self.active_table();
        let others = self.snapshot_tables();
        let mut visits = Visits::plan(&self.reader, self.metadata, &active, &others).await?;
        self.count_l1(&active, &mut visits, stored).await?;
        self.count_snapshots(&others, &mut visits, stored).await?;
        self.check_cut_streams().await?;
        self.count_header_tables();
        self.count_bitmaps().await?;
        self.count_refcount_blocks(stored);
        Ok(())
    }

    /// The L1 table of the disk.
    fn active_table(&self) -> L1Table {
        L1Table {
            offset: self.metadata.header.l1_offset,
            entries: u64::from(self.metadata.header.l1_size),
            active: true,
        }
    }

    /// The L1 tables of the snapshots, in order; `Err` for an invalid one.
    fn snapshot_tables(&self) -> Vec<Result<L1Table, CheckMessage>> {
        let entry = |snapshot: &Snapshot| {
            let cluster_bits = self.metadata.geometry.cluster_bits();
            if !snapshot.l1_table().is_aligned(cluster_bits) {
                return Err(CheckMessage::SnapshotL1Unaligned {
                    id: String::from_utf8_lossy(snapshot.id_text()).into_owned(),
                    name: String::from_utf8_lossy(snapshot.name_text()).into_owned(),
                    offset: snapshot.l1_offset,
                });
            }
            if u64::from(snapshot.l1_size) > MAX_L1_BYTES / 8 {
                return Err(CheckMessage::SnapshotL1TooLarge {
                    id: String::from_utf8_lossy(snapshot.id_text()).into_owned(),
                    name: String::from_utf8_lossy(snapshot.name_text()).into_owned(),
                    entries: snapshot.l1_size,
                });
            }
            if !snapshot.maps_its_disk(&self.metadata.geometry) {
                return Err(CheckMessage::SnapshotL1TooSmall {
                    id: String::from_utf8_lossy(snapshot.id_text()).into_owned(),
                    name: String::from_utf8_lossy(snapshot.name_text()).into_owned(),
                    entries: snapshot.l1_size,
                });
            }
            Ok(L1Table {
                offset: snapshot.l1_offset,
                entries: u64::from(snapshot.l1_size),
                active: false,
            })
        };
        let snapshots = &self.metadata.snapshots.snapshots;
        snapshots.iter().map(entry).collect()
    }

    async fn count_snapshots(
        &mut self,
        tables: &[Result<L1Table, CheckMessage>],
        visits: &mut Visits,
        stored: &StoredRefcounts,
    ) -> Result<()> {
        for table in tables {
            match table {
                Ok(table) => self.count_l1(table, visits, stored).await?,
                Err(message) => {
                    // Its references are not counted.
                    self.incomplete = true;
                    self.corrupt(message.clone(), 1);
                }
            }
        }
        Ok(())
    }

    /// Counts what the header points to, besides the L1 tables.
    fn count_header_tables(&mut self) {
        let header = &self.metadata.header;
        let snapshots = self.metadata.snapshots.bytes;
        self.count(Use::SnapshotTable, header.snapshots_offset, snapshots, 1);
        let refcount_table =
            u64::from(header.refcount_table_clusters) << self.metadata.geometry.cluster_bits();
        let at = header.refcount_table_offset;
        self.count(Use::RefcountTable, at, refcount_table, 1);
        if let Some(crypto) = header.extensions.crypto() {
            self.count(Use::Encryption, crypto.offset, crypto.length, 1);
        }
    }

    /// Counts `times` references to the clusters of a region of the file that has the use `what`.
    fn count(&mut self, what: Use, offset: u64, length: u64, times: u64) {
        if length == 0 {
            return;
        }
        if self.counts.is_outside(offset, length) {
            return self.count_outside(offset, length, times);
        }
        let bits = self.metadata.geometry.cluster_bits();
        let (first, last) = (offset >> bits, (offset + length - 1) >> bits);
        if let Some(uses) = &mut self.uses {
            uses.note(what, first, last + 1);
        }
        for cluster in first..=last {
            let lost = self.counts.add(cluster, times);
            if lost != 0 {
                let offset = cluster << bits;
                self.corrupt(CheckMessage::Overflow { offset }, lost);
            }
        }
    }

    /// Reports references to a region that the file lacks.
    fn count_outside(&mut self, offset: u64, length: u64, times: u64) {
        self.corrupt(CheckMessage::OutsideFile { offset, length }, times);
        if let Some(writable) = &mut self.writable {
            writable.add_outside(offset, length);
        }
    }

    /// Reports a table that begins inside the file and ends after it: what it lacks would read as
    /// zeroes once the file is longer. Returns whether it does not.
    fn check_whole(&mut self, what: Use, offset: u64) -> bool {
        let end = offset.saturating_add(self.metadata.geometry.cluster_size());
        let is_cut = offset < self.file_len && self.file_len < end;
        if is_cut {
            self.corrupt(CheckMessage::TableCut { what, offset }, 1);
        }
        !is_cut
    }

    /// Reports an error that occurs `times` times.
    fn corrupt(&mut self, message: CheckMessage, times: u64) {
        (self.emit)(message);
        self.report.corruptions = self.report.corruptions.saturating_add(times);
    }

    /// Reports something that could not be checked.
    fn unchecked(&mut self, message: CheckMessage) {
        (self.emit)(message);
        self.report.check_errors += 1;
        self.incomplete = true;
    }
}
