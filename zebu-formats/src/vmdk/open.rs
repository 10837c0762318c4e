//! Opening a VMDK: the descriptor, and the extents that it lists.

use std::sync::Arc;

use super::descriptor::{self, Identity, Kind, Line, STREAM_TYPE};
use super::encoding::Encoding;
use super::header::{
    self, ESX_MAGIC, FOOTER_BYTES, HEADER_BYTES, HOSTED_MAGIC, HostedHeader, Layout, SECTOR,
};
use super::sparse::{GROUPS, Sparse};
use super::{Content, INFLATED_CACHE, Region, Shared, Vmdk, refused};
use crate::Result;
use crate::drivers::cache::Cache;
use crate::drivers::{AnyImage, Limits, OpenRequest, OtherFiles, StorageId, disk_size};
use crate::storage::{self, Queue, Storage};
use zebu_core::ErrorKind;

/// Bytes of the longest descriptor that lists extents, as in QEMU.
pub const MAX_DESCRIPTOR: u64 = (1 << 20) - 1;
/// Bytes of a descriptor that are searched for content IDs and the parent, as in QEMU.
const IDENTITY_BYTES: usize = 20 * 512 - 1;
/// Where these are in a sparse file.
const IDENTITY_OFFSET: u64 = 512;
/// Extents at most: 64 TiB in pieces of 2 GiB.
pub const MAX_EXTENTS: usize = 32 << 10;

/// Opens an image.
pub async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file.clone());
    if file.len()? == 0 {
        return refused("File is too small, not a valid image");
    }
    let mut opening = Opening {
        queue,
        limits: limits.as_ref(),
        others: request.others,
        storages: vec![file.clone()],
        regions: Vec::new(),
        size: 0,
        keys: 0,
    };
    let (create_type, identity_at) = match opening.header(&file).await? {
        Header::Sparse(layout) => {
            opening
                .add_sparse(file.clone(), StorageId::FILE, layout, None)
                .await?;
            ("monolithicSparse".to_string(), IDENTITY_OFFSET)
        }
        Header::Descriptor(at) => (opening.descriptor(&file, at).await?, IDENTITY_OFFSET),
        Header::None => (opening.descriptor(&file, 0).await?, 0),
    };
    let bytes = storage::read_vec(&*file, queue, identity_at, IDENTITY_BYTES).await?;
    let text = descriptor::text(&bytes);
    if text.is_empty() {
        return refused(
            "The file is an extent of a VMDK that has no descriptor: name the file with the \
             descriptor instead",
        );
    }
    let identity = Identity::decode(text)?;
    let Opening {
        storages, regions, ..
    } = opening;
    let is_compressed = regions.iter().any(Region::is_compressed);
    let grain = regions.iter().filter_map(Region::sparse);
    let grain = grain.map(|sparse| sparse.layout().grain_bytes()).max();
    let mut flat_lens = vec![None; storages.len()];
    for region in &regions {
        if let Content::Flat { file_len, .. } = region.content {
            flat_lens[region.storage.0 as usize] = Some(file_len);
        }
    }
    Ok(AnyImage::new(Vmdk {
        storages,
        flat_lens,
        content_id: identity.cid.to_be_bytes(),
        identity,
        create_type: match is_compressed {
            true => STREAM_TYPE.into(),
            false => create_type,
        },
        shared: Arc::new(Shared {
            regions,
            groups: Cache::new(GROUPS),
            grains: Cache::new((INFLATED_CACHE / grain.unwrap_or(INFLATED_CACHE)) as usize),
            work,
        }),
    }))
}

/// What a file begins with.
enum Header {
    /// The header of a sparse extent.
    Sparse(Layout),
    /// The header of one without data. A descriptor starts at this byte.
    Descriptor(u64),
    /// None of these.
    None,
}

/// An image that is being opened.
struct Opening<'a> {
    queue: &'a Queue,
    limits: Option<&'a Limits>,
    others: &'a mut dyn OtherFiles,
    storages: Vec<Arc<dyn Storage>>,
    regions: Vec<Region>,
    /// Bytes of the regions.
    size: u64,
    /// Keys of the cache of tables that are taken.
    keys: u64,
}

impl Opening<'_> {
    /// Reads the header of a file.
    async fn header(&self, file: &Arc<dyn Storage>) -> Result<Header> {
        let bytes = storage::read_vec(&**file, self.queue, 0, HEADER_BYTES).await?;
        if bytes.starts_with(ESX_MAGIC) {
            return header::esx(&bytes).map(Header::Sparse);
        }
        if !bytes.starts_with(HOSTED_MAGIC) {
            return Ok(Header::None);
        }
        let mut header = HostedHeader::decode(&bytes);
        if let Some(at) = header.descriptor_instead() {
            return Ok(Header::Descriptor(at));
        }
        let file_len = file.len()?;
        if header.is_in_footer() {
            let end = file_len.next_multiple_of(SECTOR);
            let Some(start) = end.checked_sub(FOOTER_BYTES) else {
                return refused("Invalid footer");
            };
            let length = FOOTER_BYTES as usize;
            let bytes = storage::read_vec(&**file, self.queue, start, length).await?;
            header = HostedHeader::decode_footer(&bytes)?;
        }
        header.layout(file_len).map(Header::Sparse)
    }

    /// Opens the extents of the descriptor at byte `at` of the image's file. The result is its type.
    async fn descriptor(&mut self, file: &Arc<dyn Storage>, at: u64) -> Result<String> {
        let rest = file.len()?.saturating_sub(at);
        // With one byte more, a longer one is noticed.
        let length = rest.min(MAX_DESCRIPTOR + 1) as usize;
        let bytes = storage::read_vec(&**file, self.queue, at, length).await?;
        let text = descriptor::text(&bytes);
        descriptor::check_version(text)?;
        let create_type = descriptor::create_type(text)?.to_string();
        let encoding = descriptor::encoding(text)?;
        if text.len() as u64 > MAX_DESCRIPTOR {
            return refused("The VMDK descriptor is longer than 1 MiB");
        }
        for line in descriptor::extents(text) {
            if self.regions.len() == MAX_EXTENTS {
                return refused(format!("The image has more than {MAX_EXTENTS} extents"));
            }
            self.add(file, line?, &encoding).await?;
        }
        if self.regions.is_empty() {
            return refused("invalid VMDK image descriptor: it lists no extents");
        }
        Ok(create_type)
    }

    /// Adds the extent of a line. `own` is the file that has the descriptor.
    async fn add(
        &mut self,
        own: &Arc<dyn Storage>,
        line: Line<'_>,
        encoding: &Encoding,
    ) -> Result<()> {
        let name = Some(line.kind.name());
        if line.kind == Kind::Zero {
            return self.push(
                line.sectors,
                own.clone(),
                StorageId::FILE,
                name,
                Content::Zero,
            );
        }
        let has_tables = !matches!(line.kind, Kind::Flat { .. });
        let opened = self.extent_file(line.name, has_tables, encoding).await?;
        let id = StorageId(self.storages.len() as u32);
        let Some(file) = opened else {
            // Nothing is read from it.
            self.storages.push(own.clone());
            return self.push(line.sectors, own.clone(), id, name, Content::Closed);
        };
        self.storages.push(file.clone());
        let layout = match line.kind {
            Kind::Zero => return Ok(()),
            Kind::Flat { sector, .. } => {
                let content = Content::Flat {
                    host: sector.saturating_mul(SECTOR),
                    file_len: file.len()?,
                };
                return self.push(line.sectors, file, id, name, content);
            }
            Kind::Sparse { .. } => {
                if file.len()? == 0 {
                    return refused("File is too small, not a valid image");
                }
                match self.header(&file).await? {
                    Header::Sparse(layout) => layout,
                    Header::Descriptor(_) | Header::None => {
                        return refused("Image not in VMDK format");
                    }
                }
            }
            Kind::SeSparse => self.se_sparse(&file).await?,
        };
        self.add_sparse(file, id, layout, name).await
    }

    /// Opens the file of an extent by the first of its names that there is.
    async fn extent_file(
        &mut self,
        name: &[u8],
        has_tables: bool,
        encoding: &Encoding,
    ) -> Result<Option<Arc<dyn Storage>>> {
        let mut first = None;
        for name in encoding.extents(name) {
            match self.others.extent(&name, has_tables).await {
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    first.get_or_insert(e);
                }
                result => return result,
            }
        }
        match (first, encoding) {
            (_, Encoding::Unknown(_)) if !name.is_ascii() => Err(encoding.unknown()),
            (Some(e), _) => Err(e),
            (None, _) => Err(encoding.unknown()),
        }
    }

    /// Reads both headers of a seSparse extent.
    async fn se_sparse(&self, file: &Arc<dyn Storage>) -> Result<Layout> {
        let bytes = storage::read_vec(&**file, self.queue, 0, HEADER_BYTES).await?;
        let (layout, volatile) = header::se_sparse(&bytes)?;
        let bytes = match volatile < file.len()? {
            true => storage::read_vec(&**file, self.queue, volatile, HEADER_BYTES).await?,
            false => vec![0; HEADER_BYTES],
        };
        header::check_volatile(&bytes)?;
        Ok(layout)
    }

    async fn add_sparse(
        &mut self,
        file: Arc<dyn Storage>,
        id: StorageId,
        layout: Layout,
        name: Option<&'static str>,
    ) -> Result<()> {
        let (queue, limits) = (self.queue, self.limits);
        let sparse = Sparse::open(queue, file.clone(), layout, limits, self.keys).await?;
        self.keys += sparse.keys();
        let content = Content::Sparse(Box::new(sparse));
        self.push(layout.sectors, file, id, name, content)
    }

    /// Adds a region at the end of the disk, unless it is empty.
    fn push(
        &mut self,
        sectors: u64,
        file: Arc<dyn Storage>,
        storage: StorageId,
        kind: Option<&'static str>,
        content: Content,
    ) -> Result<()> {
        let (start, size) = (self.size, disk_size(sectors)?);
        self.size = disk_size(start / SECTOR + sectors)?;
        if let Content::Flat { host, .. } = content {
            disk_size(host / SECTOR + sectors)?;
        }
        if let Some(limits) = self.limits {
            limits.check_size(self.size)?;
        }
        self.regions.push(Region {
            start,
            size,
            storage,
            file,
            kind,
            content,
        });
        Ok(())
    }
}
