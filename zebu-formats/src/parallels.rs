//! Parallels disk images, for reading: a header, a table of clusters, the clusters. Numbers are
//! little-endian.
//!
//! The format is that of `docs/interop/parallels.rst` in QEMU. The format extension (dirty bitmaps)
//! is not read.

use std::collections::HashSet;
use std::sync::Arc;

use super::sectors::by_blocks;
use super::table::{array, read_table};
use super::{
    AnyImage, BoxFuture, CheckReport, Driver, Extent, Format, FormatImage, Mapping, OpenRequest,
    StorageId, disk_size, refused,
};
use crate::Result;
use crate::progress::Report;
use crate::storage::{self, Queue, Storage, Work};

/// The driver.
pub static DRIVER: Driver = Driver {
    // The format has no name of one, but options may name one.
    has_backing: true,
    checks_data: true,
    open_options: &["prealloc-mode", "prealloc-size"],
    ..Driver::read_only(
        "parallels",
        |head| Magic::of(head).is_some() && version(head) == VERSION,
        |request| Box::pin(open(request)),
    )
};

const VERSION: u32 = 2;
/// Bytes of the header. The table follows it.
const HEADER: u64 = 64;
const SECTOR: u64 = 512;
/// Sectors of a cluster at most, as in QEMU.
const MAX_CLUSTER: u32 = i32::MAX as u32 / 513;
/// Entries of the table at most, as in QEMU.
const MAX_ENTRIES: u32 = i32::MAX as u32 / 4;
/// The mark of an image that is open for writing, or was not closed.
const IN_USE: u32 = 0x746f_6e59;

/// The two kinds of images, by what they begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Magic {
    /// Entries of the table count sectors. The size has 32 bits.
    Old,
    /// Entries of the table count clusters.
    Extended,
}

/// The fields of the header that are used.
#[derive(Clone, Copy, Debug)]
struct Header {
    magic: Magic,
    /// Sectors of a cluster.
    tracks: u32,
    entries: u32,
    sectors: u64,
    in_use: bool,
    /// The sector at which data begin; 0 in some old images.
    data_offset: u32,
    /// There is a format extension, which may have bitmaps.
    has_extension: bool,
}

/// An open Parallels image.
#[derive(Debug)]
struct Parallels {
    file: Arc<dyn Storage>,
    file_len: u64,
    header: Header,
    size: u64,
    /// By cluster of the disk: where it is in the file; 0: nowhere.
    table: Vec<u32>,
    work: Option<Arc<Work>>,
}

impl Magic {
    fn of(head: &[u8]) -> Option<Magic> {
        match head.get(..16)? {
            b"WithoutFreeSpace" => Some(Magic::Old),
            b"WithouFreSpacExt" => Some(Magic::Extended),
            _ => None,
        }
    }
}

fn version(head: &[u8]) -> u32 {
    u32::from_le_bytes(array(head, 16))
}

impl Header {
    fn decode(bytes: &[u8]) -> Result<Self> {
        let u32_at = |at| u32::from_le_bytes(array(bytes, at));
        let u64_at = |at| u64::from_le_bytes(array(bytes, at));
        let Some(magic) = Magic::of(bytes).filter(|_| version(bytes) == VERSION) else {
            return Err(refused("Image not in Parallels format"));
        };
        let sectors = u64_at(36);
        let header = Header {
            magic,
            tracks: u32_at(28),
            entries: u32_at(32),
            sectors: match magic {
                Magic::Old => sectors & 0xffff_ffff,
                Magic::Extended => sectors,
            },
            in_use: u32_at(44) == IN_USE,
            data_offset: u32_at(48),
            has_extension: u64_at(56) != 0,
        };
        if header.tracks == 0 {
            return Err(refused("Invalid image: Zero sectors per track"));
        }
        if header.tracks > MAX_CLUSTER {
            return Err(refused("Invalid image: Too big cluster"));
        }
        if header.entries > MAX_ENTRIES {
            return Err(refused("Catalog too large"));
        }
        if u64_at(56) >= i64::MAX as u64 >> 9 {
            return Err(refused("Invalid image: Too big offset"));
        }
        Ok(header)
    }

    fn cluster_size(&self) -> u64 {
        u64::from(self.tracks) * SECTOR
    }

    /// Bytes of the file for one more in an entry of the table.
    fn unit(&self) -> u64 {
        match self.magic {
            Magic::Old => SECTOR,
            Magic::Extended => self.cluster_size(),
        }
    }

    /// The sector at which data begin, and whether the field of the header is valid.
    fn data_start(&self, file_sectors: u64) -> (u64, bool) {
        let table_end = HEADER + u64::from(self.entries) * 4;
        let least = match self.magic {
            Magic::Old => table_end.div_ceil(SECTOR),
            Magic::Extended => {
                let sectors = table_end.div_ceil(SECTOR);
                sectors.next_multiple_of(self.tracks.into())
            }
        };
        let said = u64::from(self.data_offset);
        match said {
            0 if self.magic == Magic::Old => (least, true),
            _ if (least..=file_sectors).contains(&said) => (said, true),
            _ => (least, false),
        }
    }
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file);
    let file_len = file.len()?;
    let bytes = storage::read_vec(&*file, queue, 0, HEADER as usize).await?;
    let header = Header::decode(&bytes)?;
    let size = disk_size(header.sectors)?;
    let entries = u64::from(header.entries);
    if let Some(limits) = limits {
        limits.check_size(size)?;
        limits.check_kept_table("The block allocation table's length", entries * 4)?;
    }
    let (what, decode) = ("The block allocation table", u32::from_le_bytes);
    let table = read_table(queue, &*file, what, HEADER, entries, decode).await?;
    Ok(AnyImage::new(Parallels {
        file,
        file_len,
        header,
        size,
        table,
        work,
    }))
}

impl Parallels {
    /// Where a cluster of the disk is in the file.
    fn cluster(&self, index: u64) -> Option<u64> {
        let entry = *self.table.get(usize::try_from(index).ok()?)?;
        (entry != 0).then(|| u64::from(entry) * self.header.unit())
    }

    fn extent(&self, guest: u64, limit: u64) -> Extent {
        let missing = Mapping::Unallocated { host: None };
        by_blocks(guest, limit, self.header.cluster_size(), missing, |index| {
            self.cluster(index)
        })
    }

    /// The check of QEMU, in its words. Each table entry must lead to a cluster of its own that is
    /// in the file.
    fn find_errors(&self, say: &mut dyn FnMut(String)) -> CheckReport {
        let mut report = CheckReport::default();
        report.total_clusters = self.header.entries.into();
        let mut wrong = |text: String| {
            report.corruptions += 1;
            say(text);
        };
        if self.header.in_use {
            wrong("ERROR image was not closed correctly".into());
        }
        let file_len = self.file_len.next_multiple_of(SECTOR);
        let (data_start, is_right) = self.header.data_start(file_len / SECTOR);
        if !is_right {
            wrong("ERROR data_off field has incorrect value".into());
        }
        let size = self.header.cluster_size();
        let stored = || {
            let all = 0..self.table.len() as u64;
            all.filter_map(|index| Some((index, self.cluster(index)?)))
        };
        let mut last = None;
        for (index, offset) in stored() {
            match offset + size > file_len {
                true => wrong(format!("ERROR cluster {index} is outside image")),
                false => last = last.max(Some(offset)),
            }
        }
        let end = match last {
            Some(last) => last + size,
            // QEMU's end of the data, which includes a cluster at the start of the file.
            None => {
                let ends = stored().map(|(_, offset)| offset + size);
                let first = (!self.table.is_empty()).then_some(size);
                let ends = ends.chain(first).chain([data_start * SECTOR]);
                ends.max().unwrap_or(0)
            }
        };
        if file_len > end {
            let more = file_len - end;
            say(format!("ERROR space leaked at the end of the image {more}"));
            report.leaks = more.div_ceil(size);
        }
        let mut seen = HashSet::new();
        let mut before = None;
        for index in 0..self.table.len() as u64 {
            let inside = self.cluster(index).filter(|offset| offset + size <= end);
            let Some(offset) = inside else {
                before = None;
                continue;
            };
            report.allocated_clusters += 1;
            if before
                .replace(offset)
                .is_some_and(|before| before + size != offset)
            {
                report.fragmented_clusters += 1;
            }
            let error = match offset.checked_sub(data_start * SECTOR) {
                None => "cluster before the data",
                Some(at) if !seen.insert(at / size) => "duplicate offset",
                Some(_) => continue,
            };
            report.corruptions += 1;
            say(format!("ERROR {error} in BAT entry {index}"));
        }
        report.image_end_offset = end;
        report
    }
}

impl FormatImage for Parallels {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.file.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        Some(Ok(self.extent(guest, limit)))
    }

    /// QEMU reads what is past the end of the file as zeroes, but writes whole clusters.
    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        Ok(self.file_len.saturating_sub(host).min(length))
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    fn check<'a>(
        &'a self,
        _queue: &'a Queue,
        say: &'a mut dyn FnMut(String),
        _report: &'a dyn Report,
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(std::future::ready(Ok(Some(self.find_errors(say)))))
    }

    fn is_dirty(&self) -> Option<bool> {
        None
    }

    fn has_no_bitmaps(&self) -> bool {
        !self.header.has_extension
    }
}
