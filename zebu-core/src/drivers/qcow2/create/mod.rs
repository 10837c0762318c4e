//! New qcow2 images.
//!
//! The header says that the image is not finished until everything else is durable, and for an image that
//! is filled, until its data are.

mod layout;
mod measure;
mod options;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use layout::{Layout, data_of_tables};
pub use measure::Qcow2Target;
pub(crate) use measure::too_large;
pub(super) use options::CREATE_OPTIONS;
pub use options::log2;

use super::check_recorded;
use crate::codec;
use crate::drivers;
use crate::drivers::qcow2::structures::{
    AUTOCLEAR_DATA_FILE_RAW, COMPATIBLE_LAZY_REFCOUNTS, Compression, CryptoExtension, FormatError,
    Geometry, Header, INCOMPATIBLE_DATA_FILE, INCOMPLETE_VERSION, L1Entry, L2Entry, MAGIC,
    MAX_BACKING_FORMAT, MAX_BACKING_NAME, MAX_CLUSTER_BITS, MAX_L1_BYTES, MAX_REFCOUNT_ORDER,
    MIN_CLUSTER_BITS, MIN_EXTENDED_L2_CLUSTER_BITS, RefcountBlock, RefcountTableEntry,
};
use crate::drivers::{
    BoxFuture, Filling, ImagePlan, Making, NewImage, PlanRequest, Preallocation, make_valid,
};
use crate::offset::HostOffset;
use crate::progress::Report;
use crate::storage::{self, Iov, Queue, Secret, Storage};
use crate::{Error, Result};

/// Bytes written at once.
const CHUNK: usize = 1 << 20;
/// The largest disk of any format, in bytes: a limit of QEMU.
const MAX_SIZE: u64 = (1 << 63) - (1 << 30);

options! {
    /// The name of a backing file in the header of a new image.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct NewBacking {
        /// Its name; a relative one is relative to the new image.
        pub name: OsString,
        /// The name of its format.
        pub format: Option<String>,
    }
}

impl NewBacking {
    /// A backing file of this name, whose format the header does not name.
    pub fn new(name: impl Into<OsString>) -> Self {
        NewBacking {
            name: name.into(),
            format: None,
        }
    }
}

options! {
    /// The name of an external data file in the header of a new image.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct NewDataFile {
        /// Its name; a relative one is relative to the new image.
        pub name: OsString,
        /// It is always the raw image of the disk.
        pub raw: bool,
        /// What it holds stays, and is what the new disk reads, if `raw` or the preallocation of metadata
        /// maps it. It only becomes longer.
        pub keep: bool,
    }
}

impl NewDataFile {
    /// A data file of this name, which need not be the raw image of the disk.
    pub fn new(name: impl Into<OsString>) -> Self {
        NewDataFile {
            name: name.into(),
            raw: false,
            keep: false,
        }
    }
}

options! {
    /// The options of a new qcow2 image. The defaults are QEMU's; the size is 0.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct CreateQcow2 {
        /// Size of the disk in bytes, rounded up to a sector.
        pub size: u64,
        /// Version: 2 or 3.
        pub version: u32,
        /// Cluster size as a power of two.
        pub cluster_bits: u32,
        /// Refcount width as a power of two of bits.
        pub refcount_order: u32,
        /// Extended L2 entries.
        pub extended_l2: bool,
        /// Refcount updates may be postponed.
        pub lazy_refcounts: bool,
        /// The compression of compressed clusters.
        pub compression: Compression,
        /// What is allocated when the image is created.
        pub preallocation: Preallocation,
        /// The backing file. It is not opened.
        pub backing: Option<NewBacking>,
        /// The external data file.
        pub data_file: Option<NewDataFile>,
        /// How it is encrypted.
        pub encryption: Option<NewEncryption>,
    }
}

/// How a new image is encrypted: of the options of `encrypt.` by [`CreateQcow2::with_options`].
#[derive(Clone, Debug)]
pub struct NewEncryption(Arc<dyn drivers::NewEncryption>);

impl NewEncryption {
    /// Bytes of its header.
    fn length(&self) -> u64 {
        self.0.length()
    }
}

impl PartialEq for NewEncryption {
    /// Whether it is the same one: it has a key of its own.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for NewEncryption {}

impl Default for CreateQcow2 {
    fn default() -> Self {
        CreateQcow2 {
            size: 0,
            version: 3,
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2: false,
            lazy_refcounts: false,
            compression: Compression::Zlib,
            preallocation: Preallocation::Off,
            backing: None,
            data_file: None,
            encryption: None,
        }
    }
}

fn refuse<T>(why: impl Into<String>) -> Result<T> {
    Err(Error::Refused(why.into()))
}

impl CreateQcow2 {
    /// Checks that the options go together. Does no I/O.
    ///
    /// # Errors
    /// [`Error::Refused`] with QEMU's message.
    pub fn check(&self) -> Result<()> {
        Plan::new(self).map(drop)
    }

    fn check_combination(&self) -> Result<()> {
        let old = self.version < 3;
        let needs_v3 = |what: &str, only: &str| {
            refuse(format!(
                "{what} {only} compatibility level 1.1 {} above (use version=v3 or greater)",
                if only == "require" { "or" } else { "and" }
            ))
        };
        if !(MIN_CLUSTER_BITS..=MAX_CLUSTER_BITS).contains(&self.cluster_bits) {
            return refuse("Cluster size must be a power of two between 512 and 2048k");
        }
        if self.extended_l2 && old {
            return needs_v3("Extended L2 entries are", "only supported with");
        }
        if self.extended_l2 && self.cluster_bits < MIN_EXTENDED_L2_CLUSTER_BITS {
            return refuse(
                "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes",
            );
        }
        if self.backing.is_some() && self.preallocation != Preallocation::Off && !self.extended_l2 {
            return refuse(
                "Backing file and preallocation can only be used at the same time if extended_l2 \
                 is on",
            );
        }
        if self.lazy_refcounts && old {
            return needs_v3("Lazy refcounts", "only supported with");
        }
        if self.refcount_order > MAX_REFCOUNT_ORDER {
            return refuse("Refcount width must be a power of two and may not exceed 64 bits");
        }
        if self.refcount_order != 4 && old {
            return needs_v3("Different refcount widths than 16 bits", "require");
        }
        let backing = self.backing.iter().map(|backing| &backing.name);
        let names = backing.chain(self.data_file.iter().map(|data| &data.name));
        for name in names {
            check_recorded(name)?;
        }
        if let Some(data_file) = &self.data_file {
            if data_file.raw && self.backing.is_some() {
                return refuse("Backing file and data-file-raw cannot be used at the same time");
            }
            if old {
                return needs_v3("External data files are", "only supported with");
            }
            if data_file.keep && !data_file.raw && self.preallocation == Preallocation::Off {
                return refuse(
                    "'keep_data_file=on' requires 'preallocation=metadata' or 'data_file_raw=on', \
                     or the file contents will not be visible",
                );
            }
            let allocates = [Preallocation::Falloc, Preallocation::Full];
            if data_file.keep && allocates.contains(&self.preallocation) {
                return refuse(
                    "Preallocating more than only metadata would overwrite the external data \
                     file's content and is therefore incompatible with 'keep_data_file=on'",
                );
            }
        }
        if self.encryption.is_some() {
            let shows_zeroes = self.preallocation != Preallocation::Off
                || self
                    .data_file
                    .as_ref()
                    .is_some_and(|data| data.raw || data.keep);
            if shows_zeroes {
                return refuse(
                    "Encryption is not possible with preallocation, a raw data file or one that is kept: what \
                     was not written would not read as zeroes",
                );
            }
        }
        if self.compression != Compression::Zlib && old {
            return needs_v3("Non-zlib compression type is", "only supported with");
        }
        Ok(())
    }

    /// The header without its tables.
    pub(crate) fn header(&self) -> Result<Header> {
        let size = match self.size.checked_next_multiple_of(512) {
            Some(size) if size <= i64::MAX as u64 => size,
            _ => return refuse("Could not resize image: Image size cannot be negative"),
        };
        if size > MAX_SIZE {
            return refuse(format!(
                "Could not resize image: offset({size}) exceeds maximum({MAX_SIZE})"
            ));
        }
        let mut header = match self.version {
            2 => Header::new_v2(self.cluster_bits, size),
            _ => Header::new(self.cluster_bits, size),
        };
        header.refcount_order = self.refcount_order;
        header.set_extended_l2(self.extended_l2);
        header.set_compression(self.compression);
        if self.lazy_refcounts {
            header.compatible |= COMPATIBLE_LAZY_REFCOUNTS;
        }
        if let Some(data_file) = &self.data_file {
            header.set_incompatible(INCOMPATIBLE_DATA_FILE, true);
            header.set_data_file_name(Some(data_file.name.as_bytes()));
            if data_file.raw {
                header.autoclear |= AUTOCLEAR_DATA_FILE_RAW;
            }
        }
        if let Some(backing) = &self.backing {
            let format = backing.format.as_deref();
            let refused = |why: &str| {
                let format = format.map_or_else(String::new, |f| format!(" with format '{f}'"));
                refuse(format!(
                    "Could not assign backing file '{}'{format}: {why}",
                    backing.name.display()
                ))
            };
            if backing.name.len() > MAX_BACKING_NAME
                || format.is_some_and(|f| f.len() > MAX_BACKING_FORMAT)
            {
                return refused("Invalid argument");
            }
            header.set_backing(Some(backing.name.as_bytes()), format.map(str::as_bytes));
            if header.place_backing_name()? > header.cluster_size() {
                return refused("No space left on device");
            }
        }
        Ok(header)
    }
}

fn cluster_start(geometry: &Geometry, cluster: u64) -> Result<HostOffset, FormatError> {
    geometry
        .cluster_offset(cluster)
        .filter(|offset| offset.0 <= crate::drivers::qcow2::structures::OFFSET_MASK)
        .ok_or(FormatError::ImageTooBig)
}

/// Plans a new image of these options.
pub(super) fn plan(request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
    let image = CreateQcow2::with_options(request.size, request.options)?;
    Ok(Box::new(Plan::new(&image)?))
}

/// A new image before it is written.
#[derive(Debug)]
pub(crate) struct Plan {
    header: Header,
    geometry: Geometry,
    layout: Layout,
    preallocation: Preallocation,
    compression: Compression,
    data_file: Option<NewDataFile>,
    encryption: Option<NewEncryption>,
}

impl Plan {
    /// The image that the options mean.
    ///
    /// # Errors
    /// Those of [`CreateQcow2::check`].
    pub(crate) fn new(image: &CreateQcow2) -> Result<Plan> {
        image.check_combination()?;
        let mut header = image.header()?;
        let geometry = Geometry::new(&header)?;
        if geometry.l1_entries() * 8 > MAX_L1_BYTES {
            return refuse(
                "The image size is too large for file format 'qcow2' (try using a larger cluster \
                 size)",
            );
        }
        let mut layout = Layout::new(&geometry)?;
        let raw_data = image.data_file.as_ref().is_some_and(|d| d.raw);
        match image.preallocation {
            Preallocation::Off if !raw_data => {}
            Preallocation::Falloc | Preallocation::Full if image.data_file.is_none() => {
                layout.add_area(&geometry)?;
            }
            _ => layout.add_metadata(&geometry)?,
        }
        let at = |cluster| Ok::<_, FormatError>(cluster_start(&geometry, cluster)?.0);
        if let Some(encryption) = &image.encryption {
            let length = encryption.length();
            let first = layout.allocate(geometry.clusters_for(length))?;
            let offset = at(first)?;
            header.set_luks(CryptoExtension { offset, length });
        }
        header.l1_size = geometry.l1_entries() as u32; // At most 2^22.
        header.l1_offset = at(layout.l1)?;
        header.refcount_table_offset = at(layout.table)?;
        header.refcount_table_clusters = layout.table_clusters as u32; // At most 8 MiB.
        at(layout.end())?;
        header.unfinished = true;
        header.encode()?;
        Ok(Plan {
            header,
            geometry,
            layout,
            preallocation: image.preallocation,
            compression: image.compression,
            data_file: image.data_file.clone(),
            encryption: image.encryption.clone(),
        })
    }

    fn at(&self, cluster: u64) -> u64 {
        cluster << self.geometry.cluster_bits()
    }

    fn is_preallocated(&self) -> bool {
        !self.layout.l2.is_empty()
    }

    /// The end of the disk rounded up to what an L2 entry describes.
    fn size_in_subclusters(&self) -> u64 {
        (self.geometry.virtual_size()).next_multiple_of(self.geometry.subcluster_size())
    }

    /// Whether the disk shows what is in its clusters: not where each of them has a bitmap that says
    /// that none of its parts has data. A raw data file is the disk in any case.
    fn shows_data(&self) -> bool {
        self.is_preallocated()
            && (!self.geometry.has_extended_l2() || self.header.is_data_file_raw())
    }

    /// Bytes that are written, of the data too if these are zeroed.
    fn work(&self, is_zeroed: bool) -> u64 {
        let layout = &self.layout;
        let blocks = layout.blocks.iter().filter(|block| **block != 0).count();
        let tables = (layout.l2.len() + blocks) as u64 + layout.table_clusters;
        let data = match is_zeroed {
            true => self.geometry.virtual_size(),
            false => 0,
        };
        self.at(tables) + u64::from(self.header.l1_size) * 8 + data
    }

    async fn write_data_file(&self, new: &Making<'_>, data: &dyn Storage) -> Result<()> {
        let queue = new.queue;
        let size = self.geometry.virtual_size();
        storage::set_len(data, queue, size).await?;
        self.allocate(new, data, 0, size).await?;
        if self.is_preallocated() && !data.is_device() {
            let rest = self.size_in_subclusters() - size;
            storage::write_zeroes(data, queue, size, rest).await?;
        }
        storage::flush(data, queue).await?;
        Ok(())
    }

    /// Makes the data file as long as the disk, if it is shorter.
    async fn keep_data_file(&self, new: &Making<'_>, data: &dyn Storage) -> Result<()> {
        if data.len()? < self.geometry.virtual_size() {
            let size = self.size_in_subclusters();
            storage::set_len(data, new.queue, size).await?;
        }
        storage::flush(data, new.queue).await?;
        Ok(())
    }

    /// Writes all of the image, whose file has the mark and whose data file was emptied, except that
    /// its header still says that it is not finished.
    pub(crate) async fn write(
        &self,
        new: &Making<'_>,
        file: &dyn Storage,
        data: Option<&dyn Storage>,
    ) -> Result<()> {
        let is_zeroed = self.preallocation == Preallocation::Full
            || data.unwrap_or(file).is_device() && self.shows_data() && !self.keeps_others();
        new.report.plan(self.work(is_zeroed));
        match data {
            None => {}
            Some(data) if self.keeps_others() => self.keep_data_file(new, data).await?,
            Some(data) => self.write_data_file(new, data).await?,
        }
        self.write_data(new, file).await?;
        self.write_l2(new, file).await?;
        self.write_refcounts(new, file).await?;
        self.write_tables(new, file).await?;
        self.write_encryption(new, file).await?;
        let header = self.header.encode()?;
        Ok(storage::write_slice(file, new.queue, 0, &header).await?)
    }

    /// Writes the header of the encryption, in whole clusters.
    async fn write_encryption(&self, new: &Making<'_>, file: &dyn Storage) -> Result<()> {
        let place = self.header.extensions.crypto();
        let (Some(place), Some(NewEncryption(encryption))) = (place, &self.encryption) else {
            return Ok(());
        };
        let mut bytes = encryption.header()?;
        let clusters = self.geometry.clusters_for(place.length);
        bytes.resize(self.at(clusters) as usize, 0); // Some MiB.
        Ok(storage::write_slice(file, new.queue, place.offset, &bytes).await?)
    }

    /// How it is written.
    pub(crate) fn making<'a>(&self, queue: &'a Queue, report: &'a dyn Report) -> Making<'a> {
        Making {
            queue,
            report,
            preallocation: self.preallocation,
        }
    }

    /// Sets the length of the file, and allocates the data.
    async fn write_data(&self, new: &Making<'_>, file: &dyn Storage) -> Result<()> {
        let Some(last) = self.layout.data.last() else {
            return Ok(());
        };
        let (size, rounded) = (self.geometry.virtual_size(), self.size_in_subclusters());
        if let Some(area) = self.layout.area {
            let (start, end) = (self.at(area), self.at(self.layout.end()));
            storage::set_len(file, new.queue, end).await?;
            return self.allocate(new, file, start, end - start).await;
        }
        // The last cluster is complete, with zeroes.
        let first_of_last = (self.layout.data.len() as u64 - 1) << self.geometry.l2_coverage_bits();
        let at = self.at(*last) + (size - first_of_last);
        storage::set_len(file, new.queue, at + (rounded - size)).await?;
        storage::write_zeroes(file, new.queue, at, rounded - size).await?;
        for (first, clusters) in self.layout.data.iter().zip(data_of_tables(&self.geometry)) {
            let (start, length) = (self.at(*first), self.at(clusters));
            self.allocate(new, file, start, length).await?;
        }
        Ok(())
    }

    /// Takes the space of clusters of the disk.
    async fn allocate(
        &self,
        new: &Making<'_>,
        file: &dyn Storage,
        start: u64,
        length: u64,
    ) -> Result<()> {
        if !file.is_device() || new.preallocation == Preallocation::Full || self.shows_data() {
            new.allocate(file, start, length).await?;
        }
        Ok(())
    }

    async fn write_l2(&self, new: &Making<'_>, file: &dyn Storage) -> Result<()> {
        let geometry = &self.geometry;
        let mut out = Merged::new(*new, file);
        for (index, (l2, clusters)) in
            (self.layout.l2.iter().zip(data_of_tables(geometry))).enumerate()
        {
            let table = out
                .piece(self.at(*l2), geometry.cluster_size() as usize)
                .await?;
            let first = match self.layout.data.get(index) {
                Some(first) => self.at(*first),
                // In a data file, host offsets are guest offsets.
                None => (index as u64) << geometry.l2_coverage_bits(),
            };
            for i in 0..clusters {
                let host = HostOffset(first + self.at(i));
                let mut entry = L2Entry::data(host, true, geometry)?;
                if geometry.has_extended_l2() {
                    // Allocated, without data in any subcluster.
                    entry.bitmap = 0;
                }
                let inside = entry.write(table, i as usize, geometry);
                debug_assert!(inside, "a table has all its entries");
            }
        }
        out.finish().await
    }

    async fn write_refcounts(&self, new: &Making<'_>, file: &dyn Storage) -> Result<()> {
        let geometry = &self.geometry;
        let per_block = geometry.refcount_block_entries() as u64;
        let cluster_size = geometry.cluster_size() as usize;
        let full = RefcountBlock::new(vec![0; cluster_size], geometry);
        let full = fill(full, 0, per_block)?.into_inner();
        // Each block gets its part of the ranges in use.
        let mut out = Merged::new(*new, file);
        for (index, block) in self.layout.blocks.iter().enumerate() {
            if *block == 0 {
                continue;
            }
            let bytes = out.piece(self.at(*block), cluster_size).await?;
            let first = index as u64 * per_block;
            let last = first + per_block;
            let before = self.layout.used.range(..first).next_back();
            for (start, end) in before
                .into_iter()
                .chain(self.layout.used.range(first..last))
            {
                let (start, end) = ((*start).max(first), (*end).min(last));
                if (start, end) == (first, last) {
                    bytes.copy_from_slice(&full);
                } else if start < end {
                    fill(
                        RefcountBlock::new(&mut *bytes, geometry),
                        start - first,
                        end - first,
                    )?;
                }
            }
        }
        out.finish().await
    }

    /// Writes the refcount table and the L1 table.
    async fn write_tables(&self, new: &Making<'_>, file: &dyn Storage) -> Result<()> {
        let geometry = &self.geometry;
        let bytes = self.at(self.layout.table_clusters) as usize; // At most 8 MiB.
        let mut table = vec![0; bytes];
        for (entry, block) in table.chunks_exact_mut(8).zip(&self.layout.blocks) {
            if *block != 0 {
                let value = RefcountTableEntry::new(HostOffset(self.at(*block)), geometry)?;
                entry.copy_from_slice(&value.to_be_bytes());
            }
        }
        storage::write_slice(file, new.queue, self.at(self.layout.table), &table).await?;
        new.report.add(table.len() as u64)?;
        let mut l1 = vec![0; self.header.l1_size as usize * 8]; // At most 32 MiB.
        for (entry, l2) in l1.chunks_exact_mut(8).zip(&self.layout.l2) {
            let value = L1Entry::new(HostOffset(self.at(*l2)), true, geometry)?;
            entry.copy_from_slice(&value.to_be_bytes());
        }
        if !l1.is_empty() {
            storage::write_slice(file, new.queue, self.at(self.layout.l1), &l1).await?;
        }
        Ok(())
    }
}

impl ImagePlan for Plan {
    fn size(&self) -> u64 {
        self.geometry.virtual_size()
    }

    fn alignment(&self) -> u64 {
        self.geometry.cluster_size()
    }

    fn filling(&self) -> Filling {
        Filling::Qcow2(self.header.version)
    }

    fn other_files(&self) -> Vec<OsString> {
        let data = self.data_file.iter();
        data.map(|data| data.name.clone()).collect()
    }

    fn keeps_others(&self) -> bool {
        self.data_file.as_ref().is_some_and(|data| data.keep)
    }

    fn shows_file(&self) -> bool {
        self.keeps_others()
    }

    fn key(&self) -> Option<&Secret> {
        let NewEncryption(encryption) = self.encryption.as_ref()?;
        Some(encryption.secret())
    }

    fn compression(&self) -> Option<codec::Compression> {
        Some(match self.compression {
            Compression::Zstd => codec::Compression::Zstd,
            _ => codec::Compression::Zlib,
        })
    }

    /// The header's magic, and a version that does not exist.
    fn mark(&self) -> Result<Option<Vec<u8>>> {
        let mut mark = [MAGIC.to_be_bytes(), INCOMPLETE_VERSION.to_be_bytes()].concat();
        mark.resize(512, 0);
        Ok(Some(mark))
    }

    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>> {
        Box::pin(async move {
            let (file, data) = (files[0].clone(), files.get(1));
            let making = self.making(queue, &());
            self.write(&making, &*file, data.map(|data| &**data))
                .await?;
            let version = self.header.version;
            Ok(Box::new(NewQcow2 { file, version }) as Box<dyn NewImage>)
        })
    }
}

/// A qcow2 image that only lacks its version.
#[derive(Debug)]
struct NewQcow2 {
    file: Arc<dyn Storage>,
    version: u32,
}

impl NewImage for NewQcow2 {
    fn has_order(&self) -> bool {
        true
    }

    fn write<'a>(&'a self, _: &'a Queue, _: u64, _: Iov) -> BoxFuture<'a, Result<()>> {
        unreachable!("it is opened to be filled")
    }

    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { finish(&*self.file, queue, self.version).await })
    }
}

/// Makes an image valid that only lacks its version.
pub(crate) async fn finish(file: &dyn Storage, queue: &Queue, version: u32) -> Result<()> {
    make_valid(
        file,
        queue,
        size_of_val(&MAGIC) as u64,
        &version.to_be_bytes(),
    )
    .await
}

/// Sets the refcounts of entries `from` to `to` to 1.
fn fill<B: AsRef<[u8]> + AsMut<[u8]>>(
    mut block: RefcountBlock<B>,
    from: u64,
    to: u64,
) -> Result<RefcountBlock<B>, FormatError> {
    for entry in from..to {
        block.set(entry as usize, 1)?;
    }
    Ok(block)
}

/// Merges contiguous pieces into large writes.
struct Merged<'a> {
    new: Making<'a>,
    file: &'a dyn Storage,
    start: u64,
    bytes: Vec<u8>,
}

impl<'a> Merged<'a> {
    fn new(new: Making<'a>, file: &'a dyn Storage) -> Self {
        Merged {
            new,
            file,
            start: 0,
            bytes: Vec::new(),
        }
    }

    /// Space for the `length` bytes at `offset`, zeroes until they are set.
    async fn piece(&mut self, offset: u64, length: usize) -> Result<&mut [u8]> {
        let follows = self.start + self.bytes.len() as u64 == offset;
        if !follows || self.bytes.len() >= CHUNK {
            self.write().await?;
            self.start = offset;
        }
        let at = self.bytes.len();
        self.bytes.resize(at + length, 0);
        Ok(&mut self.bytes[at..])
    }

    async fn write(&mut self) -> Result<()> {
        if !self.bytes.is_empty() {
            storage::write_slice(self.file, self.new.queue, self.start, &self.bytes).await?;
            self.new.report.add(self.bytes.len() as u64)?;
            self.bytes.clear();
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<()> {
        self.write().await
    }
}
