//! VMDK, the image format of VMware: a disk of one or more extents, which a descriptor lists, or a
//! single sparse file with the descriptor inside. Images are read, and new ones are made.
//!
//! The format is that of VMware's "Virtual Disk Format", version 5.0, as far as QEMU reads it:
//! monolithic and split images, sparse or flat, streams with compressed grains, and the sparse files
//! of ESX (`COWD`) and ESXi (seSparse).

mod check;
mod create;
pub(crate) mod descriptor;
mod encoding;
pub(crate) mod header;
mod new_extent;
mod open;
mod sparse;
pub(crate) mod stream;
pub(crate) mod streams;

use std::any::Any;
use std::sync::Arc;

use super::cache::Cache;
use super::{
    BackingName, BoxFuture, CheckReport, CompressedData, Driver, Extent, Format, FormatImage,
    Holes, Mapping, OtherForm, StorageId, inflate, past_end, spend,
};
use crate::codec::{Inflater, Stream};
use crate::drivers::signature::Foreign;
use crate::offset::HostOffset;
use crate::progress::Report;
use crate::storage::{Queue, Storage, Work};
use crate::{Error, Result};
use descriptor::Identity;
use header::SECTOR;
use sparse::{Group, Span, Sparse, Stored};

/// The driver.
pub static DRIVER: Driver = Driver {
    has_backing: true,
    can_compress: true,
    checks_data: true,
    create_options: Some(&create::CREATE_OPTIONS),
    plan: Some(create::plan),
    stream: Some(&streams::STREAM),
    other_form: Some(OtherForm {
        is_one: descriptor::is_one,
        looks_like: Foreign {
            what: "the descriptor of a VMDK",
            next: "format 'vmdk' reads it",
        },
    }),
    ..Driver::read_only("vmdk", probe, |request| Box::pin(open::open(request)))
};

/// Bytes of inflated grains that are kept for small reads.
const INFLATED_CACHE: u64 = 8 << 20;

/// An open VMDK.
#[derive(Debug)]
pub struct Vmdk {
    shared: Arc<Shared>,
    storages: Vec<Arc<dyn Storage>>,
    /// By storage: the length of its file in bytes, if a flat extent is in it.
    flat_lens: Vec<Option<u64>>,
    identity: Identity,
    /// The content ID as bytes.
    content_id: [u8; 4],
    create_type: String,
}

/// What tasks that load tables and inflate grains share.
#[derive(Debug)]
struct Shared {
    /// In the order of the disk, at least one. Some may be empty.
    regions: Vec<Region>,
    groups: Cache<Group>,
    /// Inflated grains, by where they start on the disk.
    grains: Cache<Vec<u8>>,
    work: Option<Arc<Work>>,
}

/// An extent as a range of the disk.
#[derive(Debug)]
struct Region {
    /// Its first byte on the disk.
    start: u64,
    /// Bytes.
    size: u64,
    storage: StorageId,
    file: Arc<dyn Storage>,
    /// The name of its type in the descriptor; None: it has no line there that is read.
    kind: Option<&'static str>,
    content: Content,
}

/// How a region is stored.
#[derive(Debug)]
enum Content {
    /// As it is, from byte `host` of a file of `file_len` bytes on.
    Flat {
        host: u64,
        file_len: u64,
    },
    /// Zeroes.
    Zero,
    Sparse(Box<Sparse>),
    /// In a file that was not opened.
    Closed,
}

/// An extent of a VMDK, as `info` shows it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct VmdkExtent {
    /// The storage that it is in.
    pub storage: StorageId,
    /// Whether its file was opened: under [`Policy::Untrusted`](zebu_core::Policy::Untrusted) it is
    /// not, and the numbers are those of the descriptor.
    pub is_open: bool,
    /// The type in the descriptor, as `FLAT`; None: the file that is the whole image.
    pub kind: Option<&'static str>,
    /// Its size in bytes.
    pub size: u64,
    /// Bytes of a grain, if it is sparse.
    pub cluster_size: Option<u64>,
    /// Grains are compressed.
    pub is_compressed: bool,
}

impl Vmdk {
    /// The content ID.
    pub fn cid(&self) -> u32 {
        self.identity.cid
    }

    /// The content ID of the parent; `0xffff_ffff` if there is none.
    pub fn parent_cid(&self) -> u32 {
        self.identity.parent_cid
    }

    /// The type, as `monolithicSparse`.
    pub fn create_type(&self) -> &str {
        &self.create_type
    }

    /// Whether all extents are flat, or all are sparse with grains of one size, and all are
    /// compressed or none. Otherwise the image has no unit of allocation.
    pub fn is_uniform(&self) -> bool {
        let regions = &self.shared.regions;
        regions.windows(2).all(|pair| pair[0].is_like(&pair[1]))
    }

    /// The extents in the order of the disk.
    pub fn extents(&self) -> impl Iterator<Item = VmdkExtent> {
        self.shared.regions.iter().map(|region| VmdkExtent {
            storage: region.storage,
            is_open: !matches!(region.content, Content::Closed),
            kind: region.kind,
            size: region.size,
            cluster_size: region.sparse().map(|sparse| sparse.layout().grain_bytes()),
            is_compressed: region.is_compressed(),
        })
    }
}

/// Whether a file is of this format, as QEMU decides it.
fn probe(head: &[u8]) -> bool {
    head.starts_with(header::HOSTED_MAGIC)
        || head.starts_with(header::ESX_MAGIC)
        || is_descriptor(head)
}

/// Whether this begins a descriptor: comments and lines of blanks, then the version.
fn is_descriptor(head: &[u8]) -> bool {
    let is_filler = |line: &&[u8]| match line {
        [b'#', ..] => true,
        [b' ', ..] => line.iter().all(|b| *b == b' '),
        _ => false,
    };
    // The last line is not complete.
    let mut lines: Vec<&[u8]> = head.split(|b| *b == b'\n').collect();
    lines.pop();
    let mut lines = lines
        .iter()
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    matches!(
        lines.find(|line| !is_filler(line)),
        Some(b"version=1" | b"version=2" | b"version=3")
    )
}

impl Region {
    fn sparse(&self) -> Option<&Sparse> {
        match &self.content {
            Content::Sparse(sparse) => Some(sparse),
            _ => None,
        }
    }

    fn is_compressed(&self) -> bool {
        self.sparse()
            .is_some_and(|sparse| sparse.layout().is_compressed())
    }

    /// Whether two regions are stored alike, as far as their unit of allocation goes.
    fn is_like(&self, other: &Region) -> bool {
        let unit = |region: &Region| region.sparse().map(|sparse| sparse.layout().grain);
        unit(self) == unit(other) && self.is_compressed() == other.is_compressed()
    }
}

impl Shared {
    /// The region of an offset inside the disk.
    fn region(&self, guest: u64) -> &Region {
        let next = self.regions.partition_point(|r| r.start <= guest);
        &self.regions[next.saturating_sub(1)]
    }

    /// The extent at `guest`; None if that needs I/O.
    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        let region = self.region(guest);
        let at = guest - region.start;
        let length = limit.min(region.size - at);
        let mapping = match &region.content {
            Content::Flat { host, .. } => Mapping::Data {
                host: HostOffset(host + at),
            },
            Content::Zero => Mapping::Zero { host: None },
            Content::Closed => return Some(Err(closed())),
            Content::Sparse(sparse) => {
                let span = sparse.cached(&self.groups, at, length)?;
                return Some(region.extent(sparse, guest, span));
            }
        };
        Some(Ok(Extent {
            length,
            storage: region.storage,
            mapping,
        }))
    }

    /// [`Shared::cached_extent`] with I/O.
    async fn load_extent(&self, queue: &Queue, guest: u64, limit: u64) -> Result<Extent> {
        if let Some(extent) = self.cached_extent(guest, limit) {
            return extent;
        }
        let region = self.region(guest);
        let at = guest - region.start;
        let length = limit.min(region.size - at);
        let sparse = region.sparse().ok_or_else(closed)?;
        let span = sparse.load(queue, &self.groups, at, length).await?;
        region.extent(sparse, guest, span)
    }

    /// Inflates the grain that contains `guest`. What precedes the next grain should be all of its
    /// data; where grains overlap, as many bytes as QEMU reads are tried.
    async fn inflate(&self, queue: &Queue, guest: u64, data: CompressedData) -> Result<Vec<u8>> {
        let region = self.region(guest);
        let sparse = region.sparse().ok_or_else(closed)?;
        self.spend(data.work())?;
        let result = inflate(queue, &*region.file, guest, data).await;
        let rest = sparse.file_len().saturating_sub(data.host.0);
        let longest = u64::from(sparse.longest()).min(rest) as u32;
        match result {
            Err(Error::Compressed { .. }) if data.length < longest => {
                let data = CompressedData {
                    length: longest,
                    slack: longest,
                    ..data
                };
                self.spend(data.work())?;
                inflate(queue, &*region.file, guest, data).await
            }
            result => result,
        }
    }

    fn spend(&self, work: u64) -> Result<()> {
        spend(self.work.as_deref(), work)
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(super::refused(why))
}

fn closed() -> Error {
    super::refused("The image's extents are not open")
}

impl Region {
    /// The extent that a span at `guest` is.
    fn extent(&self, sparse: &Sparse, guest: u64, span: Span) -> Result<Extent> {
        let mut length = span.length;
        let mapping = match span.stored {
            Stored::Nowhere => Mapping::Unallocated { host: None },
            Stored::Zero => Mapping::Zero { host: None },
            Stored::Data(host) => Mapping::Data {
                host: HostOffset(host + span.within),
            },
            Stored::Compressed { host, length: data } => {
                let grain = sparse.layout().grain_bytes();
                let grain_start = guest - self.start - span.within;
                // The last grain may be cut off where the extent ends.
                let size = grain.min(self.size - grain_start);
                length = length.min(size - span.within);
                Mapping::Compressed {
                    data: CompressedData {
                        host: HostOffset(host),
                        length: data,
                        slack: data,
                        inflater: Inflater {
                            stream: Stream::Zlib { most: grain as u32 },
                            size: size as u32,
                        },
                    },
                    skip: span.within,
                }
            }
            Stored::Damaged(damage) => {
                let what = damage.text().into();
                return Err(Error::Corrupt { guest, what });
            }
        };
        Ok(Extent {
            length,
            storage: self.storage,
            mapping,
        })
    }
}

impl FormatImage for Vmdk {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        let last = self.shared.regions.last();
        last.map_or(0, |region| region.start + region.size)
    }

    fn cluster_size(&self) -> Option<u64> {
        let first = self.shared.regions.first()?.sparse()?;
        self.is_uniform().then_some(first.layout().grain_bytes())
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        self.storages.clone()
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        self.shared.cached_extent(guest, limit)
    }

    fn load_extent<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        limit: u64,
    ) -> BoxFuture<'a, Result<Extent>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            let load =
                queue.begin(|queue| async move { shared.load_extent(&queue, guest, limit).await });
            load.await
        })
    }

    fn inflated<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        _storage: &'a dyn Storage,
        data: CompressedData,
    ) -> BoxFuture<'a, Result<Arc<Vec<u8>>>> {
        Box::pin(async move {
            let region = self.shared.region(guest);
            let sparse = region.sparse().ok_or_else(closed)?;
            let at = guest - region.start;
            let start = guest - at % sparse.layout().grain_bytes();
            if let Some(bytes) = self.shared.grains.get(start) {
                return Ok(bytes);
            }
            let shared = self.shared.clone();
            let load = queue.begin(|queue| async move {
                let load = async || shared.inflate(&queue, guest, data).await;
                shared.grains.get_or_load(start, load).await
            });
            load.await
        })
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.shared.work.as_ref()
    }

    /// The sectors of a flat extent that its file has.
    fn data_before_end(&self, storage: StorageId, host: u64, length: u64) -> Result<u64> {
        Ok(match self.flat_lens[storage.0 as usize] {
            None => length,
            Some(file_len) => {
                let end = file_len / SECTOR * SECTOR;
                end.saturating_sub(host).min(length)
            }
        })
    }

    /// Refuses data past the end of the file, which QEMU reads as zeroes. It writes whole grains.
    fn check_data(&self, guest: u64, storage: StorageId, host: u64, length: u64) -> Result<()> {
        let region = self.shared.region(guest);
        let there = match region.sparse() {
            None => self.data_before_end(storage, host, length)?,
            Some(sparse) => sparse.file_len().saturating_sub(host).min(length),
        };
        match there == length {
            true => Ok(()),
            false => Err(past_end(guest + there, host + there)),
        }
    }

    /// Holes are zeroes in flat extents.
    fn cached_holes(&self, storage: StorageId) -> Option<Holes> {
        Some(match self.flat_lens[storage.0 as usize] {
            Some(_) => Holes::ZeroData,
            None => Holes::Ignored,
        })
    }

    fn check<'a>(
        &'a self,
        queue: &'a Queue,
        say: &'a mut dyn FnMut(String),
        _report: &'a dyn Report,
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(async move {
            self.check_grains(queue, say).await?;
            Ok(Some(CheckReport::default()))
        })
    }

    fn backing(&self) -> Option<BackingName<'_>> {
        Some(BackingName {
            name: self.identity.parent.as_deref()?,
            format: Some(DRIVER.name.as_bytes()),
        })
    }

    /// The parent has the content that this was made over: QEMU does not read one that was changed.
    fn check_backing(&self, backing: &dyn FormatImage) -> Result<()> {
        let found = match backing.format() == self.format() {
            true => backing.content_id(),
            false => None,
        };
        let expected = self.identity.parent_cid.to_be_bytes();
        match found == Some(&expected) {
            true => Ok(()),
            false => Err(Error::Refused(format!(
                "The parent is not the VMDK with the CID {:08x}, which the image was made over, or \
                 has been written since",
                self.identity.parent_cid
            ))),
        }
    }

    fn content_id(&self) -> Option<&[u8]> {
        Some(&self.content_id)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_recognized_as_by_qemu() {
        for (start, is_vmdk) in [
            (&b"KDMV\x01"[..], true),
            (b"COWD", true),
            (b"# Disk DescriptorFile\nversion=1\nCID=0", true),
            (b"# Disk\r\n  \r\n#\r\nversion=3\r\n", true),
            (b"version=2\n", true),
            (b"# Disk\nversion=4\n", false),
            (b"# Disk\nversion=1", false),
            (b"# Disk\n\nversion=1\n", false),
            (b"# Disk\n\r\nversion=1\n", false),
            (b"#!/bin/sh\necho\nversion=1\n", false),
            (b"", false),
        ] {
            let mut head = [0; 512];
            head[..start.len()].copy_from_slice(start);
            assert_eq!(probe(&head), is_vmdk, "{start:?}");
        }
        assert!(!probe(b""));
    }
}
