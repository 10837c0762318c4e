//! qcow version 1, for reading: a header, an L1 table, L2 tables, clusters, some of them compressed.
//! Numbers are big-endian.
//!
//! The format is what QEMU's driver reads; there is no specification of it.

use std::sync::Arc;

use super::inflate::Inflated;
use super::levels::{DecodeEntry, TwoLevels};
use super::pieces::{Pieces, Table};
use super::table::{array, check_in_file, read_backing_name};
use super::{
    AnyImage, BackingName, BoxFuture, CompressedData, Driver, Extent, Format, FormatImage, Mapping,
    OpenRequest, StorageId, disk_size, past_end, refused,
};
use crate::codec::{Compression, Inflater, Stream};
use crate::offset::HostOffset;
use crate::storage::{self, Queue, Storage, Work};
use crate::{Error, Result};

/// The driver.
pub static DRIVER: Driver = Driver {
    has_backing: true,
    checks_data: true,
    ..Driver::read_only(
        "qcow",
        |head| head.starts_with(b"QFI\xfb\0\0\0\x01"),
        |request| Box::pin(open(request)),
    )
};

/// Bytes of the header.
const HEADER: usize = 48;
const SECTOR: u64 = 512;
/// Bytes of an entry of a table.
const ENTRY: u64 = 8;
/// Entries of the L1 table at most, as in QEMU.
const MAX_L1: u64 = i32::MAX as u64 / ENTRY;
/// Bytes of a backing file's name at most.
const MAX_NAME: u32 = 1023;
/// The flag of a compressed cluster.
const COMPRESSED: u64 = 1 << 63;

/// The fields of the header that are used.
#[derive(Clone, Copy, Debug)]
struct Header {
    backing_offset: u64,
    backing_length: u32,
    size: u64,
    cluster_bits: u32,
    l2_bits: u32,
    encryption: u32,
    l1_offset: u64,
}

/// An open qcow image.
#[derive(Debug)]
struct Qcow {
    file: Arc<dyn Storage>,
    file_len: u64,
    header: Header,
    size: u64,
    backing: Option<Vec<u8>>,
    tables: TwoLevels,
    inflated: Inflated,
    work: Option<Arc<Work>>,
}

impl Header {
    fn decode(bytes: &[u8]) -> Result<Self> {
        let u32_at = |at| u32::from_be_bytes(array(bytes, at));
        let u64_at = |at| u64::from_be_bytes(array(bytes, at));
        if !bytes.starts_with(b"QFI\xfb") {
            return Err(refused("Image not in qcow format"));
        }
        let version = u32_at(4);
        if version != 1 {
            let hint = match version {
                2 | 3 => "\nTry the 'qcow2' driver instead.",
                _ => "",
            };
            return Err(refused(format!(
                "qcow (v1) does not support qcow version {version}{hint}"
            )));
        }
        let header = Header {
            backing_offset: u64_at(8),
            backing_length: u32_at(16),
            size: u64_at(24),
            cluster_bits: bytes[32].into(),
            l2_bits: bytes[33].into(),
            encryption: u32_at(36),
            l1_offset: u64_at(40),
        };
        if header.size <= 1 {
            return Err(refused(
                "Image size is too small (must be at least 2 bytes)",
            ));
        }
        if !(9..=16).contains(&header.cluster_bits) {
            return Err(refused("Cluster size must be between 512 and 64k"));
        }
        if !(9..=16).contains(&(header.l2_bits + 3)) {
            return Err(refused("L2 table size must be between 512 and 64k"));
        }
        if header.encryption > 1 {
            return Err(refused("invalid encryption method in qcow header"));
        }
        let is_too_large = header.size.checked_add(header.l2_range()).is_none();
        if is_too_large || header.l1_entries() > MAX_L1 {
            return Err(refused("Image too large"));
        }
        Ok(header)
    }

    fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the disk that an L2 table maps.
    fn l2_range(&self) -> u64 {
        1 << (self.cluster_bits + self.l2_bits)
    }

    fn l1_entries(&self) -> u64 {
        self.size.div_ceil(self.l2_range())
    }
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file);
    let file_len = file.len()?;
    let bytes = storage::read_vec(&*file, queue, 0, HEADER).await?;
    let header = Header::decode(&bytes)?;
    if header.encryption != 0 && request.purpose.needs_data() {
        return Err(Error::encrypted());
    }
    // An incomplete sector at the end is not part of the disk.
    let size = disk_size(header.size / SECTOR)?;
    let l1_bytes = header.l1_entries() * ENTRY;
    if let Some(limits) = limits {
        limits.check_size(size)?;
        limits.check_table("The L1 table's length", l1_bytes)?;
    }
    check_in_file("The L1 table", header.l1_offset, l1_bytes, file_len)?;
    let backing = backing(queue, &*file, &header, file_len).await?;
    Ok(AnyImage::new(Qcow {
        tables: TwoLevels {
            pieces: Pieces::new(file.clone()),
            l1: Table {
                what: "The L1 table",
                start: header.l1_offset,
                count: header.l1_entries(),
            },
            cluster_size: header.cluster_size(),
            l2_range: header.l2_range(),
        },
        inflated: Inflated::new(file.clone(), header.cluster_size(), work.clone()),
        file,
        file_len,
        header,
        size,
        backing,
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
    if header.backing_offset == 0 {
        return Ok(None);
    }
    if header.backing_length > MAX_NAME {
        return Err(refused("Backing file name too long"));
    }
    let (at, length) = (header.backing_offset, header.backing_length);
    read_backing_name(queue, file, at, length, file_len).await
}

impl Qcow {
    /// The data of a compressed cluster. The entry has the flag, their length, and their offset.
    fn compressed(&self, entry: u64) -> CompressedData {
        let shift = 63 - self.header.cluster_bits;
        let length = (entry & !COMPRESSED) >> shift;
        CompressedData {
            host: HostOffset(entry & ((1 << shift) - 1)),
            // Nothing inflates from a single byte, or from none.
            length: (length as u32).max(1),
            slack: 0,
            inflater: Inflater {
                stream: Stream::Cluster(Compression::Zlib),
                size: 1 << self.header.cluster_bits,
            },
        }
    }
}

impl DecodeEntry for Qcow {
    fn l2_table(&self, guest: u64, entry: [u8; 8]) -> Result<Table> {
        let table = Table {
            what: "The L2 table",
            start: u64::from_be_bytes(entry),
            count: 1 << self.header.l2_bits,
        };
        let bytes = table.count * ENTRY;
        match check_in_file(table.what, table.start, bytes, self.file_len) {
            Ok(_) => Ok(table),
            Err(error) => Err(Error::Corrupt {
                guest,
                what: error.to_string(),
            }),
        }
    }

    fn cluster(&self, _guest: u64, entry: [u8; 8]) -> Result<Mapping> {
        Ok(match u64::from_be_bytes(entry) {
            0 => Mapping::Unallocated { host: None },
            entry if entry & COMPRESSED != 0 => Mapping::Compressed {
                data: self.compressed(entry),
                skip: 0,
            },
            offset => Mapping::Data {
                host: HostOffset(offset),
            },
        })
    }
}

impl FormatImage for Qcow {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn cluster_size(&self) -> Option<u64> {
        Some(self.header.cluster_size())
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

    /// QEMU reads what is past the end of the file as zeroes, but writes whole clusters.
    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        Ok(self.file_len.saturating_sub(host).min(length))
    }

    /// Refuses data past the end of the file, and those at no sector, which QEMU refuses too.
    fn check_data(&self, guest: u64, storage: StorageId, host: u64, length: u64) -> Result<()> {
        if host % SECTOR != guest % SECTOR {
            return Err(Error::Corrupt {
                guest,
                what: format!("Data offset {host:#x} is not at a sector"),
            });
        }
        match self.data_before_end(storage, host, length)? {
            there if there == length => Ok(()),
            there => Err(past_end(guest + there, host + there)),
        }
    }

    fn inflated_cache(&self) -> Option<&Inflated> {
        Some(&self.inflated)
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    fn is_encrypted(&self) -> bool {
        self.header.encryption != 0
    }

    fn backing(&self) -> Option<BackingName<'_>> {
        let name = self.backing.as_deref()?;
        Some(BackingName { name, format: None })
    }
}
