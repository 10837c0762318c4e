//! QED, for reading: a header, an L1 table, L2 tables, clusters. Numbers are little-endian.
//!
//! The format is that of `docs/interop/qed_spec.rst` in QEMU.

use std::sync::Arc;

use super::levels::{DecodeEntry, TwoLevels};
use super::pieces::{Pieces, Table};
use super::table::{array, read_backing_name, read_table};
use super::{
    AnyImage, BackingName, BoxFuture, CheckReport, Driver, Extent, Format, FormatImage, Limits,
    Mapping, OpenRequest, check_limit, disk_size, refused,
};
use crate::offset::HostOffset;
use crate::progress::Report;
use crate::storage::{self, Queue, Storage, Work};
use crate::{Error, Result};

/// The driver.
pub static DRIVER: Driver = Driver {
    has_backing: true,
    ..Driver::read_only(
        "qed",
        |head| head.starts_with(SIGNATURE),
        |request| Box::pin(open(request)),
    )
};

const SIGNATURE: &[u8; 4] = b"QED\0";
/// Bytes of the header.
const HEADER: usize = 64;
const SECTOR: u64 = 512;
/// Bytes of an entry of a table.
const ENTRY: u64 = 8;
/// Bytes of a backing file's name at most.
const MAX_NAME: u32 = 4095;
/// Entries of a table that a check reads at a time.
const CHECKED: u64 = 1 << 17;
/// Bytes of the map of used clusters that a check takes at most: enough for 32 TiB.
const MAX_USED: u64 = 1 << 30;

/// Feature: there is a backing file.
const BACKING_FILE: u64 = 1;
/// Feature: the image was not closed.
const NEED_CHECK: u64 = 2;
/// Feature: the backing file is raw.
const BACKING_RAW: u64 = 4;

/// The entry of a cluster that is not mapped.
const UNALLOCATED: u64 = 0;
/// The entry of a cluster of zeroes.
const ZERO: u64 = 1;

/// The fields of the header that are used.
#[derive(Clone, Copy, Debug)]
struct Header {
    cluster_size: u64,
    /// Clusters of a table.
    table_size: u64,
    /// Clusters of the header.
    header_size: u64,
    features: u64,
    l1_offset: u64,
    size: u64,
    backing_offset: u32,
    backing_length: u32,
}

/// An open QED image.
#[derive(Debug)]
struct Qed {
    file: Arc<dyn Storage>,
    header: Header,
    /// Bytes of the file, in whole clusters.
    file_size: u64,
    size: u64,
    backing: Option<Vec<u8>>,
    tables: TwoLevels,
    limits: Option<Limits>,
    work: Option<Arc<Work>>,
}

impl Header {
    /// The header of a file of so many bytes, checked in QEMU's order.
    fn decode(bytes: &[u8], file_len: u64) -> Result<Self> {
        let u32_at = |at| u32::from_le_bytes(array(bytes, at));
        let u64_at = |at| u64::from_le_bytes(array(bytes, at));
        if !bytes.starts_with(SIGNATURE) {
            return Err(refused("Image not in QED format"));
        }
        let header = Header {
            cluster_size: u32_at(4).into(),
            table_size: u32_at(8).into(),
            header_size: u32_at(12).into(),
            features: u64_at(16),
            l1_offset: u64_at(40),
            size: u64_at(48),
            backing_offset: u32_at(56),
            backing_length: u32_at(60),
        };
        let unknown = header.features & !(BACKING_FILE | NEED_CHECK | BACKING_RAW);
        if unknown != 0 {
            return Err(refused(format!("Unsupported QED features: {unknown:x}")));
        }
        let is_among = |n: u64, least, most| n.is_power_of_two() && (least..=most).contains(&n);
        if !is_among(header.cluster_size, 4 << 10, 64 << 20) {
            return Err(refused("QED cluster size is invalid"));
        }
        if !is_among(header.table_size, 1, 16) {
            return Err(refused("QED table size is invalid"));
        }
        if !header.size.is_multiple_of(SECTOR) || header.size > header.max_size() {
            return Err(refused("QED image size is invalid"));
        }
        if !header.is_table(header.l1_offset, header.whole_clusters(file_len)) {
            return Err(refused("QED table offset is invalid"));
        }
        let header_bytes = header.header_size * header.cluster_size;
        if header_bytes > u32::MAX.into() {
            return Err(refused("QED header size is too large"));
        }
        let name_end = u64::from(header.backing_offset) + u64::from(header.backing_length);
        if header.features & BACKING_FILE != 0 && name_end > header_bytes {
            return Err(refused("QED backing filename offset is invalid"));
        }
        Ok(header)
    }

    /// Entries of a table.
    fn entries(&self) -> u64 {
        self.table_size * self.cluster_size / ENTRY
    }

    /// Bytes of the disk that an L2 table maps.
    fn l2_range(&self) -> u64 {
        self.entries() * self.cluster_size
    }

    /// The largest size of the disk. It wraps around as in QEMU, which then opens no image with
    /// clusters and tables of this size.
    fn max_size(&self) -> u64 {
        self.l2_range().wrapping_mul(self.entries())
    }

    fn whole_clusters(&self, bytes: u64) -> u64 {
        bytes - bytes % self.cluster_size
    }

    /// Whether a cluster can be at `offset` in a file of so many bytes.
    fn is_cluster(&self, offset: u64, file_size: u64) -> bool {
        let header_bytes = self.header_size * self.cluster_size;
        offset.is_multiple_of(self.cluster_size) && (header_bytes..file_size).contains(&offset)
    }

    /// Whether a table can be at `offset`.
    fn is_table(&self, offset: u64, file_size: u64) -> bool {
        let last = offset.checked_add((self.table_size - 1) * self.cluster_size);
        self.is_cluster(offset, file_size)
            && last.is_some_and(|last| self.is_cluster(last, file_size))
    }
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file);
    let file_len = file.len()?;
    let bytes = storage::read_vec(&*file, queue, 0, HEADER).await?;
    let header = Header::decode(&bytes, file_len)?;
    let size = disk_size(header.size / SECTOR)?;
    if let Some(limits) = limits {
        limits.check_size(size)?;
        limits.check_table("The L1 table's length", header.entries() * ENTRY)?;
    }
    let backing = backing(queue, &*file, &header, file_len).await?;
    Ok(AnyImage::new(Qed {
        tables: TwoLevels {
            pieces: Pieces::new(file.clone()),
            l1: Table {
                what: "The L1 table",
                start: header.l1_offset,
                count: header.entries(),
            },
            cluster_size: header.cluster_size,
            l2_range: header.l2_range(),
        },
        file,
        header,
        file_size: header.whole_clusters(file_len),
        size,
        backing,
        limits,
        work,
    }))
}

/// The name of the backing file.
async fn backing(
    queue: &Queue,
    file: &dyn Storage,
    header: &Header,
    file_len: u64,
) -> Result<Option<Vec<u8>>> {
    if header.features & BACKING_FILE == 0 {
        return Ok(None);
    }
    let (at, length) = (header.backing_offset.into(), header.backing_length);
    if length > MAX_NAME {
        return Err(refused("Failed to read backing filename"));
    }
    read_backing_name(queue, file, at, length, file_len).await
}

impl Qed {
    fn table(&self, what: &'static str, start: u64) -> Table {
        Table {
            what,
            start,
            count: self.header.entries(),
        }
    }

    /// Entries of a table from `first` on, as many as are checked at a time.
    async fn read(&self, queue: &Queue, table: &Table, first: u64) -> Result<Vec<u64>> {
        let (at, count) = (table.start + first * ENTRY, table.count - first);
        let decode = u64::from_le_bytes;
        read_table(
            queue,
            &*self.file,
            table.what,
            at,
            count.min(CHECKED),
            decode,
        )
        .await
    }

    /// Checks that every table and every cluster is in the file and used once, and counts the
    /// clusters that are not used.
    async fn find_errors(&self, queue: &Queue) -> Result<CheckReport> {
        let mut check = Check::new(self)?;
        let l1 = self.tables.l1;
        check.mark(l1.start, self.header.table_size);
        for first in (0..l1.count).step_by(CHECKED as usize) {
            for start in self.read(queue, &l1, first).await? {
                if start == UNALLOCATED {
                    continue;
                }
                if !self.header.is_table(start, self.file_size) {
                    check.report.corruptions += 1;
                } else if check.mark(start, self.header.table_size) {
                    let table = self.table("The L2 table", start);
                    self.check_l2(queue, &table, &mut check).await?;
                }
            }
        }
        let used: u64 = check
            .used
            .iter()
            .map(|bits| u64::from(bits.count_ones()))
            .sum();
        let in_header = self.header.header_size.min(check.clusters);
        check.report.leaks = check.clusters - in_header - used;
        Ok(check.report)
    }

    async fn check_l2(&self, queue: &Queue, table: &Table, check: &mut Check) -> Result<()> {
        let mut last = None;
        for first in (0..table.count).step_by(CHECKED as usize) {
            for offset in self.read(queue, table, first).await? {
                if matches!(offset, UNALLOCATED | ZERO) {
                    continue;
                }
                check.report.allocated_clusters += 1;
                let follows = |last: u64| last.wrapping_add(self.header.cluster_size) == offset;
                if !last.replace(offset).is_none_or(follows) {
                    check.report.fragmented_clusters += 1;
                }
                match self.header.is_cluster(offset, self.file_size) {
                    true => drop(check.mark(offset, 1)),
                    false => check.report.corruptions += 1,
                }
            }
        }
        Ok(())
    }
}

/// The state of a check.
struct Check {
    cluster_size: u64,
    /// Clusters of the file.
    clusters: u64,
    /// A bit for each of them.
    used: Vec<u64>,
    report: CheckReport,
}

impl Check {
    fn new(image: &Qed) -> Result<Self> {
        let clusters = image.file_size / image.header.cluster_size;
        let bytes = clusters.div_ceil(64) * 8;
        let limit = image.limits.map_or(MAX_USED, |limits| limits.memory);
        check_limit("memory", "The need for memory", bytes, limit.min(MAX_USED))?;
        let mut used = storage::reserved((bytes / 8) as usize)?;
        used.resize((bytes / 8) as usize, 0);
        let mut report = CheckReport::default();
        report.total_clusters = image.size.div_ceil(image.header.cluster_size);
        Ok(Check {
            cluster_size: image.header.cluster_size,
            clusters,
            used,
            report,
        })
    }

    /// Marks clusters of the file as used. Those that were used already are errors; false if there
    /// is one.
    fn mark(&mut self, offset: u64, count: u64) -> bool {
        let first = offset / self.cluster_size;
        let before = self.report.corruptions;
        for cluster in first..first + count {
            let (word, bit) = (&mut self.used[(cluster / 64) as usize], 1 << (cluster % 64));
            self.report.corruptions += u64::from(*word & bit != 0);
            *word |= bit;
        }
        self.report.corruptions == before
    }
}

impl DecodeEntry for Qed {
    fn l2_table(&self, guest: u64, entry: [u8; 8]) -> Result<Table> {
        let start = u64::from_le_bytes(entry);
        match self.header.is_table(start, self.file_size) {
            true => Ok(self.table("The L2 table", start)),
            false => Err(Error::Corrupt {
                guest,
                what: format!("Invalid L2 table offset {start:#x}"),
            }),
        }
    }

    fn cluster(&self, guest: u64, entry: [u8; 8]) -> Result<Mapping> {
        match u64::from_le_bytes(entry) {
            UNALLOCATED => Ok(Mapping::Unallocated { host: None }),
            ZERO => Ok(Mapping::Zero { host: None }),
            offset if self.header.is_cluster(offset, self.file_size) => Ok(Mapping::Data {
                host: HostOffset(offset),
            }),
            offset => Err(Error::Corrupt {
                guest,
                what: format!("Invalid cluster offset {offset:#x}"),
            }),
        }
    }
}

impl FormatImage for Qed {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn cluster_size(&self) -> Option<u64> {
        Some(self.header.cluster_size)
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.file.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        self.tables.cached(self, guest, limit)
    }

    fn load_extent<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        limit: u64,
    ) -> BoxFuture<'a, Result<Extent>> {
        Box::pin(self.tables.load(queue, self, guest, limit))
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    fn check<'a>(
        &'a self,
        queue: &'a Queue,
        _say: &'a mut dyn FnMut(String),
        _report: &'a dyn Report,
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(async { self.find_errors(queue).await.map(Some) })
    }

    fn is_dirty(&self) -> Option<bool> {
        Some(self.header.features & NEED_CHECK != 0)
    }

    fn backing(&self) -> Option<BackingName<'_>> {
        let is_raw = self.header.features & BACKING_RAW != 0;
        Some(BackingName {
            name: self.backing.as_deref()?,
            format: is_raw.then_some(b"raw"),
        })
    }
}
